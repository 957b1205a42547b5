"""The settings of MindFormers' GPT-2: every key of its YAML, and the flags that stand for some of them.

A key in lists of callbacks is written callbacks.TYPE.KEY, and callbacks.TYPE alone says that the callback is there.
"""

from gptworks.interop.settings import Key, parse_bool, parse_float, parse_int, parse_str

_GRAPH = "about MindSpore's graphs and devices; torch has neither"
_CLOUD = "it does something in Huawei's cloud only"
_MASTERS = "parameters are always fp32 masters here"
_EXACT = "LayerNorm and softmax are always computed in fp32 here"
_SAME_NUMBERS = "a matter of communication, not of numbers"
_LAYOUT = "MindSpore's way to split a graph; here the layout is in the parallel section"
_WORKERS = "reading is a memory map: no workers, nothing to prefetch"
_TASK = "the kind of task follows from the model, which is GPT-2"
_AUTOTUNE = "nothing to tune: reading is a memory map"
_TUNING = ("auto_tune", "filepath_prefix", "autotune_per_step")
_TRAINED = "what a run that goes on has done is in its checkpoint"
_TOKENIZER = "the tokenizer of GPT-2, which comes with gptworks"
_LAYERWISE = "no rates by layer in pretraining"
_MEAN = "the loss is the mean over all tokens of the batch, and so are gradients"
_COLUMNS = "the column input_ids of the rows is read; it is all there is to it"
_OTHER_MODEL = "of later models; GPT-2 does not look at it"


def _datasets() -> list[Key]:
    keys = []
    for part in ("train_dataset", "eval_dataset"):
        keys += [
            Key(f"{part}.data_loader.type", parse_str, same_effect="the format is seen in the files"),
            Key(f"{part}.data_loader.dataset_dir", parse_str),
            Key(f"{part}.data_loader.shuffle", parse_bool, default=True),
            Key(f"{part}.data_loader.num_samples", parse_int),
            Key(f"{part}.input_columns", parse_str, same_effect=_COLUMNS),
            Key(f"{part}.output_columns", parse_str, same_effect=_COLUMNS),
            Key(f"{part}.drop_remainder", parse_bool, ignored_because="a run is always whole batches",
                harmless_values=("true",)),
            Key(f"{part}.batch_size", parse_int, same_effect="MindFormers puts runner_config.batch_size in its place"),
            Key(f"{part}.repeat", parse_int, default=1),
            Key(f"{part}.eod_reset", parse_bool, ignored_because="data.reset_attention and its like do it",
                harmless_values=("false",)),
            *[
                Key(f"{part}.{key}", parse_str, same_effect=_WORKERS)
                for key in ("num_parallel_workers", "python_multiprocessing", "numa_enable", "prefetch_size", "do_eval")
            ],
            *[Key(f"{part}.{key}", parse_str, same_effect=_AUTOTUNE) for key in _TUNING],
            Key(f"{part}.profile", parse_bool, ignored_because="train.profile has it all"),
            Key(f"{part}.tokenizer.type", parse_str, same_effect="the rows are tokens already"),
            Key(f"{part}.tokenizer.max_length", parse_int, same_effect="the rows are tokens already"),
            Key(f"{part}.seed", parse_int, ignored_because="the order follows from seed"),
            Key(f"{part}_task.type", parse_str, same_effect=_TASK),
            # An anchor in YAML: the same block again.
            *[
                Key(f"{part}_task.dataset_config.{key}", parse_str, same_effect=f"the same as {part}.{key}")
                for key in (
                    "data_loader.type", "data_loader.dataset_dir", "data_loader.shuffle", "data_loader.num_samples",
                    "input_columns", "output_columns", "drop_remainder", "batch_size", "repeat", "eod_reset",
                    "num_parallel_workers", "python_multiprocessing", "numa_enable", "prefetch_size", "do_eval",
                    "auto_tune", "filepath_prefix", "autotune_per_step", "profile", "tokenizer.type",
                    "tokenizer.max_length", "seed",
                )
            ],
        ]  # fmt: skip
    return keys


