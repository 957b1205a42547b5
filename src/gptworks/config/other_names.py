"""What other tools call a setting of ours. An unknown key or option is answered from here before its spelling is
looked at, and `interop/` takes from here what it can hand over as it is.

A name is in small letters with underscores, whatever its tool puts before it: `--num-layers`, `train.max_iters`.
"""

import difflib

NANOGPT: dict[str, tuple[str, ...]] = {
    "out_dir": ("run.out",),
    "eval_interval": ("evaluate.every",),
    "eval_iters": ("evaluate.batches",),
    "log_interval": ("train.log_every",),
    "init_from": ("init.checkpoint",),
    "dataset": ("data.path",),
    "gradient_accumulation_steps": ("batch.accumulation",),
    "batch_size": ("batch.global_size", "batch.micro_size"),
    "block_size": ("data.seq_len", "model.max_positions"),
    "n_layer": ("model.num_layers",),
    "n_head": ("model.num_heads",),
    "n_embd": ("model.hidden_size",),
    "dropout": ("model.dropout_embed", "model.dropout_hidden", "model.dropout_attention"),
    "learning_rate": ("optim.lr",),
    "max_iters": ("train.steps",),
    "weight_decay": ("optim.weight_decay",),
    "beta1": ("optim.beta1",),
    "beta2": ("optim.beta2",),
    "grad_clip": ("optim.clip",),
    "warmup_iters": ("optim.warmup_steps",),
    "lr_decay_iters": ("optim.decay_steps",),
    "wandb_log": ("run.track",),
    "dtype": ("precision.compute",),
    "compile": ("train.compile",),
    "num_samples": ("generate.num_return_sequences",),
}
MEGATRON: dict[str, tuple[str, ...]] = {
    "num_layers": ("model.num_layers",),
    "hidden_size": ("model.hidden_size",),
    "num_attention_heads": ("model.num_heads",),
    "ffn_hidden_size": ("model.ffn_size",),
    "max_position_embeddings": ("model.max_positions",),
    "seq_length": ("data.seq_len",),
    "attention_dropout": ("model.dropout_attention",),
    "hidden_dropout": ("model.dropout_hidden",),
    "weight_decay": ("optim.weight_decay",),
    "clip_grad": ("optim.clip",),
    "adam_beta1": ("optim.beta1",),
    "adam_beta2": ("optim.beta2",),
    "adam_eps": ("optim.eps",),
    "micro_batch_size": ("batch.micro_size",),
    "global_batch_size": ("batch.global_size",),
    "train_iters": ("train.steps",),
    "min_lr": ("optim.min_lr",),
    "lr_decay_style": ("optim.schedule",),
    "lr_warmup_iters": ("optim.warmup_steps",),
    "init_method_std": ("init.std",),
    "fp16": ("precision.compute",),
    "bf16": ("precision.compute",),
    "initial_loss_scale": ("precision.scaler.init",),
    "loss_scale_window": ("precision.scaler.window",),
    "tensor_model_parallel_size": ("parallel.tp",),
    "pipeline_model_parallel_size": ("parallel.pp",),
    "data_path": ("data.path",),
    "split": ("data.split",),
    "load": ("init.checkpoint",),
    "save": ("run.out",),
    "save_interval": ("checkpoint.every",),
    "log_interval": ("train.log_every",),
    "recompute_granularity": ("train.recompute",),
}
# Trainer and GPT2Config of Hugging Face, and its generate().
HUGGING_FACE: dict[str, tuple[str, ...]] = {
    "output_dir": ("run.out",),
    "model_name_or_path": ("init.checkpoint",),
    "report_to": ("run.track",),
    "per_device_train_batch_size": ("batch.micro_size",),
    "per_device_eval_batch_size": ("evaluate.batches",),
    "num_train_epochs": ("train.epochs",),
    "max_steps": ("train.steps",),
    "warmup_ratio": ("optim.warmup_steps",),
    "lr_scheduler_type": ("optim.schedule",),
    "logging_steps": ("train.log_every",),
    "eval_steps": ("evaluate.every",),
    "save_steps": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep_last",),
    "load_best_model_at_end": ("checkpoint.keep_best",),
    "early_stopping_patience": ("evaluate.patience",),
    "max_grad_norm": ("optim.clip",),
    "adam_epsilon": ("optim.eps",),
    "gradient_checkpointing": ("train.recompute",),
    "torch_compile": ("train.compile",),
    "max_seq_length": ("data.seq_len",),
    "n_positions": ("model.max_positions",),
    "n_ctx": ("model.max_positions",),
    "n_inner": ("model.ffn_size",),
    "num_hidden_layers": ("model.num_layers",),
    "intermediate_size": ("model.ffn_size",),
    "embd_pdrop": ("model.dropout_embed",),
    "resid_pdrop": ("model.dropout_hidden",),
    "attn_pdrop": ("model.dropout_attention",),
    "layer_norm_epsilon": ("model.layernorm_eps",),
    "activation_function": ("model.gelu",),
    "tie_word_embeddings": ("model.tied",),
    "initializer_range": ("init.std",),
    "max_length": ("generate.max_new_tokens", "data.seq_len"),
    "do_sample": ("generate.strategy",),
    "no_repeat_ngram_size": ("generate.no_repeat_ngram",),
}
LITGPT: dict[str, tuple[str, ...]] = {
    "lr_warmup_steps": ("optim.warmup_steps",),
    "max_tokens": ("train.tokens", "generate.max_new_tokens"),
    "max_norm": ("optim.clip",),
    "tie_embeddings": ("model.tied",),
    "padded_vocab_size": ("model.vocab_size",),
    "checkpoint_dir": ("init.checkpoint",),
    "initial_checkpoint_dir": ("init.checkpoint",),
    "norm_eps": ("model.layernorm_eps",),
}
# FleetX, PaddleNLP, MindFormers; and what people say.
OTHERS: dict[str, tuple[str, ...]] = {
    "max_lr": ("optim.lr",),
    "logging_freq": ("train.log_every",),
    "eval_freq": ("evaluate.every",),
    "dp_degree": ("parallel.dp",),
    "mp_degree": ("parallel.tp",),
    "pp_degree": ("parallel.pp",),
    "sharding_degree": ("parallel.fsdp",),
    "sharding_stage": ("parallel.zero",),
    "data_parallel": ("parallel.dp",),
    "model_parallel": ("parallel.tp",),
    "pipeline_stage": ("parallel.pp",),
    "use_recompute": ("train.recompute",),
    "n_layers": ("model.num_layers",),
    "layers": ("model.num_layers",),
    "depth": ("model.num_layers",),
    "n_heads": ("model.num_heads",),
    "heads": ("model.num_heads",),
    "hidden_dim": ("model.hidden_size",),
    "embed_dim": ("model.hidden_size",),
    "embedding_size": ("model.hidden_size",),
    "d_model": ("model.hidden_size",),
    "dim": ("model.hidden_size",),
    "width": ("model.hidden_size",),
    "ffn_dim": ("model.ffn_size",),
    "d_ff": ("model.ffn_size",),
    "context": ("data.seq_len", "model.max_positions"),
    "context_length": ("data.seq_len", "model.max_positions"),
    "ctx_len": ("data.seq_len", "model.max_positions"),
    "n_vocab": ("model.vocab_size",),
    "iters": ("train.steps",),
    "iterations": ("train.steps",),
    "num_steps": ("train.steps",),
    "num_epochs": ("train.epochs",),
    "wd": ("optim.weight_decay",),
    "warmup": ("optim.warmup_steps",),
    "scheduler": ("optim.schedule",),
    "lr_schedule": ("optim.schedule",),
    "grad_accum": ("batch.accumulation",),
    "accumulate": ("batch.accumulation",),
    "precision": ("precision.compute",),
    "data": ("data.path",),
    "data_dir": ("data.path",),
    "train_data": ("data.path",),
    "data_file": ("data.path",),
    "dataset_path": ("data.path",),
    "train_path": ("data.path",),
    "train_file": ("data.path",),
    "val_data": ("data.held_out_path",),
    "val_path": ("data.held_out_path",),
    "val_file": ("data.held_out_path",),
    "valid_path": ("data.held_out_path",),
    "validation_file": ("data.held_out_path",),
    "validation_path": ("data.held_out_path",),
    "eval_data": ("data.held_out_path",),
    "eval_file": ("data.held_out_path",),
    "eval_path": ("data.held_out_path",),
    "text_column": ("data.key",),
    "column": ("data.key",),
    "temp": ("generate.temperature",),
    "samples": ("generate.num_return_sequences",),
    "resume_from_checkpoint": ("--resume",),
    "patience": ("evaluate.patience",),
    "length": ("generate.max_new_tokens",),
    "n_predict": ("generate.max_new_tokens",),
    "max_new": ("generate.max_new_tokens",),
    "num_sequences": ("generate.num_return_sequences",),
    "repeat_penalty": ("generate.repetition_penalty",),
}
# What other tools call a value: key -> their word -> ours.
_VALUES = {
    "precision.compute": {
        **dict.fromkeys(("float32", "32", "32-true", "single", "no"), "fp32"),
        **dict.fromkeys(("float16", "half", "16-mixed", "16-true"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true", "mixed", "amp"), "bf16"),
    },
    "run.device": dict.fromkeys(("gpu", "nvidia", "cuda:0"), "cuda") | {"metal": "mps"},
    "optim.schedule": {
        "linear_with_warmup": "linear",
        "cosine_with_warmup": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
}
# What others have as a setting and is one way only here.
NOT_A_SETTING = {
    **dict.fromkeys(("optimizer", "optim.name", "optim.type", "optim.optimizer", "optimizer_type"), "it is AdamW"),
    "norm_first": "norms come before attention and feed-forward here, as in GPT-2",
    "activation": "model.mlp says gelu or swiglu, and model.gelu which form of the former",
}
_ALL: dict[str, tuple[str, ...]] = OTHERS | LITGPT | HUGGING_FACE | MEGATRON | NANOGPT


def find(name: str) -> tuple[str, ...]:
    """The dotted keys of ours that another tool's name may mean; none where no tool is known to have it.

    >>> find("--learning-rate"), find("train.max_iters"), find("nobody_has_this")
    (('optim.lr',), ('train.steps',), ())
    """
    last = _last(name)
    near = [last] if last in _ALL else difflib.get_close_matches(last, _ALL, 1, 0.9)
    return _ALL[near[0]] if near else ()


def why_not(name: str) -> str:
    """Why there is no such setting, where others have one.

    >>> why_not("model.norm_first")
    'norms come before attention and feed-forward here, as in GPT-2'
    """
    return NOT_A_SETTING.get(name.lower()) or NOT_A_SETTING.get(_last(name), "")


def value(key: str, theirs: object) -> str:
    """What another tool's word for a value of ours is called here.

    >>> value("precision.compute", "float16"), value("precision.compute", "f")
    ('fp16', '')
    """
    return _VALUES.get(key, {}).get(str(theirs).lower(), "")


def _last(name: str) -> str:
    return name.lower().replace("-", "_").rpartition(".")[2].strip("_")
