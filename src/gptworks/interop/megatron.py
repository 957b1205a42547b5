"""Megatron-LM: pretrain_gpt.py with flags of 2021 and common ones of today, preprocess_data.py, generation."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import megatron_flags, megatron_kinds, megatron_prepare, torch_launch
from gptworks.interop.megatron_flags import KERNEL, SHARED, on_command_line
from gptworks.interop.settings import Key, Settings, parse_float, parse_int, parse_str
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "megatron"
TITLE = "Megatron-LM"

_LOGS = "the run folder has metrics.jsonl and TensorBoard files"
_SPEED = "a matter of speed or memory, not of numbers"

TRAINING = [
    *SHARED,
    *megatron_kinds.KEYS,
    Key("--max-position-embeddings", parse_int),
    Key("--layernorm-epsilon", parse_float),
    Key("--norm-epsilon", parse_float),
    Key("--seed", parse_int, "train.seed", default=1234),
    Key("--lr", parse_float),
    Key("--optimizer", parse_str, default="adam"),
    Key("--rampup-batch-size", parse_str),
    Key("--lr-decay-samples", parse_int),
    Key("--lr-warmup-samples", parse_int, default=0),
    Key("--bf16", parse_str, switch=True),
    Key("--min-loss-scale", parse_float, "precision.scaler.floor", default=1.0),
    Key("--hysteresis", parse_int, "precision.scaler.hysteresis", default=2),
    Key("--num-layers-per-virtual-pipeline-stage", parse_int),
    Key("--sequence-parallel", parse_str, switch=True),
    Key("--use-distributed-optimizer", parse_str, switch=True),
    Key("--context-parallel-size", parse_int, default=1),
    Key("--eval-interval", parse_int, default=1000),
    Key("--eval-iters", parse_int, default=100),
    Key("--data-path", parse_str),
    Key("--vocab-file", parse_str),
    Key("--merge-file", parse_str),
    Key("--tokenizer-type", parse_str),
    Key("--tokenizer-model", parse_str),
    Key("--vocab-size", parse_int),
    Key("--padded-vocab-size", parse_int),
    Key("--data-impl", parse_str, default="infer", same_effect="what the files are is seen in them"),
    Key("--reset-position-ids", parse_str, switch=True),
    Key("--reset-attention-mask", parse_str, switch=True),
    Key("--eod-mask-loss", parse_str, switch=True),
    Key("--finetune", parse_str, switch=True),
    Key("--recompute-granularity", parse_str),
    Key("--recompute-method", parse_str),
    Key("--recompute-num-layers", parse_int),
    Key("--recompute-activations", parse_str, switch=True),
    Key("--checkpoint-num-layers", parse_int, same_effect="every block is recomputed"),
    Key("--distribute-checkpointed-activations", parse_str, switch=True, same_effect=_SPEED),
    Key("--untie-embeddings-and-output-weights", parse_str, switch=True),
    Key("--exit-interval", parse_int, ignored_because="a run ends at train.steps; Ctrl-C saves and ends it"),
    Key("--exit-duration-in-mins", parse_int, ignored_because="a run ends at train.steps; Ctrl-C saves and ends it"),
    Key("--attention-softmax-in-fp32", parse_str, switch=True, same_effect="softmax is always computed in fp32"),
    Key("--accumulate-allreduce-grads-in-fp32", parse_str, switch=True,
        same_effect="gradients are always summed in fp32"),
    Key("--fp32-residual-connection", parse_str, switch=True,
        ignored_because="the residual stream is of precision.compute"),
    Key("--apply-query-key-layer-scaling", parse_str, switch=True, same_effect=megatron_flags.SAME_NUMBER),
    *[
        Key(f"--{name}", parse_str, switch=True, same_effect=KERNEL)
        for name in (
            "masked-softmax-fusion", "no-masked-softmax-fusion", "no-scaled-masked-softmax-fusion",
            "bias-dropout-fusion", "no-bias-dropout-fusion", "use-flash-attn",
            "no-gradient-accumulation-fusion", "no-persist-layer-norm", "cross-entropy-loss-fusion",
        )
    ],
    *[
        Key(f"--{name}", parse_str, switch=True, same_effect=_SPEED)
        for name in (
            "overlap-grad-reduce", "overlap-param-gather", "no-async-tensor-model-parallel-allreduce",
            "no-contiguous-buffers-in-local-ddp", "use-cpu-initialization", "tp-comm-overlap",
            "no-load-optim", "no-load-rng", "no-save-optim", "no-save-rng", "no-data-sharding", "use-mcore-models",
            "scatter-gather-tensors-in-pipeline", "no-scatter-gather-tensors-in-pipeline", "use-legacy-models",
        )
    ],
    *[
        Key(f"--{name}", parse_str, ignored_because=_LOGS)
        for name in (
            "tensorboard-dir", "tensorboard-log-interval", "tensorboard-queue-size", "wandb-project", "wandb-exp-name",
            "wandb-save-dir",
        )
    ],
    *[
        Key(f"--{name}", parse_str, switch=True, ignored_because=_LOGS)
        for name in (
            "log-params-norm", "log-num-zeros-in-grad", "log-throughput", "log-timers-to-tensorboard",
            "log-batch-size-to-tensorboard", "log-validation-ppl-to-tensorboard", "log-memory-to-tensorboard",
            "no-log-learnig-rate-to-tensorboard", "no-log-loss-scale-to-tensorboard", "log-progress",
        )
    ],
    Key("--distributed-backend", parse_str, same_effect="NCCL on GPUs, gloo on CPUs"),
    Key("--distributed-timeout-minutes", parse_int),
    Key("--DDP-impl", parse_str, same_effect=_SPEED),
    Key("--local_rank", parse_int, same_effect="the launcher says it"),
    Key("--num-workers", parse_int, ignored_because="reading needs no processes of its own"),
    Key("--transformer-impl", parse_str, same_effect=KERNEL),
    Key("--attention-backend", parse_str, same_effect=KERNEL),
    Key("--ckpt-format", parse_str,
        ignored_because="ours is torch's distributed format; Megatron's is written beside it as `torch`"),
    Key("--auto-detect-ckpt-format", parse_str, switch=True, same_effect="seen in the files"),
    Key("--async-save", parse_str, switch=True),
    *[
        Key(f"--{name}", parse_str, switch=True)
        for name in ("fp8", "rotary-interleaved", "multi-latent-attention", "squared-relu", "apply-layernorm-1p")
    ],
    Key("--num-experts", parse_int),
    Key("--mock-data", parse_str, switch=True),
]  # fmt: skip
GENERATION = [
    *TRAINING,
    Key("--out-seq-length", parse_int, default=1024),
    Key("--temperature", parse_float, default=1.0),
    Key("--greedy", parse_str, switch=True),
    Key("--top_p", parse_float, default=0.0),
    Key("--top_k", parse_int, default=0),
    Key("--sample-input-file", parse_str),
    Key("--sample-output-file", parse_str, ignored_because="the text is printed; send it where you like"),
    Key("--num-samples", parse_int, default=0),
    Key("--genfile", parse_str, ignored_because="the text is printed; send it where you like"),
    Key("--recompute", parse_str, switch=True, same_effect="keys and values are kept, which gives the same text"),
]
_TRAINERS = {"pretrain_gpt.py", "pretrain_gpt2.py"}
_GENERATORS = {"generate_samples_gpt.py", "generate_samples_gpt2.py"}
# What is not here: flag -> what it asks for.
_NOT_HERE = {
    "--fp8": "FP8",
    "--num-experts": "a mixture of experts",
    "--multi-latent-attention": "latent attention",
    "--rotary-interleaved": "rotary embeddings of neighbouring pairs",
    "--squared-relu": "squared ReLU",
    "--apply-layernorm-1p": "norm weights stored minus one",
    "--mock-data": "invented data",
}


def recognise(command: Command) -> bool:
    name = Path(command.program).name
    return name in _TRAINERS | _GENERATORS or name == "preprocess_data.py"


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    return False


def translate_yaml(path: Path) -> Translation:
    raise UsageError(
        f"{path}: Megatron-LM is set by flags; translate its command with `gptworks translate -- COMMAND`."
    )


def translate(command: Command, find: Any) -> Translation:
    name = Path(command.program).name
    if name == "preprocess_data.py":
        return megatron_prepare.translate(command, NAME)
    if name in _GENERATORS:
        return _generate(command)
    several = ("--data-path", "--rampup-batch-size")
    settings = Settings.of_command(command, TRAINING, several=several, hints=_HINTS)
    _refuse_what_is_not_here(settings)
    start = torch_launch.read(command)
    remarks: list[str] = []
    _model(settings, command.folder, remarks)
    _layout(settings, start.world_size)
    _optimizer(settings)
    _precision(settings)
    _data(settings, command.folder)
    _recompute(settings)
    out, resume, more = megatron_flags.checkpoints(settings, command.folder, "runs/megatron", NAME)
    if settings.is_given("--finetune"):
        settings.map("--finetune", {"init.checkpoint": settings["--load"] or ""}, why="weights only; steps begin at 0")
        resume = ["--resume", "never"]
    settings.map_plain()
    settings.ours |= {"train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000, "run.device": "cuda"}
    settings.require_noted()
    tp, pp = settings["--tensor-model-parallel-size"], settings["--pipeline-model-parallel-size"]
    # Names of before Megatron core, which its own converters read, where the model is of that time.
    format = "megatron-core" if megatron_kinds.is_of_today(settings) else NAME
    after = [AfterTraining(format, out, tp, pp, spread="iter_{step:07d}")] if settings["--save"] else []
    return Translation(
        NAME, "train", command.program, config=settings.ours, arguments=[*resume, *start.arguments],
        notes=[*start.notes, *settings.notes],
        remarks=[*remarks, *more], after=after, device="gpu", their_names=settings.their_names,
    )  # fmt: skip


_HINTS = {
    "--model-parallel-size": "it became --tensor-model-parallel-size in 2021. Use that.",
    "--batch-size": "it became --micro-batch-size in 2021, with --global-batch-size for the whole. Use those.",
    "--warmup": "it became --lr-warmup-fraction in 2021. Use that.",
}


def _refuse_what_is_not_here(settings: Settings) -> None:
    asked = {flag: feature for flag, feature in _NOT_HERE.items() if settings.is_given(flag)}
    if settings["--context-parallel-size"] != 1:
        asked["--context-parallel-size"] = "context parallelism"
    if asked:
        raise ConfigError(settings.where, [f"{flag}: {feature} is not supported." for flag, feature in asked.items()])
    settings.same("--context-parallel-size", "1: none, as here")


def _model(settings: Settings, folder: Path, remarks: list[str]) -> None:
    megatron_flags.model(settings)
    megatron_kinds.kind(settings)
    megatron_flags.require(settings, ("--seq-length",))
    settings.map("--seq-length", "data.seq_len")
    settings.map(
        "--max-position-embeddings",
        {"model.max_positions": settings["--max-position-embeddings"] or settings["--seq-length"]},
    )
    epsilon = settings["--norm-epsilon"] or settings["--layernorm-epsilon"] or 1e-5
    settings.map(["--norm-epsilon", "--layernorm-epsilon"], {"model.layernorm_eps": epsilon})
    # Their fused kernel computes the approximation, what is left without it the exact one.
    if settings.is_given("--swiglu"):
        settings.same("--no-bias-gelu-fusion", "a gated layer has no GELU")
    else:
        exact = settings.is_given("--no-bias-gelu-fusion")
        settings.map("--no-bias-gelu-fusion", {"model.gelu": "erf" if exact else "tanh"})
    if settings.is_given("--untie-embeddings-and-output-weights"):
        settings.map("--untie-embeddings-and-output-weights", {"model.tied": False})
    vocabulary = _vocabulary(settings, folder)
    size = settings["--padded-vocab-size"] or megatron_flags.padded(settings, vocabulary)
    settings.map(["--padded-vocab-size", "--vocab-size", "--make-vocab-size-divisible-by"], {"model.vocab_size": size})


def _vocabulary(settings: Settings, folder: Path) -> int:
    """Words of their tokenizer: counted in its file."""
    kind = settings["--tokenizer-type"] or "GPT2BPETokenizer"
    files = ["--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model"]
    settings.same(files, "the data say their tokenizer; how many tokens it has is model.vocab_size")
    if settings["--vocab-size"]:
        return int(settings["--vocab-size"])
    if kind != "GPT2BPETokenizer":
        raise ConfigError(settings.where, [f"--vocab-size: is needed with --tokenizer-type {kind}."])
    file = folder / str(settings["--vocab-file"] or "")
    if settings["--vocab-file"] and file.is_file():
        try:
            return len(json_text.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(settings.where, [f"--vocab-file: {file} cannot be read ({error})."]) from None
    return 50257


def _layout(settings: Settings, world: int) -> None:
    if settings["--rampup-batch-size"]:
        raise ConfigError(
            settings.where,
            ["--rampup-batch-size: the batch has one size here. Leave it out, or train in parts with --load."],
        )
    settings.same("--rampup-batch-size", "empty: one size")
    replicas = megatron_flags.batch(settings, world)
    times = settings["--eval-iters"]
    settings.map("--eval-iters", {"evaluate.batches": times})  # of the global batch, there and here
    settings.map("--eval-interval", {"evaluate.every": settings["--eval-interval"] if times else 0})
    per_stage = settings["--num-layers-per-virtual-pipeline-stage"]
    if per_stage:
        stages = settings["--num-layers"] // settings["--pipeline-model-parallel-size"] // per_stage
        settings.map(
            "--num-layers-per-virtual-pipeline-stage",
            {"parallel.virtual_stages": stages, "parallel.schedule": "interleaved"},
        )
    settings.map("--sequence-parallel", {"parallel.sequence": settings.is_given("--sequence-parallel")})
    if settings.is_given("--use-distributed-optimizer"):
        shards = {"parallel.fsdp": replicas, "parallel.dp": 1, **({"parallel.zero": 1} if replicas > 1 else {})}
        settings.map("--use-distributed-optimizer", shards)
    if minutes := settings["--distributed-timeout-minutes"]:
        settings.map("--distributed-timeout-minutes", {"parallel.timeout": 60 * minutes})
    if settings.is_given("--async-save"):
        settings.map("--async-save", {"checkpoint.asynchronous": True})


def _optimizer(settings: Settings) -> None:
    if settings["--optimizer"] != "adam":
        raise ConfigError(
            settings.where, [f"--optimizer: got {settings['--optimizer']!r}; needs adam (AdamW, as here)."]
        )
    settings.same("--optimizer", "AdamW, as theirs is")
    megatron_flags.require(settings, ("--lr",))
    steps, size = megatron_flags.length(settings), settings.ours["batch.global_size"]
    shapes = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    megatron_flags.schedule(settings, (settings["--lr-decay-samples"] or steps * size) / size, "--lr", shapes)
    if settings["--lr-decay-samples"]:
        settings.map("--lr-decay-samples", {"optim.decay_steps": settings["--lr-decay-samples"] // size})
    if settings["--lr-warmup-samples"]:
        settings.map("--lr-warmup-samples", {"optim.warmup_steps": settings["--lr-warmup-samples"] / size})
    settings.same(["--lr-decay-samples", "--lr-warmup-samples"], "0: as the iterations say")
    if settings["--min-lr"] > settings["--lr"]:
        raise ConfigError(
            settings.where,
            [
                f"--min-lr: {settings['--min-lr']:g} is above --lr {settings['--lr']:g}; Megatron refuses it too. "
                "They are probably swapped."
            ],
        )
    # Their scheduler is asked before it has counted the step: the first update of a warmup has rate 0.
    settings.ours |= {"optim.warmup_from": 0, "optim.cosine_clock": "after_warmup"}


def _precision(settings: Settings) -> None:
    bf16 = settings.is_given("--bf16")
    if bf16 and settings.is_given("--fp16"):
        raise ConfigError(settings.where, ["--bf16 and --fp16: give one of them."])
    megatron_flags.precision(settings, bf16=bf16)
    settings.map("--bf16", {"precision.compute": settings.ours["precision.compute"]})
    settings.ours["precision.scaler.refill"] = "growth"


def _data(settings: Settings, folder: Path) -> None:
    if not settings["--data-path"]:
        raise ConfigError(settings.where, ["--data-path: is required: X of a pair X.bin and X.idx."])
    words = str(settings["--data-path"]).split()
    weights = [float(text) for text in words[::2]] if len(words) > 1 and _all_numbers(words[::2]) else []
    paths = words[1::2] if weights else words
    blend = {"data.weights": tuple(weights)} if weights else {}
    settings.map("--data-path", {"data.path": tuple(paths), **blend})
    settings.ours["data.order"] = "megatron"
    megatron_flags.tokenizer_of(settings, folder, paths)
    for flag, key in (
        ("--reset-position-ids", "data.reset_positions"),
        ("--reset-attention-mask", "data.reset_attention"),
        ("--eod-mask-loss", "data.mask_eod"),
    ):
        settings.map(flag, {key: settings.is_given(flag)})


def _all_numbers(texts: list[str]) -> bool:
    return all(re.fullmatch(r"[0-9.]+(e-?\d+)?", text) for text in texts)


def _recompute(settings: Settings) -> None:
    granularity = settings["--recompute-granularity"]
    if granularity not in (None, "full", "selective"):
        raise ConfigError(settings.where, [f"--recompute-granularity: got {granularity!r}; needs full or selective."])
    if settings.is_given("--checkpoint-activations") or granularity == "full":
        mode = "full"
    elif settings.is_given("--recompute-activations") or granularity == "selective":
        mode = "core_attn"
    else:
        mode = "none"
    names = ["--checkpoint-activations", "--recompute-granularity", "--recompute-activations"]
    settings.map(names, {"train.recompute": mode})
    settings.ignore(["--recompute-method", "--recompute-num-layers"], "every block is recomputed, or none")


def _generate(command: Command) -> Translation:
    settings = Settings.of_command(command, GENERATION)
    if not settings["--load"]:
        raise ConfigError(command.program, ["--load: is required: the folder of a checkpoint."])
    source = settings["--sample-input-file"]
    if not source and not settings["--num-samples"]:
        raise ConfigError(command.program, ["--sample-input-file: is required: a file with a prompt on each line."])
    arguments = ["--model", settings["--load"]]
    on_command_line(settings, "--load", {"--model": settings["--load"]})
    if source:
        arguments += ["--prompts", source]
        on_command_line(settings, "--sample-input-file", {"--prompts": source})
        settings.ignore("--num-samples", "one text for each prompt")
    else:
        arguments += ["--prompt", "<|endoftext|>", "--num-return-sequences", str(settings["--num-samples"])]
        on_command_line(settings, "--num-samples", {"--num-return-sequences": settings["--num-samples"]})
    longest = settings["--out-seq-length"]
    arguments += ["--max-new-tokens", str(longest), "--window", "slide"]
    on_command_line(settings, "--out-seq-length", {"--max-new-tokens": longest}, why="theirs counts the prompt too")
    if settings.is_given("--greedy"):
        arguments += ["--strategy", "greedy"]
        on_command_line(settings, "--greedy", {"--strategy": "greedy"})
        settings.ignore(["--temperature", "--top_k", "--top_p"], "--greedy takes the likeliest token")
    else:
        chosen = {"--temperature": settings["--temperature"], "--top-k": settings["--top_k"]}
        chosen["--top-p"] = settings["--top_p"] or 1.0
        arguments += [word for option, value in chosen.items() for word in (option, str(value))]
        for theirs, ours in (("--temperature", "--temperature"), ("--top_k", "--top-k"), ("--top_p", "--top-p")):
            on_command_line(settings, theirs, {ours: chosen[ours]})
    if seed := settings["--seed"]:
        arguments += ["--seed", str(seed)]
        on_command_line(settings, "--seed", {"--seed": seed})
    for name, key in settings.keys.items():
        if key.ignored_because:
            settings.ignore(name, key.ignored_because)
        else:
            settings.same(name, "the checkpoint says it")
    return settings.translated(NAME, "generate", command.program, arguments=arguments, device="gpu")
