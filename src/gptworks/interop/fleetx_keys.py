"""The settings of FleetX, each with its type and what becomes of it."""

from gptworks.interop.settings import Key, parse_bool, parse_float, parse_int, parse_str

LISTS = {
    "black": {"reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"},
    "white": {"lookup_table", "lookup_table_v2"},
}
_LINEAR = "a product and its bias are always one call (train.compile fuses what is around them); the same numbers"
TENSORS = "AdamW always changes all tensors in one fused kernel; the same numbers"
_FUSED = "a choice of kernels, not of numbers; torch chooses"

# What is not done here; each list begins with the switch that their files turn off.
OFF = [
    [f"{block}.{key}" for key in ("enable", "weight_quantize_type", "activation_quantize_type", "weight_bits",
        "activation_bits", "quantizable_layer_type", "onnx_format", "weight_preprocess_type",
        "activation_preprocess_type", "freeze_embedding", "skip_tensor_map")]
    for block in ("Quantization", "Compress.Quantization")
]  # fmt: skip
OFF += [
    ["Compress.Prune.enable", "Compress.Prune.criterion", "Compress.Prune.ratio"],
    ["Compress.Distillation.enable"],
    ["Compress.pretrained"],
    ["Compress.Quantization"],
    ["Compress.Prune"],
    ["Compress.Distillation"],
    [f"Tuning.{key}" for key in ("enable", "tuning_recompute", "profile_start_step", "profile_end_step", "verbose")],
]
INSTEAD = {
    "Quantization": "no training with quantization; `--weights int8` when generating",
    "Compress": "no training with quantization, no pruning, no distillation",
    "Tuning": "a layout is chosen by hand here",
}

