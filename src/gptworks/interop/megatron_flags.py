"""Flags that Megatron-LM and OneFlow-GPT have in common, and what they mean here."""

from typing import Any

from gptworks.errors import ConfigError
from gptworks.interop.settings import Key, Settings, number, whole, words

KERNEL = "a choice of kernels, not of numbers; torch chooses"

# Both systems; defaults are filled in by each.
SHARED = [
    Key("--num-layers", whole, "model.num_layers"),
    Key("--hidden-size", whole, "model.hidden_size"),
    Key("--num-attention-heads", whole, "model.num_heads"),
    Key("--make-vocab-size-divisible-by", whole, default=128),
    Key("--vocab-size", whole, default=50257),
    Key("--seq-length", whole, default=1024),
    Key("--attention-dropout", number, "model.dropout_attention", default=0.1),
    Key("--hidden-dropout", number, default=0.1),
    Key("--weight-decay", number, "optim.weight_decay", default=0.01),
    Key("--clip-grad", number, "optim.clip", default=1.0),
    Key("--adam-beta1", number, "optim.beta1", default=0.9),
    Key("--adam-beta2", number, "optim.beta2", default=0.999),
    Key("--adam-eps", number, "optim.eps", default=1e-8),
    Key("--micro-batch-size", whole),
    Key("--global-batch-size", whole),
    Key("--train-iters", whole),
    Key("--train-samples", whole),
    Key("--checkpoint-activations", words, switch=True),
    Key("--optimizer", words),
    Key("--min-lr", number, "optim.min_lr", default=0.0),
    Key("--lr-decay-style", words, default="linear"),
    Key("--lr-decay-iters", whole),
    Key("--lr-warmup-fraction", number),
    Key("--lr-warmup-iters", whole, default=0),
    Key("--init-method-std", number, "init.std", default=0.02),
    Key("--fp16", words, switch=True),
    Key("--loss-scale", number),
    Key("--initial-loss-scale", number, "precision.scaler.init", default=2.0**32),
    Key("--loss-scale-window", whole, "precision.scaler.window", default=1000),
    Key("--tensor-model-parallel-size", whole, "parallel.tp", default=1),
    Key("--pipeline-model-parallel-size", whole, "parallel.pp", default=1),
    Key("--split", words, "data.split", default="969,30,1"),
    Key("--load", words),
    Key("--save", words),
    Key("--save-interval", whole),
    Key("--log-interval", whole, "train.log_every", default=100),
    Key("--no-bias-gelu-fusion", words, switch=True),
    Key("--no-query-key-layer-scaling", words, switch=True, why="divides and multiplies by the same number"),
]


