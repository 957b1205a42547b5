"""The settings of MindFormers' GPT-2: every key of its YAML, and the flags that stand for some of them.

A key in lists of callbacks is written callbacks.TYPE.KEY, and callbacks.TYPE alone says that the callback is there.
"""

from gptworks.interop.settings import Key, number, truth, whole, words

_GRAPH = "about MindSpore's graphs and devices; torch has neither"
_CLOUD = "it does something in Huawei's cloud only"
_MASTERS = "parameters are fp32 masters here always"
_EXACT = "LayerNorm and softmax are computed in fp32 here always"
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
            Key(f"{part}.data_loader.type", words, same="the format is seen in the files"),
            Key(f"{part}.data_loader.dataset_dir", words),
            Key(f"{part}.data_loader.shuffle", truth, default=True),
            Key(f"{part}.data_loader.num_samples", whole),
            Key(f"{part}.input_columns", words, same=_COLUMNS),
            Key(f"{part}.output_columns", words, same=_COLUMNS),
            Key(f"{part}.drop_remainder", truth, why="a run is whole batches always", usual=("true",)),
            Key(f"{part}.batch_size", whole, same="MindFormers puts runner_config.batch_size in its place"),
            Key(f"{part}.repeat", whole, default=1),
            Key(f"{part}.eod_reset", truth, why="data.reset_attention and its like do it", usual=("false",)),
            *[
                Key(f"{part}.{key}", words, same=_WORKERS)
                for key in ("num_parallel_workers", "python_multiprocessing", "numa_enable", "prefetch_size", "do_eval")
            ],
            *[Key(f"{part}.{key}", words, same=_AUTOTUNE) for key in _TUNING],
            Key(f"{part}.profile", truth, why="train.profile has it all"),
            Key(f"{part}.tokenizer.type", words, same="the rows are tokens already"),
            Key(f"{part}.tokenizer.max_length", whole, same="the rows are tokens already"),
            Key(f"{part}.seed", whole, why="the order follows from seed"),
            Key(f"{part}_task.type", words, same=_TASK),
            # An anchor in YAML: the same block again.
            *[
                Key(f"{part}_task.dataset_config.{key}", words, same=f"the same as {part}.{key}")
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
        Key("callbacks.MFLossMonitor", words, same="the losses are in the log and in metrics.jsonl"),
        Key("callbacks.MFLossMonitor.per_print_times", whole, "train.log_every", default=1),
        Key("callbacks.SummaryMonitor", words, same="the scalars are in metrics.jsonl and TensorBoard's files"),
        *[
            Key(
                f"callbacks.SummaryMonitor.{key}",
                words,
                same="the scalars are in metrics.jsonl and TensorBoard's files",
            )
            for key in ("summary_dir", "collect_freq", "keep_default_action", "max_file_size")
        ],
        Key("callbacks.CheckpointMointor", words),  # their spelling
        Key("callbacks.CheckpointMointor.prefix", words, default="CKP"),
        Key("callbacks.CheckpointMointor.directory", words),
        Key("callbacks.CheckpointMointor.save_checkpoint_steps", whole, default=1),
        Key("callbacks.CheckpointMointor.save_checkpoint_seconds", whole, why="checkpoints are counted in steps"),
        Key("callbacks.CheckpointMointor.keep_checkpoint_max", whole, default=5),
        Key("callbacks.CheckpointMointor.keep_checkpoint_per_n_minutes", whole, why="checkpoints are counted in steps"),
        Key(
            "callbacks.CheckpointMointor.integrated_save", truth, same="a checkpoint is whole here, whatever the layout"
        ),
        Key("callbacks.CheckpointMointor.async_save", truth, "checkpoint.asynchronous", default=False),
        Key(
            "callbacks.CheckpointMointor.save_network_params", truth, same="the weights are always there by themselves"
        ),
        Key("callbacks.CheckpointMointor.save_trainable_params", truth, same="all parameters are trained"),
        Key("callbacks.CheckpointMointor.exception_save", truth, same="a signal ends a run with a checkpoint"),
        Key("callbacks.ProfileMonitor", words, why="train.profile: `profile: True`"),
        Key("callbacks.EvalCallBack", words, why="evaluate.every, with a held-out share or file"),
        *[
            Key(f"{where}.ObsMonitor{key}", words, same=_CLOUD)
            for where in ("callbacks", "eval_callbacks")
            for key in ("", ".src_dir", ".target_dir", ".step_upload_frequence", ".upload_frequence", ".keep_last")
        ],
    ]


