"""Our configuration in the words of another system.

What is written is read back by that system's dialect; where the two differ, the difference stands above as comments.
"""

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gptworks.config.derive import Layout, evaluate_every, has_held_out, plan_batch
from gptworks.config.load import flatten, load, load_with_origins, nest
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, RunConfig
from gptworks.errors import ConfigError, GPTWorksError, UsageError
from gptworks.interop import command_line, fleetx, megatron_flags, paddlenlp, registry
from gptworks.interop.paddlenlp_models import SHAPES
from gptworks.interop.settings import Key

TheirSettings = dict[str, Any]  # their key -> value, in their order
_NOT_COMPARED = ("run.", "parallel.timeout", "generate.", "train.log_style", "data.tokenizer", "checkpoint.portable")


def to_foreign(system: str, path: Path) -> str:
    if system not in WRITERS:
        raise UsageError(f"--to {system}: needed one of {', '.join(WRITERS)}.")
    if not path.is_file():
        raise UsageError(f"translate --to {system}: {path}: no such file. Needed: a configuration of ours.")
    config = load(path)
    if not config.train.steps:
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": _steps(config, path)})})
    text = WRITERS[system](config, str(path))
    lines = [f"# {path.name} in the words of {TITLES[system]}."]
    lines += [f"# not said here: {difference}" for difference in _differences(system, text, config)]
    return "\n".join(lines) + "\n" + text