def model(settings: Settings) -> None:
    unit, ranks = settings["--make-vocab-size-divisible-by"], settings["--tensor-model-parallel-size"]
    vocabulary = settings["--vocab-size"]
    if unit:
        vocabulary = -(-vocabulary // (unit * ranks)) * unit * ranks
    settings.map(["--vocab-size", "--make-vocab-size-divisible-by"], {"model.vocab_size": vocabulary})
    dropout = settings["--hidden-dropout"]
    settings.map("--hidden-dropout", {"model.dropout_hidden": dropout, "model.dropout_embed": dropout})
    settings.ours["init.residual_scale"] = "gpt2"
    missing = [name for name in ("--num-layers", "--hidden-size", "--num-attention-heads") if settings[name] is None]
    if missing:
        raise ConfigError(settings.where, [f"{name}: is required." for name in missing])
    again = settings.is_given("--checkpoint-activations")
    settings.map("--checkpoint-activations", {"train.recompute": "full" if again else "none"})
    settings.ours.setdefault("train.recompute", "none")


def batch(settings: Settings, world: int, accumulation: int | None) -> int:
    """global = micro x dp x accumulation; any one that is missing follows. Gives the data-parallel size."""
    parts = settings["--tensor-model-parallel-size"] * settings["--pipeline-model-parallel-size"]
    if world % parts:
        raise ConfigError(settings.where, [f"{world} devices cannot be cut into tp x pp = {parts}."])
    replicas = world // parts
    micro, whole_batch = settings["--micro-batch-size"], settings["--global-batch-size"]
    if whole_batch is None and micro is None:
        raise ConfigError(settings.where, ["--micro-batch-size: neither it nor --global-batch-size is given."])
    if micro is None:
        micro = whole_batch // (replicas * (accumulation or 1))
    if whole_batch is None:
        whole_batch = micro * replicas * (accumulation or 1)
    found = micro * replicas * (accumulation or max(1, whole_batch // (micro * replicas)))
    if found != whole_batch:
        raise ConfigError(
            settings.where,
            [f"--global-batch-size: {whole_batch} is not micro {micro} x data-parallel {replicas} x accumulation."],
        )
    settings.map("--global-batch-size", {"batch.global_size": whole_batch})
    settings.map("--micro-batch-size", {"batch.micro_size": micro})
    settings.ours["parallel.dp"] = replicas
    return replicas


def length(settings: Settings) -> int:
    """Steps. In samples where they say so."""
    steps = settings["--train-iters"]
    if steps is None and settings["--train-samples"] is not None:
        steps = settings["--train-samples"] // settings.ours["batch.global_size"]
    if steps is None:
        raise ConfigError(settings.where, ["--train-iters: neither it nor --train-samples is given."])
    settings.map(["--train-iters", "--train-samples"], {"train.steps": steps})
    return int(steps)


def schedule(settings: Settings, steps: int, rate: str, shapes: dict[str, str]) -> None:
    settings.map(rate, "optim.lr")
    style = settings["--lr-decay-style"]
    if style not in shapes:
        raise ConfigError(settings.where, [f"--lr-decay-style: got {style!r}; needs one of {', '.join(shapes)}."])
    settings.map("--lr-decay-style", {"optim.schedule": shapes[style]})
    decay = settings["--lr-decay-iters"] or steps
    settings.map("--lr-decay-iters", {"optim.decay_steps": decay})
    fraction = settings["--lr-warmup-fraction"]
    warmup = fraction * decay if fraction is not None else settings["--lr-warmup-iters"]
    settings.map(["--lr-warmup-fraction", "--lr-warmup-iters"], {"optim.warmup_steps": float(warmup)})


def precision(settings: Settings, bf16: bool = False) -> None:
    half = settings.is_given("--fp16")
    compute = "bf16" if bf16 else "fp16" if half else "fp32"
    settings.map("--fp16", {"precision.compute": compute})
    settings.ours["precision.compute"] = compute
    fixed = settings["--loss-scale"]
    if fixed:
        settings.map("--loss-scale", {"precision.scaler.init": fixed, "precision.scaler.growth": 1.0})
    else:
        settings.ignore("--loss-scale", "empty: dynamic")


def checkpoints(settings: Settings, default_out: str) -> tuple[str, list[str]]:
    """(run folder, arguments). --load of the folder that is saved to means: go on if there is something."""
    out, load = str(settings["--save"] or default_out), settings["--load"]
    settings.map("--save", {"run.out": out})
    settings.ours["run.out"] = out
    every = settings["--save-interval"]
    settings.map("--save-interval", {"checkpoint.every": every or 0})
    settings.ours["checkpoint.every"] = every or 0
    if not load:
        return out, ["--resume", "never"]
    if load == out:
        settings.map("--load", {"--resume": "auto"})
        settings.ours.pop("--resume")
        return out, ["--resume", "auto"]
    settings.map("--load", {"init.checkpoint": load})
    return out, ["--resume", "never"]


def plain_switches(settings: Settings, names: dict[str, str]) -> None:
    for name, why in names.items():
        settings.ignore(name, why)


def as_switch(settings: Settings, name: str, key: str, value: Any) -> None:
    if settings.is_given(name):
        settings.map(name, {key: value})
