"""The settings of FleetX, each with its type and what becomes of it."""

from gptworks.interop.settings import Key, number, truth, whole, words

LISTS = {
    "black": {"reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"},
    "white": {"lookup_table", "lookup_table_v2"},
}
_LINEAR = "a product and its bias are one call always (train.compile fuses what is around them); the same numbers"
TENSORS = "AdamW changes all tensors in one fused kernel always; the same numbers"
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
    "dataset.max_seq_len": whole, "dataset.num_samples": whole, "dataset.seed": whole, "dataset.eos_id": whole,
    "sampler.batch_size": whole, "sampler.shuffle": truth, "sampler.drop_last": truth,
}  # fmt: skip
_DATA_DEFAULTS = {"dataset.name": "GPTDataset", "sampler.name": "GPTBatchSampler", "dataset.eos_id": 50256}
KEYS = [
    Key("Global.device", words, default="gpu"),
    Key("Global.seed", whole, "train.seed", default=1024),
    Key("Global.global_batch_size", whole),
    Key("Global.local_batch_size", whole),
    Key("Global.micro_batch_size", whole),
    Key("Engine.max_steps", whole, "train.steps", default=500000),
    Key("Engine.num_train_epochs", whole, default=1),
    Key("Engine.run_mode", words, default="step"),
    Key("Engine.accumulate_steps", words, same="derived from local and micro batch size, as in FleetX"),
    Key("Engine.logging_freq", whole, "train.log_every", default=1),
    Key("Engine.eval_freq", whole, default=500),
    Key("Engine.eval_iters", whole, default=10),
    Key("Engine.test_iters", whole, why="the third share is measured by `gptworks eval --task heldout --split test`"),
    Key("Engine.mix_precision.use_pure_fp16", truth),
    Key("Engine.mix_precision.enable", truth),
    Key("Engine.mix_precision.dtype", words, default="float16"),
    Key("Engine.mix_precision.level", words, default="O2"),
    Key("Engine.mix_precision.scale_loss", number, default=32768.0),
    Key("Engine.mix_precision.use_main_grad", truth, same="gradients are summed in fp32 always"),
    Key("Engine.mix_precision.custom_black_list", words),
    Key("Engine.mix_precision.custom_white_list", words),
    Key("Engine.save_load.save_steps", whole, "checkpoint.every", default=1000),
    Key("Engine.save_load.save_epoch", whole, why="checkpoints are counted in steps: checkpoint.every"),
    Key("Engine.save_load.output_dir", words, default="./output"),
    Key("Engine.save_load.ckpt_dir", words),
    Key("Data.batch_size.global_batch_size", whole),
    Key("Data.batch_size.local_batch_size", whole),
    Key("Data.batch_size.micro_batch_size", whole),
    Key("Data.dataset.input_dir", words),
    Key("Data.dataset.split", words),
    Key("Data.dataset.max_seq_len", whole),
    *[
        Key(f"Data.{part}.{key}", _DATA_KINDS.get(key, words), default=_DATA_DEFAULTS.get(key))
        for part in ("Train", "Eval", "Test")
        for key in (
            "dataset.name", "dataset.input_dir", "dataset.split", "dataset.max_seq_len", "dataset.mode",
            "dataset.num_samples", "dataset.model_type", "dataset.seed", "dataset.eos_id", "sampler.name",
            "sampler.batch_size", "sampler.shuffle", "sampler.drop_last", "loader.num_workers", "loader.return_list",
            "loader.collate_fn",
        )
    ],
    Key("Model.module", words, same="the kind of task follows from the program that is run"),
    Key("Model.name", words, same="there is one model"),
    Key("Model.vocab_size", whole, default=50304),
    Key("Model.vocab_size_divisible_unit", whole, default=128),
    Key("Model.hidden_size", whole, "model.hidden_size", default=2048),
    Key("Model.num_layers", whole, "model.num_layers", default=24),
    Key("Model.num_attention_heads", whole, "model.num_heads", default=16),
    Key("Model.ffn_hidden_size", whole),
    Key("Model.hidden_dropout_prob", number, default=0.1),
    Key("Model.attention_probs_dropout_prob", number, "model.dropout_attention", default=0.1),
    Key("Model.max_position_embeddings", whole, "model.max_positions", default=1024),
    Key("Model.type_vocab_size", whole, same="FleetX takes it and does not use it"),
    Key("Model.initializer_range", number, "init.std", default=0.02),
    Key("Model.use_recompute", truth, default=True),
    Key("Model.recompute_granularity", words, default="full"),
    Key("Model.no_recompute_layers", words),
    Key("Model.fused_linear", truth, same=_LINEAR),
    Key("Model.fuse_attn_qkv", truth, same="QKV is one matrix here always"),
    Key("Model.scale_qk_by_layer_num", truth, same="divides and multiplies by the same number"),
    Key("Model.sequence_parallel", truth, default=False),
    Key("Model.use_flash_attn", truth, same="torch's fastest attention is used always (model.attention: auto)"),
    Key("Model.fused_softmax_with_triangular", truth, same=_FUSED),
    Key("Model.virtual_pp_degree", whole, default=1),
    Key("Distributed.dp_degree", whole),
    Key("Distributed.mp_degree", whole, "parallel.tp", default=1),
    Key("Distributed.pp_degree", whole, "parallel.pp", default=1),
    Key("Distributed.sharding.sharding_degree", whole, default=1),
    Key("Distributed.sharding.sharding_stage", whole),
    Key("Distributed.sharding.sharding_offload", truth, default=False),
    Key("Distributed.sharding.reduce_overlap", truth, same="communication overlaps wherever torch can"),
    Key("Distributed.sharding.broadcast_overlap", truth, same="communication overlaps wherever torch can"),
    Key("Distributed.pp_recompute_interval", whole, why="every block is recomputed, or none"),
    Key("Distributed.fuse_sequence_parallel_allreduce", truth, same="those gradients are always summed in one message"),
    Key("Fused.tensor_fusion", truth, default=False),
    Key("Optimizer.name", words),
    Key("Optimizer.weight_decay", number, "optim.weight_decay", default=0.0),
    Key("Optimizer.adam_beta1", number),
    Key("Optimizer.adam_beta2", number),
    Key("Optimizer.adam_epsilon", number),
    Key("Optimizer.beta1", number),
    Key("Optimizer.beta2", number),
    Key("Optimizer.epsilon", number),
    Key("Optimizer.multi_precision", truth, same="parameters are fp32 masters here always"),
    Key("Optimizer.tensor_fusion", truth, default=False),
    Key("Optimizer.lr.name", words),
    Key("Optimizer.lr.decay_steps", whole, default=360000),
    Key("Optimizer.lr.max_steps", whole, same="FleetX does not use it"),
    Key("Optimizer.lr.warmup_rate", number, default=0.01),
    Key("Optimizer.lr.max_lr", number, default=1e-5),
    Key("Optimizer.lr.min_lr", number, default=5e-5),
    Key("Optimizer.lr.use_increments", truth),
    Key("Optimizer.grad_clip", number),
    Key("Optimizer.grad_clip.name", words, same="by the global norm, the only way here"),
    Key("Optimizer.grad_clip.clip_norm", number),
    Key("Inference.model_dir", words, same="for run_inference.py; here `gptworks infer DIR`"),
    Key("Inference.mp_degree", whole, same="for run_inference.py; here `gptworks infer DIR`"),
    Key("Generation.top_k", whole, "generate.top_k", default=5),
    Key("Generation.top_p", number, "generate.top_p", default=1.0),
    Key("Generation.temperature", number, "generate.temperature", default=1.0),
    Key("Generation.min_dec_len", whole, "generate.min_new_tokens", default=1),
    Key("Generation.max_dec_len", whole, default=16),
    Key("Generation.num_return_sequences", whole, "generate.num_return_sequences", default=1),
    Key("Generation.decode_strategy", words, default="sampling"),
    Key("Generation.num_beams", whole, default=0),
    Key("Generation.length_penalty", number, default=1.0),
    Key("Generation.early_stopping", truth, default=False),
    Key("Generation.use_topp_sampling", truth, same=_FUSED),
    Key("Generation.inference", truth, same="for their exported graph"),
    Key("Offline_Eval.eval_path", words, same="`gptworks eval --data`"),
    Key("Offline_Eval.cloze_eval", truth, same="`gptworks eval --task lambada`"),
    Key("Offline_Eval.overlapping_eval", whole, same="`gptworks eval --overlap`"),
    Key("Offline_Eval.batch_size", whole, same="`gptworks eval --batch-size`"),
    Key("Offline_Eval.max_seq_len", whole, same="windows are as long as the model's context"),
    Key("Offline_Eval.logging_freq", whole, same="a progress bar shows where it is"),
    *[Key(name, words) for names in OFF for name in names],
    Key("Profiler.enable", truth, default=False),
    Key("Profiler.scheduler", words),
    *[
        Key(f"Profiler.{key}", words, why="the trace of train.profile holds all of it")
        for key in (
            "profiler_log", "detailed", "timer_only", "record_shapes", "profile_memory", "summary.overview",
            "summary.device", "summary.model", "summary.dist", "summary.kernel", "summary.op", "summary.mem",
            "summary.memcpy",
        )
    ],
]  # fmt: skip