KEYS = [
    Key("seed", whole, "train.seed", default=0),
    Key("run_mode", words, default="train"),
    Key("output_dir", words, "run.out", default="./output"),
    Key("load_checkpoint", words),
    Key("resume_or_finetune_checkpoint", words),
    Key("resume_training", words),
    Key("input_data", words),
    Key("use_parallel", truth, default=False),
    Key("profile", truth, default=False),
    Key("profile_start_step", whole, default=1),
    Key("profile_stop_step", whole, default=10),
    *[
        Key(key, words, why="the trace of train.profile holds all of it")
        for key in ("init_start_profile", "profile_communication", "profile_memory")
    ],
    Key("auto_trans_ckpt", truth, same="a checkpoint is read by any layout"),
    Key("src_strategy_path_or_dir", words, same="a checkpoint is read by any layout"),
    Key("only_save_strategy", truth, why="there are no strategy files", usual=("false",)),
    Key("do_eval", truth, why="evaluate.every, with a held-out share or file", usual=("false",)),
    Key("eval_step_interval", whole, why="evaluate.every, with a held-out share or file"),
    Key("eval_epoch_interval", whole, why="evaluate.every, with a held-out share or file"),
    Key("lr_scale", truth, default=False),
    Key("lr_scale_factor", whole, default=256),
    Key("layer_scale", truth, why=_LAYERWISE, usual=("false",)),
    Key("layer_decay", number, same="of layer_scale, which is another key"),
    *[Key(key, words, same=_AUTOTUNE) for key in _TUNING],
    *[
        Key(key, words, same=_CLOUD)
        for key in (
            "local_path", "aicc_config.obs_path", "aicc_config.upload_frequence",
            "aicc_config.keep_last",
        )
    ],
    Key("remote_save_url", words, why="nothing is sent anywhere", usual=("",)),
    Key("micro_batch_interleave_num", whole, same=_SAME_NUMBERS),
    Key("predict_batch_size", whole, same="all prompts are one batch"),
    Key("register_path", words, why="no code from outside is run"),
    Key("moe_config.expert_num", whole, default=1),
    *[
        Key(f"moe_config.{key}", words, same="one expert is none")
        for key in ("capacity_factor", "aux_loss_factor", "num_experts_chosen")
    ],
    Key("context.device_target", words, default="Ascend"),
    *[
        Key(f"context.{key}", words, same=_GRAPH)
        for key in (
            "mode", "device_id", "max_device_memory", "enable_graph_kernel", "graph_kernel_flags", "max_call_depth",
            "save_graphs", "save_graphs_path", "mempool_block_size", "memory_optimize_level",
        )
    ],
    Key("context.deterministic", words, why="torch's own rules hold", usual=("off", "false")),
    Key("context.ascend_config.precision_mode", words, why="torch's own rules hold", usual=("must_keep_origin_dtype",)),
    Key("parallel.parallel_mode", words, default="0"),
    Key("parallel.enable_parallel_optimizer", truth, default=False),
    Key("parallel.gradients_mean", truth, same=_MEAN),
    Key("parallel.loss_repeated_mean", truth, same=_MEAN),
    Key("parallel.full_batch", truth, same="each rank reads its own samples; together they are the batch"),
    *[
        Key(f"parallel.{key}", words, same=_LAYOUT)
        for key in (
            "search_mode", "strategy_ckpt_save_file", "strategy_ckpt_load_file", "strategy_ckpt_config.save_file",
            "strategy_ckpt_config.only_trainable_params", "dataset_strategy", "device_num", "enable_alltoall",
            "parallel_optimizer_config.gradient_accumulation_shard",
            "parallel_optimizer_config.parallel_optimizer_threshold",
        )
    ],
    Key("parallel_config.data_parallel", whole, default=1),
    Key("parallel_config.model_parallel", whole, default=1),
    Key("parallel_config.pipeline_stage", whole, default=1),
    Key("parallel_config.micro_batch_num", whole, default=1),
    Key("parallel_config.optimizer_shard", truth, default=False),
    Key("parallel_config.expert_parallel", whole, why="there are no experts", usual=("1",)),
    Key("parallel_config.use_seq_parallel", truth, default=False),
    Key("parallel_config.vocab_emb_dp", truth, same="with tp the vocabulary is split too; the same numbers"),
    Key("parallel_config.gradient_aggregation_group", whole, same=_SAME_NUMBERS),
    Key("recompute_config.recompute", truth, default=False),
    Key("recompute_config.select_recompute", truth, why="what is recomputed is what train.recompute says"),
    *[
        Key(f"recompute_config.{key}", truth, same=_SAME_NUMBERS)
        for key in ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")
    ],
    Key("runner_config.epochs", whole, default=1),
    Key("runner_config.batch_size", whole, default=1),
    Key("runner_config.gradient_accumulation_steps", whole, default=1),
    Key("runner_config.sink_mode", truth, default=True),
    Key("runner_config.sink_size", whole, default=1),
    Key("runner_config.image_size", whole, same="for models of pictures"),
    Key("runner_config.per_epoch_size", whole, why="an epoch is what the data has", usual=("-1", "0")),
    *[
        Key(f"runner_config.{key}", whole, why=_TRAINED, usual=("0",))
        for key in ("initial_epoch", "has_trained_epoches", "has_trained_steps")
    ],
    Key("runner_wrapper.type", words, same="with or without a pipeline follows from the layout"),
    Key("runner_wrapper.use_clip_grad", truth, default=False),
    Key("runner_wrapper.max_grad_norm", number, default=1.0),
    Key("runner_wrapper.scale_sense", number),
    Key("runner_wrapper.scale_sense.type", words),
    Key("runner_wrapper.scale_sense.loss_scale_value", number),
    Key("runner_wrapper.scale_sense.scale_factor", number, default=2.0),
    Key("runner_wrapper.scale_sense.scale_window", whole, "precision.scaler.window", default=1000),
    Key("optimizer.type", words, default="FusedAdamWeightDecay"),
    Key("optimizer.beta1", number, default=0.9),
    Key("optimizer.beta2", number, default=0.999),
    Key("optimizer.betas", words),
    Key("optimizer.eps", number, "optim.eps", default=1e-6),
    Key("optimizer.weight_decay", number, "optim.weight_decay", default=0.0),
    Key("optimizer.learning_rate", number),
    Key("lr_schedule.type", words, default="polynomial"),
    Key("lr_schedule.learning_rate", number),
    Key("lr_schedule.lr_end", number),
    Key("lr_schedule.end_learning_rate", number),
    Key("lr_schedule.warmup_steps", whole, "optim.warmup_steps", default=0),
    Key("lr_schedule.warmup_lr_init", number, default=0.0),
    Key("lr_schedule.total_steps", whole, default=-1),
    Key("lr_schedule.decay_steps", whole, default=-1),
    Key("lr_schedule.power", number, default=1.0),
    *_callbacks(),
    *_datasets(),
    Key("trainer.type", words, same=_TASK),
    Key("trainer.model_name", words, same="the shape is in model.model_config"),
    Key("metric.type", words, same="loss and perplexity are measured always"),
    Key("model.arch.type", words, default="GPT2LMHeadModel"),
    Key("model.model_config.type", words, default="GPT2Config"),
    Key("model.model_config.seq_length", whole, default=1024),
    Key("model.model_config.vocab_size", whole, "model.vocab_size", default=50257),
    Key("model.model_config.embedding_size", whole),
    Key("model.model_config.hidden_size", whole),
    Key("model.model_config.num_layers", whole, "model.num_layers", default=12),
    Key("model.model_config.num_heads", whole, "model.num_heads", default=12),
    Key("model.model_config.expand_ratio", whole, default=4),
    Key("model.model_config.hidden_act", words, default="gelu"),
    Key("model.model_config.dropout_prob", number),
    Key("model.model_config.embedding_dropout_prob", number),
    Key("model.model_config.hidden_dropout_prob", number),
    Key("model.model_config.hidden_dropout_rate", number),
    Key("model.model_config.attention_probs_dropout_prob", number),
    Key("model.model_config.attention_dropout_rate", number),
    Key("model.model_config.initializer_range", number, default=0.02),
    Key("model.model_config.layernorm_epsilon", number, "model.layernorm_eps", default=1e-5),
    Key("model.model_config.post_layernorm_residual", truth, default=False),
    Key("model.model_config.param_init_type", words, why=_MASTERS, usual=("float32",)),
    *[
        Key(f"model.model_config.{key}", words, why=_EXACT, usual=("float32",))
        for key in ("layernorm_dtype", "layernorm_compute_type", "softmax_dtype", "softmax_compute_type")
    ],
    Key("model.model_config.compute_dtype", words, default="float16"),
    Key("model.model_config.checkpoint_name_or_path", words),
    Key("model.model_config.eos_token", whole),
    Key("model.model_config.eos_token_id", whole),
    *[
        Key(f"model.model_config.{key}", whole, same="the tokenizer says which token it is")
        for key in ("bos_token_id", "pad_token_id", "unk_token_id")
    ],
    Key("model.model_config.repetition_penalty", number, "generate.repetition_penalty", default=1.0),
    Key("model.model_config.max_decode_length", whole, default=1024),
    Key("model.model_config.top_k", whole, "generate.top_k", default=5),
    Key("model.model_config.top_p", number, "generate.top_p", default=1.0),
    Key("model.model_config.do_sample", truth, default=True),
    *[
        Key(f"model.model_config.{key}", words, same=_OTHER_MODEL)
        for key in ("use_past", "batch_size", "is_dynamic", "use_flash_attention", "use_prompt_flash_attention",
                    "use_moe", "type_vocab_size", "use_relative_positions", "use_legacy", "return_tensors")
    ],
    *[
        Key(f"processor.{key}", words, same=_TOKENIZER)
        for key in ("type", "return_tensors", "tokenizer.type", "tokenizer.unk_token", "tokenizer.bos_token",
                    "tokenizer.eos_token", "tokenizer.pad_token", "tokenizer.add_bos_token", "tokenizer.add_eos_token",
                    "tokenizer.max_length")
    ],
    *[
        Key(f"processor.tokenizer.{key}", words, why=_TOKENIZER, usual=("",)) for key in ("vocab_file", "merges_file")
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
