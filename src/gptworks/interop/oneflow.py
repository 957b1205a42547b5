"""OneFlow-GPT: oneflow_gpt.training, its shell scripts, Megatron's preprocess_data.py, launch_container.py."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError, UsageError
from gptworks.interop import command_line, megatron_flags
from gptworks.interop.megatron_flags import KERNEL, SHARED
from gptworks.interop.settings import Key, Settings, number, whole, words
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "oneflow"
TITLE = "OneFlow-GPT"

TRAINING = [
    *SHARED,
    Key("--num-accumulation-steps", whole),
    Key("--learning-rate", number, default=1e-3),
    Key("--dataset", words),
    Key("--seed", whole, "train.seed", default=12345),
    Key("--num-gpus-per-node", whole, default=1),
    Key("--num-nodes", whole, default=1),
    Key("--node-ips", words),
    Key("--ctrl-port", whole, default=50051),
    Key("--use-rdma", words, switch=True),
    Key("--use-external-dataset", words, switch=True, why="the data are those of --dataset"),
    Key("--multihead-attention-fusion", words, switch=True, why=KERNEL),
    Key("--no-scale-tril-softmax-dropout-fusion", words, switch=True, why=KERNEL),
    Key("--no-bias-dropout-fusion", words, switch=True, why=KERNEL),
    Key("--save-last", words, switch=True, why="the last step is always saved"),
    Key("--save-init", words, switch=True, why="fresh weights follow from train.seed"),
    Key("--log", words, default="./output", why="logs are in the run folder"),
    Key("--metric-print-format", words, why="train.log_style has the forms that exist here"),
    Key("--profile-transformer-layer", words, switch=True, why="train.profile=[first, last] traces steps"),
]
CONTAINER = [
    Key("--src", words),
    Key("--py", words),
    Key("--image", words),
    Key("--wheel", words),
    Key("--cmd", words),
    Key("--extra-docker-args", words),
]
PREPARATION = [
    Key("--input", words),
    Key("--output-prefix", words),
    Key("--vocab", words),
    Key("--vocab-file", words),
    Key("--merge-file", words),
    Key("--dataset-impl", words, default="mmap"),
    Key("--tokenizer-type", words, default="GPT2BPETokenizer"),
    Key("--append-eod", words, switch=True),
    Key("--json-key", words),
    Key("--json-keys", words, default="text"),
    Key("--workers", whole, default=1),
    Key("--log-interval", whole, why="a bar shows the progress"),
    Key("--split-sentences", words, switch=True, why="GPT reads whole documents"),
    Key("--keep-newlines", words, switch=True, why="they are kept"),
    Key("--chunk-size", whole, why="the work is cut by itself"),
]
# Their scripts read these, with these values where they are not set.
VARIABLES = {
    "ONEFLOW_GPT_DATASET": ("--dataset", ""),
    "ONEFLOW_GPT_SEQ_LENGTH": ("--seq-length", "2048"),
    "ONEFLOW_GPT_NUM_LAYERS": ("--num-layers", "16"),
    "ONEFLOW_GPT_HIDDEN_SIZE": ("--hidden-size", "1536"),
    "ONEFLOW_GPT_NUM_ATTENTION_HEADS": ("--num-attention-heads", "16"),
    "ONEFLOW_GPT_MICRO_BATCH_SIZE": ("--micro-batch-size", "8"),
    "ONEFLOW_GPT_GLOBAL_BATCH_SIZE": ("--global-batch-size", ""),
    "ONEFLOW_GPT_TENSOR_MODEL_PARALLEL_SIZE": ("--tensor-model-parallel-size", "1"),
    "ONEFLOW_GPT_PIPELINE_MODEL_PARALLEL_SIZE": ("--pipeline-model-parallel-size", "1"),
    "ONEFLOW_GPT_NUM_ACCUMULATION_STEPS": ("--num-accumulation-steps", ""),
    "ONEFLOW_GPT_NUM_GPUS_PER_NODE": ("--num-gpus-per-node", "4"),
    "ONEFLOW_GPT_NUM_NODES": ("--num-nodes", "1"),
    "ONEFLOW_GPT_NODE_IPS": ("--node-ips", ""),
    "ONEFLOW_GPT_TRAIN_ITERS": ("--train-iters", "500000"),
    "ONEFLOW_GPT_LOG_INTERVAL": ("--log-interval", "100"),
    "ONEFLOW_GPT_INIT_LOSS_SCALE": ("--initial-loss-scale", "4294967296"),
    "ONEFLOW_GPT_LOAD_PATH": ("--load", ""),
    "ONEFLOW_GPT_SAVE_PATH": ("--save", "checkpoint"),
    "ONEFLOW_GPT_SAVE_INTERVAL": ("--save-interval", "10000"),
}
_SIZES = {"117M": (12, 768, 12), "345M": (24, 1024, 16)}
_NAMED = re.compile(r"(?:distribute_)?pretrain_(\d+)n(\d+)d_(\d+)x(\d+)x(\d+)_(\d+)_(\d+)x(\d+)\.sh")


def recognise(command: Command) -> bool:
    name = Path(command.program).name
    return (
        command.program == "oneflow_gpt.training"
        or command.program.endswith("oneflow_gpt/training.py")
        or name == "launch_container.py"
        or (name == "preprocess_data.py" and "--vocab" in command.arguments)
        or bool(re.fullmatch(r"pretrain_(117M|345M)\.sh", name) or _NAMED.fullmatch(name))
    )


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    return False


def translate_yaml(path: Path) -> Translation:
    raise UsageError(f"{path}: OneFlow-GPT has no YAML; translate its command with `gptworks translate -- COMMAND`.")


def translate(command: Command, find: Any) -> Translation:
    name = Path(command.program).name
    if name == "launch_container.py":
        return _container(command)
    if name == "preprocess_data.py":
        return prepare(command, NAME)
    if name.endswith(".sh"):
        return _train(command, _of_script(name, command), f"{name} (as its variables and name say)")
    given = command_line.flags(command.arguments, {key.theirs for key in TRAINING if key.switch})
    return _train(command, given, command.program)


def _of_script(name: str, command: Command) -> dict[str, str]:
    """The flags that a script of theirs would have passed."""
    given = {flag: command.environment.get(variable, value) for variable, (flag, value) in VARIABLES.items()}
    size = re.fullmatch(r"pretrain_(117M|345M)\.sh", name)
    if size:
        layers, width, heads = _SIZES[size[1]]
        given |= {"--num-layers": str(layers), "--hidden-size": str(width), "--num-attention-heads": str(heads)}
        given |= {
            "--seq-length": "1024",
            "--micro-batch-size": "8",
            "--global-batch-size": "8",
            "--num-gpus-per-node": "1",
        }
    named = _NAMED.fullmatch(name)
    if named:
        nodes, devices, _, tensor, stages, whole_batch, breadth, depth = named.groups()
        given |= {"--num-nodes": nodes, "--num-gpus-per-node": devices, "--tensor-model-parallel-size": tensor}
        given |= {"--pipeline-model-parallel-size": stages, "--global-batch-size": whole_batch}
        given |= {"--hidden-size": breadth, "--num-layers": depth}
        given.pop("--micro-batch-size")
        given["--micro-batch-size"] = "8" if int(whole_batch) >= 8 * int(named[3]) else "1"
    for variable, (flag, _) in VARIABLES.items():
        if variable in command.environment:
            given[flag] = command.environment[variable]
    given.setdefault("--dataset", "")
    if not given["--dataset"]:
        given["--dataset"] = "gpt_sample_dataset_text_document"
    given |= {"--load": given["--load"] or given["--save"], "--vocab-size": "50257", "--split": "949,50,1"}
    given |= {"--learning-rate": "0.00015", "--min-lr": "1.0e-5", "--lr-decay-style": "cosine"}
    given |= {"--lr-decay-iters": "320000", "--lr-warmup-fraction": "0.01", "--weight-decay": "1e-2"}
    given |= {"--optimizer": "adamw", "--clip-grad": "1.0"}
    given |= dict.fromkeys(("--checkpoint-activations", "--multihead-attention-fusion", "--fp16"), "")
    return {flag: text for flag, text in given.items() if text or flag in _SWITCHES}


_SWITCHES = {key.theirs for key in TRAINING if key.switch}


def _train(command: Command, given: dict[str, str], where: str) -> Translation:
    settings = Settings(where, TRAINING, given)
    megatron_flags.model(settings)
    settings.ours["model.gelu"] = "erf"
    length = settings["--seq-length"]
    settings.map("--seq-length", {"data.seq_len": length, "model.max_positions": length})
    nodes, devices = settings["--num-nodes"], settings["--num-gpus-per-node"]
    megatron_flags.batch(settings, nodes * devices, settings["--num-accumulation-steps"])
    settings.map("--num-accumulation-steps", {"batch.global_size": settings.ours["batch.global_size"]})
    steps = megatron_flags.length(settings)
    megatron_flags.schedule(settings, steps, "--learning-rate", {"cosine": "cosine", "linear": "linear"})
    settings.ours |= {"optim.warmup_from": 0, "optim.cosine_clock": "from_start"}
    if settings["--min-lr"] > settings["--learning-rate"]:
        settings.ours["optim.allow_rising_lr"] = True
    megatron_flags.precision(settings)
    settings.ours |= {"precision.scaler.hysteresis": 1}
    if not settings["--dataset"]:
        raise ConfigError(where, ["--dataset: is required, the prefix of a .bin and .idx."])
    settings.map("--dataset", {"data.path": (settings["--dataset"],)})
    settings.ours |= {"data.order": "megatron", "data.tokenizer": "gpt2"}
    optimizer = settings["--optimizer"] or "adamw"
    if optimizer != "adamw":
        raise ConfigError(where, [f"--optimizer: got {optimizer!r}; OneFlow-GPT has adamw only, and so have we."])
    settings.ignore("--optimizer", "AdamW, the only one there and here")
    settings.ignore("--no-bias-gelu-fusion", KERNEL)
    out, arguments = megatron_flags.checkpoints(settings, "checkpoint")
    arguments += _machines(settings, nodes)
    settings.map_plain()
    settings.ours |= {"train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000, "run.device": "gpu"}
    settings.require_noted()
    return Translation(
        NAME, "train", command.program, config=settings.ours, arguments=arguments, notes=settings.notes,
        after=[AfterTraining(NAME, f"{out}/iter{{step}}_snapshot")], device="gpu", processes=nodes * devices,
    )  # fmt: skip


def _machines(settings: Settings, nodes: int) -> list[str]:
    settings.map(["--num-gpus-per-node"], {"--nproc": settings["--num-gpus-per-node"]})
    settings.map(["--num-nodes"], {"--nnodes": nodes})
    for key in ("--nproc", "--nnodes"):
        settings.ours.pop(key)
    arguments: list[str] = []
    ips = settings["--node-ips"]
    if nodes > 1:
        if not ips:
            raise ConfigError(settings.where, [f"--node-ips: {nodes} machines, so their addresses are needed, as a,b."])
        arguments += ["--node-ips", ips, "--nproc", str(settings["--num-gpus-per-node"])]
        settings.map("--node-ips", {"--node-ips": ips})
        settings.ours.pop("--node-ips")
    else:
        settings.ignore("--node-ips", "one machine")
    settings.ignore("--ctrl-port", "the machines meet at the port of --master")
    if settings.is_given("--use-rdma"):
        arguments.append("--rdma")
        settings.map("--use-rdma", {"--rdma": True})
        settings.ours.pop("--rdma")
    return arguments


def prepare(command: Command, system: str) -> Translation:
    """Megatron's preprocess_data.py, which OneFlow's document uses too."""
    given = command_line.flags(
        command.arguments, {key.theirs for key in PREPARATION if key.switch}, several={"--json-keys"}
    )
    settings = Settings(command.program, PREPARATION, given)
    needed = [name for name in ("--input", "--output-prefix") if not settings[name]]
    if needed:
        raise ConfigError(command.program, [f"{name}: is required." for name in needed])
    keys = str(settings["--json-key"] or settings["--json-keys"]).split()
    formats = {"mmap": "megatron", "cached": "tnt", "lazy": "tnt"}
    implementation = settings["--dataset-impl"]
    if implementation not in formats:
        raise ConfigError(command.program, [f"--dataset-impl: got {implementation!r}; needs mmap, cached or lazy."])
    prefix = str(settings["--output-prefix"])
    out = f"{prefix}_{keys[0]}_document" if len(keys) == 1 else prefix
    arguments = [settings["--input"], "--out", out, "--format", formats[implementation]]
    arguments += ["--workers", str(settings["--workers"])]
    for key in keys:
        arguments += ["--key", key]
    settings.map("--input", {"INPUT": settings["--input"]})
    settings.map("--output-prefix", {"--out": out})
    settings.map(["--json-key", "--json-keys"], {"--key": " ".join(keys)})
    settings.map("--dataset-impl", {"--format": formats[implementation]})
    settings.map("--workers", {"--workers": settings["--workers"]})
    vocabulary, merges = settings["--vocab"] or settings["--vocab-file"], settings["--merge-file"]
    if vocabulary and merges:
        arguments += ["--vocab-file", vocabulary, "--merge-file", merges]
    settings.map(["--vocab", "--vocab-file"], {"--vocab-file": vocabulary})
    settings.map("--merge-file", {"--merge-file": merges})
    if settings["--tokenizer-type"] != "GPT2BPETokenizer":
        raise ConfigError(
            command.program, [f"--tokenizer-type: got {settings['--tokenizer-type']!r}; GPT has GPT2BPETokenizer."]
        )
    settings.map("--tokenizer-type", {"--tokenizer": "gpt2"})
    if settings.is_given("--append-eod"):
        arguments.append("--append-eod")
        settings.map("--append-eod", {"--append-eod": True})
    settings.map_plain()
    settings.require_noted()
    return Translation(system, "prepare", command.program, arguments=arguments, notes=settings.notes)


def _container(command: Command) -> Translation:
    given = command_line.flags(command.arguments, set())
    settings = Settings(command.program, CONTAINER, given)
    if not settings["--cmd"] or not settings["--image"]:
        raise ConfigError(command.program, ["--image and --cmd are required."])
    inner = shlex.split(settings["--cmd"].replace("\\\n", " "))
    settings.map("--image", {"--image": settings["--image"]})
    settings.map("--src", {"--mount": settings["--src"]})
    settings.map("--cmd", {"--": "gptworks run -- " + " ".join(inner[:3]) + " ..."})
    settings.ignore("--py", "the image has its Python")
    settings.ignore("--wheel", "OneFlow is not needed: gptworks runs the command")
    settings.ignore("--extra-docker-args", "put them into `docker run` by hand")
    settings.require_noted()
    arguments = ["--image", settings["--image"], "--mount", settings["--src"] or ".", "--", *inner]
    return Translation(NAME, "launch", command.program, arguments=arguments, notes=settings.notes)
