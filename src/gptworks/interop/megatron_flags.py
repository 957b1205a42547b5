"""Flags that Megatron-LM and OneFlow-GPT have in common, and what they mean here."""

from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.config.other_names import MEGATRON
from gptworks.errors import ConfigError
from gptworks.interop.settings import Key, Settings, parse_float, parse_int, parse_str

KERNEL = "a choice of kernels, not of numbers; torch chooses"
SAME_NUMBER = "divides and multiplies by the same number"
REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads")

# Both systems, with the defaults they share.
SHARED = [
    Key("--num-layers", parse_int, MEGATRON["num_layers"][0]),
    Key("--hidden-size", parse_int, MEGATRON["hidden_size"][0]),
    Key("--num-attention-heads", parse_int, MEGATRON["num_attention_heads"][0]),
    Key("--make-vocab-size-divisible-by", parse_int, default=128),
    Key("--seq-length", parse_int),
    Key("--attention-dropout", parse_float, MEGATRON["attention_dropout"][0], default=0.1),
    Key("--hidden-dropout", parse_float, default=0.1),
    Key("--weight-decay", parse_float, MEGATRON["weight_decay"][0], default=0.01),
    Key("--clip-grad", parse_float, MEGATRON["clip_grad"][0], default=1.0),
    Key("--adam-beta1", parse_float, MEGATRON["adam_beta1"][0], default=0.9),
    Key("--adam-beta2", parse_float, MEGATRON["adam_beta2"][0], default=0.999),
    Key("--adam-eps", parse_float, MEGATRON["adam_eps"][0], default=1e-8),
    Key("--micro-batch-size", parse_int),
    Key("--global-batch-size", parse_int),
    Key("--train-iters", parse_int),
    Key("--train-samples", parse_int),
    Key("--checkpoint-activations", parse_str, switch=True),
    Key("--min-lr", parse_float, MEGATRON["min_lr"][0], default=0.0),
    Key("--lr-decay-style", parse_str, default="linear"),
    Key("--lr-decay-iters", parse_int),
    Key("--lr-warmup-fraction", parse_float),
    Key("--lr-warmup-iters", parse_int, default=0),
    Key("--init-method-std", parse_float, MEGATRON["init_method_std"][0], default=0.02),
    Key("--fp16", parse_str, switch=True),
    Key("--loss-scale", parse_float),
    Key("--initial-loss-scale", parse_float, default=2.0**32),
    Key("--loss-scale-window", parse_int, MEGATRON["loss_scale_window"][0], default=1000),
    Key("--tensor-model-parallel-size", parse_int, MEGATRON["tensor_model_parallel_size"][0], default=1),
    Key("--pipeline-model-parallel-size", parse_int, MEGATRON["pipeline_model_parallel_size"][0], default=1),
    Key("--split", parse_str, MEGATRON["split"][0], default="969,30,1"),
    Key("--load", parse_str),
    Key("--save", parse_str),
    Key("--save-interval", parse_int),
    Key("--log-interval", parse_int, MEGATRON["log_interval"][0], default=100),
    Key("--no-bias-gelu-fusion", parse_str, switch=True),
    Key("--no-query-key-layer-scaling", parse_str, switch=True, same_effect=SAME_NUMBER),
]


def require(settings: Settings, names: tuple[str, ...]) -> None:
    missing = [name for name in names if settings[name] is None]
    if missing:
        raise ConfigError(settings.where, [f"{name}: is required." for name in missing])