def _callbacks() -> list[Key]:
    return [
        Key("callbacks.MFLossMonitor", parse_str, same_effect="the losses are in the log and in metrics.jsonl"),
        Key("callbacks.MFLossMonitor.per_print_times", parse_int, "train.log_every", default=1),
        Key(
            "callbacks.SummaryMonitor",
            parse_str,
            same_effect="the scalars are in metrics.jsonl and TensorBoard's files",
        ),
        *[
            Key(
                f"callbacks.SummaryMonitor.{key}",
                parse_str,
                same_effect="the scalars are in metrics.jsonl and TensorBoard's files",
            )
            for key in ("summary_dir", "collect_freq", "keep_default_action", "max_file_size")
        ],
        Key("callbacks.CheckpointMointor", parse_str),  # their spelling
        Key("callbacks.CheckpointMointor.prefix", parse_str, default="CKP"),
        Key("callbacks.CheckpointMointor.directory", parse_str),
        Key("callbacks.CheckpointMointor.save_checkpoint_steps", parse_int, default=1),
        Key(
            "callbacks.CheckpointMointor.save_checkpoint_seconds",
            parse_int,
            ignored_because="checkpoints are counted in steps",
        ),
        Key("callbacks.CheckpointMointor.keep_checkpoint_max", parse_int, default=5),
        Key(
            "callbacks.CheckpointMointor.keep_checkpoint_per_n_minutes",
            parse_int,
            ignored_because="checkpoints are counted in steps",
        ),
        Key(
            "callbacks.CheckpointMointor.integrated_save",
            parse_bool,
            same_effect="a checkpoint is whole here, whatever the layout",
        ),
        Key("callbacks.CheckpointMointor.async_save", parse_bool, "checkpoint.asynchronous", default=False),
        Key(
            "callbacks.CheckpointMointor.save_network_params",
            parse_bool,
            same_effect="the weights are always there by themselves",
        ),
        Key("callbacks.CheckpointMointor.save_trainable_params", parse_bool, same_effect="all parameters are trained"),
        Key(
            "callbacks.CheckpointMointor.exception_save",
            parse_bool,
            same_effect="a signal ends a run with a checkpoint",
        ),
        Key("callbacks.ProfileMonitor", parse_str, ignored_because="train.profile: `profile: True`"),
        Key("callbacks.EvalCallBack", parse_str, ignored_because="evaluate.every, with a held-out share or file"),
        *[
            Key(f"{where}.ObsMonitor{key}", parse_str, same_effect=_CLOUD)
            for where in ("callbacks", "eval_callbacks")
            for key in ("", ".src_dir", ".target_dir", ".step_upload_frequence", ".upload_frequence", ".keep_last")
        ],
    ]