def _steps(config: RunConfig, path: Path) -> int:
    if config.train.tokens:
        return -(-config.train.tokens // (_batch(config).global_size * config.data.seq_len))
    raise ConfigError(str(path), ["train.steps: 0. The other system counts steps: say how many."])


def _batch(config: RunConfig) -> Any:
    return plan_batch(config.batch, config.model, config.data.seq_len, config.parallel)


def _flat(config: RunConfig) -> dict[str, Any]:
    return flatten(config.model_dump())


def _plain(keys: list[Key], config: RunConfig) -> TheirSettings:
    """Keys that take a value as it is."""
    values = _flat(config)
    return {key.theirs: values[key.ours] for key in keys if key.ours}


def _only_path(paths: tuple[str, ...], where: str) -> str:
    if len(paths) != 1:
        raise ConfigError(where, [f"data.path: {len(paths)} paths; the other system takes one."])
    return paths[0]


def _shares(split: tuple[float, ...]) -> str:
    return ",".join(f"{share:g}" for share in split)


def _decay(optim: OptimConfig, last_step: int) -> tuple[int, float]:
    """(steps of the decay, their share that is warmup)."""
    steps = optim.decay_steps or last_step
    return steps, optim.warmup_steps / steps


def _every(config: RunConfig) -> int:
    """Steps between evaluations, 0 without any."""
    every = evaluate_every(config.evaluate, config.train.steps, config.train.log_every)
    return every if has_held_out(config.data) else 0


# FleetX and PaddleNLP


def _fleetx(config: RunConfig, where: str) -> str:
    batch, decay, model = _batch(config), _decay(config.optim, config.train.steps), config.model
    recompute, half = config.train.recompute, config.precision.compute
    strategy = {"sampling": "sampling", "greedy": "greedy_search", "beam": "beam_search"}[config.generate.strategy]
    settings = _plain(fleetx.KEYS, config) | {
        "Global.device": {"cpu": "cpu"}.get(config.run.device, "gpu"),
        "Engine.mix_precision.use_pure_fp16": half != "fp32",
        **({"Engine.mix_precision.dtype": "bfloat16"} if half == "bf16" else {}),
        "Engine.mix_precision.scale_loss": config.precision.scaler.init,
        "Engine.eval_freq": _every(config),
        **({"Engine.eval_iters": config.evaluate.batches} if config.evaluate.batches else {}),
        "Engine.save_load.output_dir": config.run.out or "./output",
        "Engine.save_load.ckpt_dir": config.init.checkpoint or None,
        "Data.batch_size.global_batch_size": batch.global_size,
        "Data.batch_size.local_batch_size": batch.global_size // batch.data_parallel,
        "Data.batch_size.micro_batch_size": batch.micro_size,
        "Data.dataset.input_dir": _only_path(config.data.path, where),
        "Data.dataset.split": _shares(config.data.split),
        "Data.dataset.max_seq_len": config.data.seq_len,
        "Model.vocab_size": model.vocab_size,
        "Model.ffn_hidden_size": model.ffn_size,
        "Model.hidden_dropout_prob": model.dropout_hidden,
        "Model.use_recompute": recompute != "none",
        "Model.recompute_granularity": None if recompute == "none" else recompute,
        "Model.sequence_parallel": config.parallel.sequence and config.parallel.tp != 1,
        "Model.virtual_pp_degree": config.parallel.virtual_stages,
        "Distributed.dp_degree": Layout.from_config(config.parallel).dp,
        "Distributed.sharding.sharding_degree": config.parallel.fsdp,
        "Distributed.sharding.sharding_stage": config.parallel.zero or 1,
        "Distributed.sharding.sharding_offload": config.parallel.offload,
        "Optimizer.adam_beta1": config.optim.beta1,
        "Optimizer.adam_beta2": config.optim.beta2,
        "Optimizer.adam_epsilon": config.optim.eps,
        "Optimizer.lr.decay_steps": decay[0],
        "Optimizer.lr.warmup_rate": decay[1],
        "Optimizer.lr.max_lr": config.optim.lr,
        "Optimizer.lr.min_lr": config.optim.min_lr,
        "Optimizer.grad_clip": config.optim.clip,
        "Generation.max_dec_len": config.generate.max_new_tokens,
        "Generation.decode_strategy": strategy,
    }
    if strategy == "beam_search":
        settings |= {"Generation.num_beams": config.generate.num_beams}
    order = [key.theirs for key in fleetx.KEYS]
    return _yaml({key: settings[key] for key in sorted(settings, key=order.index)})


def _paddlenlp(config: RunConfig, where: str) -> str:
    model, batch, decay = config.model, _batch(config), _decay(config.optim, config.train.steps)
    shape = (model.num_layers, model.hidden_size, model.num_heads)
    names = [name for name, preset in SHAPES.items() if preset[:3] == shape]
    if config.init.checkpoint:
        names = [config.init.checkpoint]
    elif not names:
        raise ConfigError(
            where,
            [
                f"model: {shape[0]} layers x {shape[1]} with {shape[2]} heads. PaddleNLP takes a model by name: "
                f"{', '.join(SHAPES)}."
            ],
        )
    if config.precision.compute == "bf16":
        raise ConfigError(where, ["precision.compute: bf16; PaddleNLP's script has fp16 only."])
    exact = [name for name in names if SHAPES.get(name, ())[3:] == (model.vocab_size,)]
    flags: TheirSettings = {
        "--model_type": "gpt",
        "--model_name_or_path": (exact or names)[0],
        "--input_dir": _only_path(config.data.path, where),
        "--output_dir": config.run.out or "output",
        "--global_batch_size": batch.global_size,
        "--max_lr": config.optim.lr,
        "--min_lr": config.optim.min_lr,
        "--decay_steps": decay[0],
        "--warmup_rate": decay[1],
        "--lr_decay_style": "none" if config.optim.schedule == "constant" else "cosine",
        "--dp_degree": Layout.from_config(config.parallel).dp,
        "--use_sharding": config.parallel.fsdp != 1,
        "--sharding_degree": config.parallel.fsdp,
        "--sharding_stage": config.parallel.zero or 1,
        "--use_amp": config.precision.compute == "fp16",
        "--use_recompute": config.train.recompute != "none",
        "--hidden_dropout_prob": model.dropout_hidden,
        "--attention_probs_dropout_prob": model.dropout_attention,
        "--device": {"cpu": "cpu"}.get(config.run.device, "gpu"),
        "--eval_freq": _every(config),
    }
    if config.evaluate.batches:  # as long as one of ours, in batches of theirs
        samples = config.evaluate.batches * batch.global_size
        flags["--eval_iters"] = -(-samples // (batch.micro_size * batch.data_parallel))
    if config.train.recompute != "none":
        flags["--recompute_granularity"] = config.train.recompute
    data_flags = {"--split": _shares(config.data.split), "--micro_batch_size": batch.micro_size}
    flags |= _plain(paddlenlp.TRAINING, config) | data_flags
    processes = Layout.from_config(config.parallel).world_size
    devices = ",".join(map(str, range(processes)))
    start = f'python -u -m paddle.distributed.launch --gpus "{devices}" ' if processes > 1 else "python "
    return start + "run_pretrain.py" + _flags(flags)


# Megatron-LM and MindFormers


def _megatron(config: RunConfig, where: str) -> str:
    model, batch, layout = config.model, _batch(config), Layout.from_config(config.parallel)
    style = config.optim.schedule
    if style == "wsd":
        raise ConfigError(where, ["optim.schedule: wsd; needed cosine, linear or constant for Megatron's old flags."])
    flags: TheirSettings = {
        key.theirs: value
        for key, value in ((key, _flat(config)[key.ours]) for key in megatron_flags.SHARED if key.ours)
        if not key.theirs.startswith(("--initial-loss-scale", "--loss-scale", "--split"))
    }
    flags |= {
        "--ffn-hidden-size": model.ffn_size,
        "--seq-length": config.data.seq_len,
        "--max-position-embeddings": model.max_positions,
        "--make-vocab-size-divisible-by": _vocabulary_unit(model.vocab_size, layout.tp),
        "--hidden-dropout": model.dropout_hidden,
        "--micro-batch-size": batch.micro_size,
        "--global-batch-size": batch.global_size,
        "--train-iters": config.train.steps,
        "--lr": config.optim.lr,
        "--lr-decay-style": style,
        "--lr-decay-iters": config.optim.decay_steps or config.train.steps,
        "--lr-warmup-iters": round(config.optim.warmup_steps),
        "--data-path": " ".join(config.data.path),
        "--split": _shares(config.data.split),
        "--seed": config.train.seed,
        "--save": config.run.out or "checkpoints",
        "--save-interval": config.checkpoint.every,
        "--eval-interval": _every(config) or config.train.steps,
    }
    if not _every(config) or config.evaluate.batches:
        flags["--eval-iters"] = config.evaluate.batches if _every(config) else 0
    if config.precision.compute != "fp32":
        flags[f"--{config.precision.compute}"] = None
    if config.precision.compute == "fp16":
        scaler = config.precision.scaler
        flags |= {"--initial-loss-scale": scaler.init, "--loss-scale-window": scaler.window}
        flags |= {"--hysteresis": scaler.hysteresis}
    if config.train.recompute == "core_attn":
        flags["--recompute-granularity"] = "selective"
    elif config.train.recompute != "none":
        flags["--checkpoint-activations"] = None
    for flag, wanted in (
        ("--no-bias-gelu-fusion", model.gelu == "erf"),
        ("--untie-embeddings-and-output-weights", not model.tied),
        ("--sequence-parallel", config.parallel.sequence and layout.tp > 1),
        ("--use-distributed-optimizer", layout.fsdp > 1 and layout.dp == 1 and config.parallel.zero == 1),
        ("--eod-mask-loss", config.data.mask_eod),
        ("--reset-position-ids", config.data.reset_positions),
    ):
        if wanted:
            flags[flag] = None
    if config.data.reset_attention:
        flags["--reset-attention-mask"] = None
    if config.init.checkpoint:
        flags |= {"--load": config.init.checkpoint, "--finetune": None}
    start = f"torchrun --nproc_per_node {layout.world_size} " if layout.world_size > 1 else "python "
    return start + "pretrain_gpt.py" + _flags(flags)


def _vocabulary_unit(vocabulary: int, tp: int) -> int:
    """The padding that makes this vocabulary of GPT-2's 50257 words, as it is in most files; otherwise 1."""
    for unit in (128, 64, 32, 16, 8, 4, 2):
        if -(-50257 // (unit * tp)) * unit * tp == vocabulary:
            return unit
    return 1


def _mindformers(config: RunConfig, where: str) -> str:
    model, batch, layout = config.model, _batch(config), Layout.from_config(config.parallel)
    # Of a pipeline, a micro-batch; micro_batch_num says how many.
    read_at_once = batch.micro_size if layout.pp > 1 else batch.global_size // batch.data_parallel
    if model.ffn_size % model.hidden_size:
        raise ConfigError(where, [f"model.ffn_size: {model.ffn_size}; MindFormers has whole multiples of hidden_size."])
    activation = {"tanh": "gelu", "sigmoid": "fast_gelu"}.get(model.gelu)
    if activation is None:
        raise ConfigError(where, [f"model.gelu: {model.gelu}; MindFormers has tanh (gelu) and sigmoid (fast_gelu)."])
    if config.optim.schedule not in ("linear", "constant"):
        raise ConfigError(
            where,
            [
                f"optim.schedule: {config.optim.schedule}; the MindFormers of the document has linear (polynomial of "
                "power 1). Set optim.schedule: linear."
            ],
        )
    values = {
        "seed": config.train.seed,
        "run_mode": "train",
        "use_parallel": layout.world_size > 1,
        "output_dir": config.run.out or "./output",
        "context": {"mode": 0, "device_target": "CPU" if config.run.device == "cpu" else "Ascend"},
        "runner_config": {"epochs": 1, "batch_size": read_at_once, "sink_mode": True},
        "runner_wrapper": {
            "type": "MFTrainOneStepCell" if layout.pp == 1 else "MFPipelineWithLossScaleCell",
            "scale_sense": {
                "type": "DynamicLossScaleUpdateCell",
                "loss_scale_value": _short(config.precision.scaler.init),
                "scale_factor": _short(config.precision.scaler.growth),
                "scale_window": config.precision.scaler.window,
            },
            "use_clip_grad": config.optim.clip > 0,
            **({"max_grad_norm": config.optim.clip} if config.optim.clip else {}),
        },
        "optimizer": {
            "type": "FusedAdamWeightDecay",
            "beta1": config.optim.beta1,
            "beta2": config.optim.beta2,
            "eps": config.optim.eps,
            "weight_decay": config.optim.weight_decay,
        },
        "lr_schedule": {
            "type": "polynomial",
            "learning_rate": config.optim.lr,
            "lr_end": config.optim.min_lr,
            "warmup_steps": round(config.optim.warmup_steps),
            "total_steps": config.optim.decay_steps or config.train.steps,
        },
        "train_dataset": {
            "data_loader": {"type": "MindDataset", "dataset_dir": _only_path(config.data.path, where), "shuffle": True},
            "input_columns": ["input_ids"],
            "drop_remainder": True,
            "batch_size": batch.global_size // batch.data_parallel,
            "repeat": 1,
        },
        "callbacks": [
            {"type": "MFLossMonitor", "per_print_times": config.train.log_every},
            {"type": "CheckpointMointor", "prefix": "gpt2", "save_checkpoint_steps": config.checkpoint.every},
        ],
        "recompute_config": {"recompute": config.train.recompute != "none"},
        "parallel": {"parallel_mode": 1 if layout.tp * layout.pp > 1 else 0},  # 0 knows replicas only
        "parallel_config": {
            "data_parallel": batch.data_parallel,
            "model_parallel": layout.tp,
            "pipeline_stage": layout.pp,
            "optimizer_shard": layout.fsdp > 1,
            "micro_batch_num": batch.accumulation,
        },
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "gpt2"},
        "model": _mindformers_model(model, config.init, config.precision.compute, activation),
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _short(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _mindformers_model(model: ModelConfig, init: InitConfig, compute: str, activation: str) -> TheirSettings:
    shape = {
        "type": "GPT2Config",
        "seq_length": model.max_positions,
        "vocab_size": model.vocab_size,
        "embedding_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "expand_ratio": model.ffn_size // model.hidden_size,
        "hidden_act": activation,
        "dropout_prob": model.dropout_embed,
        "hidden_dropout_prob": model.dropout_hidden,
        "attention_probs_dropout_prob": model.dropout_attention,
        "initializer_range": init.std,
        "compute_dtype": "float32" if compute == "fp32" else "float16",
        "checkpoint_name_or_path": init.checkpoint,
    }
    return {"model_config": shape, "arch": {"type": "GPT2LMHeadModel"}}


# Text


def _yaml(settings: Mapping[str, Any]) -> str:
    nested = nest({key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()})
    return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def _flags(flags: TheirSettings) -> str:
    """--name value, a line each; of a flag without a value only the name."""
    lines = []
    for name, value in flags.items():
        text = "" if value is None else " " + " ".join(map(shlex.quote, _word(value).split(" ")))
        lines.append(f" \\\n    {name}{text}")
    return "".join(lines) + "\n"


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


# Back


def _differences(system: str, text: str, config: RunConfig) -> list[str]:
    """Settings that come out otherwise when the other system's words are read again."""
    try:
        back = _flat(_read_back(system, text))
    except GPTWorksError as error:
        raise UsageError(
            f"translate --to {system}: it cannot be said in these words; they would be refused there: "
            f"{' '.join(str(error).split())}"
        ) from None
    differences = []
    for key, value in _flat(config).items():
        idle = key == "parallel.sequence" and config.parallel.tp == 1
        if back.get(key) != value and not idle and not key.startswith(_NOT_COMPARED):
            differences.append(f"{key}={_as_json(value)}; there it is {_as_json(back.get(key))}")
    return differences


def _read_back(system: str, text: str) -> RunConfig:
    dialect = registry.dialect(system)
    if system in ("fleetx", "mindformers"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(text, encoding="utf-8")
            translation = dialect.translate_yaml(file)
    else:
        command = command_line.split([text], {}, Path())
        translation = dialect.translate(command, registry.Files(Path()))
    values = {**translation.config, "run.device": "auto"}
    return load_with_origins(values=values).config


def _as_json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


WRITERS: dict[str, Callable[[RunConfig, str], str]] = {
    "megatron": _megatron,
    "fleetx": _fleetx,
    "mindformers": _mindformers,
    "paddlenlp": _paddlenlp,
}
TITLES = {"megatron": "Megatron-LM", "fleetx": "FleetX", "mindformers": "MindFormers", "paddlenlp": "PaddleNLP"}