_DATA_KINDS = {
    "dataset.max_seq_len": parse_int, "dataset.num_samples": parse_int, "dataset.seed": parse_int,
    "dataset.eos_id": parse_int,
    "sampler.batch_size": parse_int, "sampler.shuffle": parse_bool, "sampler.drop_last": parse_bool,
}  # fmt: skip
_DATA_DEFAULTS = {"dataset.name": "GPTDataset", "sampler.name": "GPTBatchSampler", "dataset.eos_id": 50256}
KEYS = [
    Key("Global.device", parse_str, default="gpu"),
    Key("Global.seed", parse_int, "train.seed", default=1024),
    Key("Global.global_batch_size", parse_int),
    Key("Global.local_batch_size", parse_int),
    Key("Global.micro_batch_size", parse_int),
    Key("Engine.max_steps", parse_int, "train.steps", default=500000),
    Key("Engine.num_train_epochs", parse_int, default=1),
    Key("Engine.run_mode", parse_str, default="step"),
    Key("Engine.accumulate_steps", parse_str, same_effect="derived from local and micro batch size, as in FleetX"),
    Key("Engine.logging_freq", parse_int, "train.log_every", default=1),
    Key("Engine.eval_freq", parse_int, default=500),
    Key("Engine.eval_iters", parse_int, default=10),
    Key("Engine.test_iters", parse_int,
        ignored_because="the third share is measured by `gptworks eval --task heldout --split test`"),
    Key("Engine.mix_precision.use_pure_fp16", parse_bool),
    Key("Engine.mix_precision.enable", parse_bool),
    Key("Engine.mix_precision.dtype", parse_str, default="float16"),
    Key("Engine.mix_precision.level", parse_str, default="O2"),
    Key("Engine.mix_precision.scale_loss", parse_float, default=32768.0),
    Key("Engine.mix_precision.use_main_grad", parse_bool, same_effect="gradients are always summed in fp32"),
    Key("Engine.mix_precision.custom_black_list", parse_str),
    Key("Engine.mix_precision.custom_white_list", parse_str),
    Key("Engine.save_load.save_steps", parse_int, "checkpoint.every", default=1000),
    Key("Engine.save_load.save_epoch", parse_int, ignored_because="checkpoints are counted in steps: checkpoint.every"),
    Key("Engine.save_load.output_dir", parse_str, default="./output"),
    Key("Engine.save_load.ckpt_dir", parse_str),
    Key("Data.batch_size.global_batch_size", parse_int),
    Key("Data.batch_size.local_batch_size", parse_int),
    Key("Data.batch_size.micro_batch_size", parse_int),
    Key("Data.dataset.input_dir", parse_str),
    Key("Data.dataset.split", parse_str),
    Key("Data.dataset.max_seq_len", parse_int),
    *[
        Key(f"Data.{section}.{key}", _DATA_KINDS.get(key, parse_str), default=_DATA_DEFAULTS.get(key))
        for section in ("Train", "Eval", "Test")
        for key in (
            "dataset.name", "dataset.input_dir", "dataset.split", "dataset.max_seq_len", "dataset.mode",
            "dataset.num_samples", "dataset.model_type", "dataset.seed", "dataset.eos_id", "sampler.name",
            "sampler.batch_size", "sampler.shuffle", "sampler.drop_last", "loader.num_workers", "loader.return_list",
            "loader.collate_fn",
        )
    ],
    Key("Model.module", parse_str, same_effect="the kind of task follows from the program that is run"),
    Key("Model.name", parse_str, same_effect="there is one model"),
    Key("Model.vocab_size", parse_int, default=50304),
    Key("Model.vocab_size_divisible_unit", parse_int, default=128),
    Key("Model.hidden_size", parse_int, "model.hidden_size", default=2048),
    Key("Model.num_layers", parse_int, "model.num_layers", default=24),
    Key("Model.num_attention_heads", parse_int, "model.num_heads", default=16),
    Key("Model.ffn_hidden_size", parse_int),
    Key("Model.hidden_dropout_prob", parse_float, default=0.1),
    Key("Model.attention_probs_dropout_prob", parse_float, "model.dropout_attention", default=0.1),
    Key("Model.max_position_embeddings", parse_int, "model.max_positions", default=1024),
    Key("Model.type_vocab_size", parse_int, same_effect="FleetX takes it and does not use it"),
    Key("Model.initializer_range", parse_float, "init.std", default=0.02),
    Key("Model.use_recompute", parse_bool, default=True),
    Key("Model.recompute_granularity", parse_str, default="full"),
    Key("Model.no_recompute_layers", parse_str),
    Key("Model.fused_linear", parse_bool, same_effect=_LINEAR),
    Key("Model.fuse_attn_qkv", parse_bool, same_effect="QKV is always one matrix here"),
    Key("Model.scale_qk_by_layer_num", parse_bool, same_effect="divides and multiplies by the same number"),
    Key("Model.sequence_parallel", parse_bool, default=False),
    Key("Model.use_flash_attn", parse_bool,
        same_effect="torch's fastest attention is always used (model.attention: auto)"),
    Key("Model.fused_softmax_with_triangular", parse_bool, same_effect=_FUSED),
    Key("Model.virtual_pp_degree", parse_int, default=1),
    Key("Distributed.dp_degree", parse_int),
    Key("Distributed.mp_degree", parse_int, "parallel.tp", default=1),
    Key("Distributed.pp_degree", parse_int, "parallel.pp", default=1),
    Key("Distributed.sharding.sharding_degree", parse_int, default=1),
    Key("Distributed.sharding.sharding_stage", parse_int),
    Key("Distributed.sharding.sharding_offload", parse_bool, default=False),
    Key("Distributed.sharding.reduce_overlap", parse_bool, same_effect="communication overlaps wherever torch can"),
    Key("Distributed.sharding.broadcast_overlap", parse_bool, same_effect="communication overlaps wherever torch can"),
    Key("Distributed.pp_recompute_interval", parse_int, ignored_because="every block is recomputed, or none"),
    Key("Distributed.fuse_sequence_parallel_allreduce", parse_bool,
        same_effect="those gradients are always summed in one message"),
    Key("Fused.tensor_fusion", parse_bool, default=False),
    Key("Optimizer.name", parse_str),
    Key("Optimizer.weight_decay", parse_float, "optim.weight_decay", default=0.0),
    Key("Optimizer.adam_beta1", parse_float),
    Key("Optimizer.adam_beta2", parse_float),
    Key("Optimizer.adam_epsilon", parse_float),
    Key("Optimizer.beta1", parse_float),
    Key("Optimizer.beta2", parse_float),
    Key("Optimizer.epsilon", parse_float),
    Key("Optimizer.multi_precision", parse_bool, same_effect="parameters are always fp32 masters here"),
    Key("Optimizer.tensor_fusion", parse_bool, default=False),
    Key("Optimizer.lr.name", parse_str),
    Key("Optimizer.lr.decay_steps", parse_int, default=360000),
    Key("Optimizer.lr.max_steps", parse_int, same_effect="FleetX does not use it"),
    Key("Optimizer.lr.warmup_rate", parse_float, default=0.01),
    Key("Optimizer.lr.max_lr", parse_float, default=1e-5),
    Key("Optimizer.lr.min_lr", parse_float, default=5e-5),
    Key("Optimizer.lr.use_increments", parse_bool),
    Key("Optimizer.grad_clip", parse_float),
    Key("Optimizer.grad_clip.name", parse_str, same_effect="by the global norm, the only way here"),
    Key("Optimizer.grad_clip.clip_norm", parse_float),
    Key("Inference.model_dir", parse_str, same_effect="for run_inference.py; here `gptworks infer DIR`"),
    Key("Inference.mp_degree", parse_int, same_effect="for run_inference.py; here `gptworks infer DIR`"),
    Key("Generation.top_k", parse_int, "generate.top_k", default=5),
    Key("Generation.top_p", parse_float, "generate.top_p", default=1.0),
    Key("Generation.temperature", parse_float, "generate.temperature", default=1.0),
    Key("Generation.min_dec_len", parse_int, "generate.min_new_tokens", default=1),
    Key("Generation.max_dec_len", parse_int, default=16),
    Key("Generation.num_return_sequences", parse_int, "generate.num_return_sequences", default=1),
    Key("Generation.decode_strategy", parse_str, default="sampling"),
    Key("Generation.num_beams", parse_int, default=0),
    Key("Generation.length_penalty", parse_float, default=1.0),
    Key("Generation.early_stopping", parse_bool, default=False),
    Key("Generation.use_topp_sampling", parse_bool, same_effect=_FUSED),
    Key("Generation.inference", parse_bool, same_effect="for their exported graph"),
    Key("Offline_Eval.eval_path", parse_str, same_effect="`gptworks eval --data`"),
    Key("Offline_Eval.cloze_eval", parse_bool, same_effect="`gptworks eval --task lambada`"),
    Key("Offline_Eval.overlapping_eval", parse_int, same_effect="`gptworks eval --overlap`"),
    Key("Offline_Eval.batch_size", parse_int, same_effect="`gptworks eval --batch-size`"),
    Key("Offline_Eval.max_seq_len", parse_int, same_effect="windows are as long as the model's context"),
    Key("Offline_Eval.logging_freq", parse_int, same_effect="a progress bar shows where it is"),
    *[Key(name, parse_str) for names in OFF for name in names],
    Key("Profiler.enable", parse_bool, default=False),
    Key("Profiler.scheduler", parse_str),
    *[
        Key(f"Profiler.{key}", parse_str, ignored_because="the trace of train.profile holds all of it")
        for key in (
            "profiler_log", "detailed", "timer_only", "record_shapes", "profile_memory", "summary.overview",
            "summary.device", "summary.model", "summary.dist", "summary.kernel", "summary.op", "summary.mem",
            "summary.memcpy",
        )
    ],
]  # fmt: skip