KEYS = [
    Key("seed", parse_int, "train.seed", default=0),
    Key("run_mode", parse_str, default="train"),
    Key("output_dir", parse_str, "run.out", default="./output"),
    Key("load_checkpoint", parse_str),
    Key("resume_or_finetune_checkpoint", parse_str),
    Key("resume_training", parse_str),
    Key("input_data", parse_str),
    Key("use_parallel", parse_bool, default=False),
    Key("profile", parse_bool, default=False),
    Key("profile_start_step", parse_int, default=1),
    Key("profile_stop_step", parse_int, default=10),
    *[
        Key(key, parse_str, ignored_because="the trace of train.profile holds all of it")
        for key in ("init_start_profile", "profile_communication", "profile_memory")
    ],
    Key("auto_trans_ckpt", parse_bool, same_effect="a checkpoint is read by any layout"),
    Key("src_strategy_path_or_dir", parse_str, same_effect="a checkpoint is read by any layout"),
    Key("only_save_strategy", parse_bool, ignored_because="there are no strategy files", harmless_values=("false",)),
    Key("do_eval", parse_bool, ignored_because="evaluate.every, with a held-out share or file",
        harmless_values=("false",)),
    Key("eval_step_interval", parse_int, ignored_because="evaluate.every, with a held-out share or file"),
    Key("eval_epoch_interval", parse_int, ignored_because="evaluate.every, with a held-out share or file"),
    Key("lr_scale", parse_bool, default=False),
    Key("lr_scale_factor", parse_int, default=256),
    Key("layer_scale", parse_bool, ignored_because=_LAYERWISE, harmless_values=("false",)),
    Key("layer_decay", parse_float, same_effect="of layer_scale, which is another key"),
    *[Key(key, parse_str, same_effect=_AUTOTUNE) for key in _TUNING],
    *[
        Key(key, parse_str, same_effect=_CLOUD)
        for key in (
            "local_path", "aicc_config.obs_path", "aicc_config.upload_frequence",
            "aicc_config.keep_last",
        )
    ],
    Key("remote_save_url", parse_str, ignored_because="nothing is sent anywhere", harmless_values=("",)),
    Key("micro_batch_interleave_num", parse_int, same_effect=_SAME_NUMBERS),
    Key("predict_batch_size", parse_int, same_effect="all prompts are one batch"),
    Key("register_path", parse_str, ignored_because="no code from outside is run"),
    Key("moe_config.expert_num", parse_int, default=1),
    *[
        Key(f"moe_config.{key}", parse_str, same_effect="one expert is none")
        for key in ("capacity_factor", "aux_loss_factor", "num_experts_chosen")
    ],
    Key("context.device_target", parse_str, default="Ascend"),
    *[
        Key(f"context.{key}", parse_str, same_effect=_GRAPH)
        for key in (
            "mode", "device_id", "max_device_memory", "enable_graph_kernel", "graph_kernel_flags", "max_call_depth",
            "save_graphs", "save_graphs_path", "mempool_block_size", "memory_optimize_level",
        )
    ],
    Key("context.deterministic", parse_str, ignored_because="torch's own rules hold", harmless_values=("off", "false")),
    Key("context.ascend_config.precision_mode", parse_str, ignored_because="torch's own rules hold",
        harmless_values=("must_keep_origin_dtype",)),
    Key("parallel.parallel_mode", parse_str, default="0"),
    Key("parallel.enable_parallel_optimizer", parse_bool, default=False),
    Key("parallel.gradients_mean", parse_bool, same_effect=_MEAN),
    Key("parallel.loss_repeated_mean", parse_bool, same_effect=_MEAN),
    Key("parallel.full_batch", parse_bool, same_effect="each rank reads its own samples; together they are the batch"),
    *[
        Key(f"parallel.{key}", parse_str, same_effect=_LAYOUT)
        for key in (
            "search_mode", "strategy_ckpt_save_file", "strategy_ckpt_load_file", "strategy_ckpt_config.save_file",
            "strategy_ckpt_config.only_trainable_params", "dataset_strategy", "device_num", "enable_alltoall",
            "parallel_optimizer_config.gradient_accumulation_shard",
            "parallel_optimizer_config.parallel_optimizer_threshold",
        )
    ],
    Key("parallel_config.data_parallel", parse_int, default=1),
    Key("parallel_config.model_parallel", parse_int, default=1),
    Key("parallel_config.pipeline_stage", parse_int, default=1),
    Key("parallel_config.micro_batch_num", parse_int, default=1),
    Key("parallel_config.optimizer_shard", parse_bool, default=False),
    Key("parallel_config.expert_parallel", parse_int, ignored_because="there are no experts", harmless_values=("1",)),
    Key("parallel_config.use_seq_parallel", parse_bool, default=False),
    Key("parallel_config.vocab_emb_dp", parse_bool,
        same_effect="with tp the vocabulary is split too; the same numbers"),
    Key("parallel_config.gradient_aggregation_group", parse_int, same_effect=_SAME_NUMBERS),
    Key("recompute_config.recompute", parse_bool, default=False),
    Key("recompute_config.select_recompute", parse_bool,
        ignored_because="what is recomputed is what train.recompute says"),
    *[
        Key(f"recompute_config.{key}", parse_bool, same_effect=_SAME_NUMBERS)
        for key in ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")
    ],
    Key("runner_config.epochs", parse_int, default=1),
    Key("runner_config.batch_size", parse_int, default=1),
    Key("runner_config.gradient_accumulation_steps", parse_int, default=1),
    Key("runner_config.sink_mode", parse_bool, default=True),
    Key("runner_config.sink_size", parse_int, default=1),
    Key("runner_config.image_size", parse_int, same_effect="for models of pictures"),
    Key("runner_config.per_epoch_size", parse_int, ignored_because="an epoch is what the data has",
        harmless_values=("-1", "0")),
    *[
        Key(f"runner_config.{key}", parse_int, ignored_because=_TRAINED, harmless_values=("0",))
        for key in ("initial_epoch", "has_trained_epoches", "has_trained_steps")
    ],
    Key("runner_wrapper.type", parse_str, same_effect="with or without a pipeline follows from the layout"),
    Key("runner_wrapper.use_clip_grad", parse_bool, default=False),
    Key("runner_wrapper.max_grad_norm", parse_float, default=1.0),
    Key("runner_wrapper.scale_sense", parse_float),
    Key("runner_wrapper.scale_sense.type", parse_str),
    Key("runner_wrapper.scale_sense.loss_scale_value", parse_float),
    Key("runner_wrapper.scale_sense.scale_factor", parse_float, default=2.0),
    Key("runner_wrapper.scale_sense.scale_window", parse_int, "precision.scaler.window", default=1000),
    Key("optimizer.type", parse_str, default="FusedAdamWeightDecay"),
    Key("optimizer.beta1", parse_float, default=0.9),
    Key("optimizer.beta2", parse_float, default=0.999),
    Key("optimizer.betas", parse_str),
    Key("optimizer.eps", parse_float, "optim.eps", default=1e-6),
    Key("optimizer.weight_decay", parse_float, "optim.weight_decay", default=0.0),
    Key("optimizer.learning_rate", parse_float),
    Key("lr_schedule.type", parse_str, default="polynomial"),
    Key("lr_schedule.learning_rate", parse_float),
    Key("lr_schedule.lr_end", parse_float),
    Key("lr_schedule.end_learning_rate", parse_float),
    Key("lr_schedule.warmup_steps", parse_int, "optim.warmup_steps", default=0),
    Key("lr_schedule.warmup_lr_init", parse_float, default=0.0),
    Key("lr_schedule.total_steps", parse_int, default=-1),
    Key("lr_schedule.decay_steps", parse_int, default=-1),
    Key("lr_schedule.power", parse_float, default=1.0),
    *_callbacks(),
    *_datasets(),
    Key("trainer.type", parse_str, same_effect=_TASK),
    Key("trainer.model_name", parse_str, same_effect="the shape is in model.model_config"),
    Key("metric.type", parse_str, same_effect="loss and perplexity are always measured"),
    Key("model.arch.type", parse_str, default="GPT2LMHeadModel"),
    Key("model.model_config.type", parse_str, default="GPT2Config"),
    Key("model.model_config.seq_length", parse_int, default=1024),
    Key("model.model_config.vocab_size", parse_int, "model.vocab_size", default=50257),
    Key("model.model_config.embedding_size", parse_int),
    Key("model.model_config.hidden_size", parse_int),
    Key("model.model_config.num_layers", parse_int, "model.num_layers", default=12),
    Key("model.model_config.num_heads", parse_int, "model.num_heads", default=12),
    Key("model.model_config.expand_ratio", parse_int, default=4),
    Key("model.model_config.hidden_act", parse_str, default="gelu"),
    Key("model.model_config.dropout_prob", parse_float),
    Key("model.model_config.embedding_dropout_prob", parse_float),
    Key("model.model_config.hidden_dropout_prob", parse_float),
    Key("model.model_config.hidden_dropout_rate", parse_float),
    Key("model.model_config.attention_probs_dropout_prob", parse_float),
    Key("model.model_config.attention_dropout_rate", parse_float),
    Key("model.model_config.initializer_range", parse_float, default=0.02),
    Key("model.model_config.layernorm_epsilon", parse_float, "model.layernorm_eps", default=1e-5),
    Key("model.model_config.post_layernorm_residual", parse_bool, default=False),
    Key("model.model_config.param_init_type", parse_str, ignored_because=_MASTERS, harmless_values=("float32",)),
    *[
        Key(f"model.model_config.{key}", parse_str, ignored_because=_EXACT, harmless_values=("float32",))
        for key in ("layernorm_dtype", "layernorm_compute_type", "softmax_dtype", "softmax_compute_type")
    ],
    Key("model.model_config.compute_dtype", parse_str, default="float16"),
    Key("model.model_config.checkpoint_name_or_path", parse_str),
    Key("model.model_config.eos_token", parse_int),
    Key("model.model_config.eos_token_id", parse_int),
    *[
        Key(f"model.model_config.{key}", parse_int, same_effect="the tokenizer says which token it is")
        for key in ("bos_token_id", "pad_token_id", "unk_token_id")
    ],
    Key("model.model_config.repetition_penalty", parse_float, "generate.repetition_penalty", default=1.0),
    Key("model.model_config.max_decode_length", parse_int, default=1024),
    Key("model.model_config.top_k", parse_int, "generate.top_k", default=5),
    Key("model.model_config.top_p", parse_float, "generate.top_p", default=1.0),
    Key("model.model_config.do_sample", parse_bool, default=True),
    *[
        Key(f"model.model_config.{key}", parse_str, same_effect=_OTHER_MODEL)
        for key in ("use_past", "batch_size", "is_dynamic", "use_flash_attention", "use_prompt_flash_attention",
                    "use_moe", "type_vocab_size", "use_relative_positions", "use_legacy", "return_tensors")
    ],
    *[
        Key(f"processor.{key}", parse_str, same_effect=_TOKENIZER)
        for key in ("type", "return_tensors", "tokenizer.type", "tokenizer.unk_token", "tokenizer.bos_token",
                    "tokenizer.eos_token", "tokenizer.pad_token", "tokenizer.add_bos_token", "tokenizer.add_eos_token",
                    "tokenizer.max_length")
    ],
    *[
        Key(f"processor.tokenizer.{key}", parse_str, ignored_because=_TOKENIZER,
            harmless_values=("",)) for key in ("vocab_file", "merges_file")
    ],
]  # fmt: skip