def padded(settings: Settings, vocabulary: int) -> int:
    unit = settings["--make-vocab-size-divisible-by"] * settings["--tensor-model-parallel-size"]
    return int(-(-vocabulary // unit) * unit) if unit else vocabulary


def model(settings: Settings) -> None:
    """Dropout, fresh weights; without a biggest word, which each system has in another place."""
    require(settings, REQUIRED)
    dropout = settings["--hidden-dropout"]
    settings.map("--hidden-dropout", {"model.dropout_hidden": dropout, "model.dropout_embed": dropout})
    settings.ours["init.residual_scale"] = "gpt2"


def batch(settings: Settings, world: int, accumulation: int | None = None) -> int:
    """global = micro x dp x accumulation; any one that is missing follows. Gives the data-parallel size."""
    parts = settings["--tensor-model-parallel-size"] * settings["--pipeline-model-parallel-size"]
    if world % parts:
        raise ConfigError(
            settings.where,
            [
                f"--tensor-model-parallel-size x --pipeline-model-parallel-size: {parts} does not divide the "
                f"{world} devices (machines x devices of each)."
            ],
        )
    replicas = world // parts
    micro, whole_batch = settings["--micro-batch-size"], settings["--global-batch-size"]
    if whole_batch is None and micro is None:
        raise ConfigError(settings.where, ["--micro-batch-size: neither it nor --global-batch-size is given."])
    if whole_batch is None:
        whole_batch = micro * replicas * (accumulation or 1)
    if micro is None:
        micro = max(1, whole_batch // (replicas * (accumulation or 1)))
    product = micro * replicas * (accumulation or max(1, whole_batch // (micro * replicas)))
    if product != whole_batch:
        times = accumulation or "a whole number"
        raise ConfigError(
            settings.where,
            [
                f"--global-batch-size: {whole_batch} is not --micro-batch-size {micro} x data-parallel {replicas} x "
                f"accumulation {times}. Leave one of them out."
            ],
        )
    settings.map("--global-batch-size", {"batch.global_size": whole_batch})
    settings.map("--micro-batch-size", {"batch.micro_size": micro})
    settings.ours["parallel.dp"] = replicas
    return int(replicas)


def tokenizer_of(settings: Settings, folder: Path, prefixes: list[str]) -> None:
    """Their data do not say which it is, and it is GPT-2's; ours say it in a file beside them."""
    if not all((folder / f"{prefix}.json").is_file() for prefix in prefixes):
        settings.ours["data.tokenizer"] = "gpt2"


def length(settings: Settings) -> int:
    """Steps. Of samples, where they say so."""
    steps, samples = settings["--train-iters"], settings["--train-samples"]
    size = settings.ours["batch.global_size"]
    if steps is None and samples is None:
        raise ConfigError(settings.where, ["--train-iters: neither it nor --train-samples is given."])
    if steps is None:
        steps = samples // size
        settings.map("--train-samples", {"train.steps": steps}, why="" if samples % size == 0 else "whole batches")
    else:
        settings.map("--train-iters", {"train.steps": steps})
        settings.ignore("--train-samples", "--train-iters says how long")
    return int(steps)


def schedule(settings: Settings, steps: float, rate: str, shapes: dict[str, str]) -> None:
    """`steps`: of the decay, where --lr-decay-iters does not say it. A warmup may be a share of it."""
    settings.map(rate, "optim.lr")
    style = settings["--lr-decay-style"]
    if style not in shapes:
        raise ConfigError(settings.where, [f"--lr-decay-style: got {style!r}; needs one of {', '.join(shapes)}."])
    settings.map("--lr-decay-style", {"optim.schedule": shapes[style]})
    decay = settings["--lr-decay-iters"] or steps
    settings.map("--lr-decay-iters", {"optim.decay_steps": int(decay)})
    fraction = settings["--lr-warmup-fraction"]
    if fraction is None:
        settings.map("--lr-warmup-iters", {"optim.warmup_steps": float(settings["--lr-warmup-iters"])})
        return
    settings.map("--lr-warmup-fraction", {"optim.warmup_steps": fraction * decay})
    settings.ignore("--lr-warmup-iters", "--lr-warmup-fraction says how long")


def precision(settings: Settings, *, bf16: bool = False) -> None:
    compute = "bf16" if bf16 else "fp16" if settings.is_given("--fp16") else "fp32"
    settings.map("--fp16", {"precision.compute": compute})
    fixed = settings["--loss-scale"]
    if fixed:
        scaler = {"precision.scaler.init": fixed, "precision.scaler.growth": 1.0}
        settings.map("--loss-scale", scaler, why="it never grows; an overflow halves it all the same")
        settings.ignore("--initial-loss-scale", "--loss-scale keeps it at one value")
    else:
        settings.map("--initial-loss-scale", "precision.scaler.init")
        settings.same("--loss-scale", "0: it is found while training")


def checkpoints(settings: Settings, folder: Path, default_out: str, system: str) -> tuple[str, list[str], list[str]]:
    """(where the run is, arguments, remarks). --load of the folder that is saved to: go on if there is something.

    A folder that the other system wrote gives its weights to a run of its own inside it.
    """
    out, load = str(settings["--save"] or default_out), settings["--load"]
    every = settings["--save-interval"] or 0
    settings.map("--save-interval", {"checkpoint.every": every})
    theirs = bool(load) and (folder / load).is_dir() and not run_paths.was_begun(folder / load)
    theirs = theirs and any((folder / load).iterdir())
    run = f"{out}/gptworks" if theirs and Path(load) == Path(out) else out
    settings.map("--save", {"run.out": run})
    if not load:
        return run, ["--resume", "never"], []
    if theirs:
        settings.map("--load", {"init.checkpoint": load}, why="its weights; their optimizer state is not read")
        again = "never" if run == out else "auto"  # what a run of ours has done since is in the folder inside theirs
        return run, ["--resume", again], [f"{load} was written by {system}: its weights are the start of {run}."]
    if Path(load) == Path(out):
        on_command_line(settings, "--load", {"--resume": "auto"})
        return run, ["--resume", "auto"], []
    if not (folder / load).exists():
        settings.same("--load", "no such folder yet: the weights are fresh, as theirs would be")
        return run, ["--resume", "never"], []
    settings.map("--load", {"init.checkpoint": load}, why="its weights; the steps begin at 0")
    return run, ["--resume", "never"], []


def on_command_line(settings: Settings, name: str | list[str], ours: dict[str, Any], why: str = "") -> None:
    """A note about options of our command, which are no keys of the configuration."""
    settings.map(name, ours, why=why)
    for option in ours:
        settings.ours.pop(option)