# Flags of run_mindformer.py and the key each of them sets.
FLAGS = {
    "--config": "",
    "--mode": "context.mode",
    "--device_id": "context.device_id",
    "--device_target": "context.device_target",
    "--run_mode": "run_mode",
    "--do_eval": "do_eval",
    "--dataset_dir": "",
    "--train_dataset_dir": "train_dataset.data_loader.dataset_dir",
    "--eval_dataset_dir": "eval_dataset.data_loader.dataset_dir",
    "--predict_data": "input_data",
    "--predict_batch_size": "predict_batch_size",
    "--load_checkpoint": "load_checkpoint",
    "--resume_training": "resume_training",
    "--auto_trans_ckpt": "auto_trans_ckpt",
    "--src_strategy_path_or_dir": "src_strategy_path_or_dir",
    "--only_save_strategy": "only_save_strategy",
    "--strategy_load_checkpoint": "parallel.strategy_ckpt_load_file",
    "--remote_save_url": "remote_save_url",
    "--register_path": "register_path",
    "--seed": "seed",
    "--use_parallel": "use_parallel",
    "--profile": "profile",
    "--options": "",
    "--epochs": "runner_config.epochs",
    "--batch_size": "runner_config.batch_size",
    "--gradient_accumulation_steps": "runner_config.gradient_accumulation_steps",
    "--sink_mode": "runner_config.sink_mode",
    "--num_samples": "train_dataset.data_loader.num_samples",
    "--output_dir": "output_dir",
}
