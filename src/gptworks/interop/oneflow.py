"""OneFlow-GPT: oneflow_gpt.training, its shell scripts, Megatron's preprocess_data.py, launch_container.py."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.config import presets
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import command_line, megatron_flags, megatron_prepare, registry, shell_block
from gptworks.interop.megatron_flags import KERNEL, SHARED, on_command_line
from gptworks.interop.settings import Key, Settings, parse_float, parse_int, parse_str
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "oneflow"
TITLE = "OneFlow-GPT"

TRAINING = [
    *SHARED,
    Key("--vocab-size", parse_int, default=50257),
    Key("--num-accumulation-steps", parse_int),
    Key("--learning-rate", parse_float, default=1e-3),
    Key("--optimizer", parse_str, default="adamw"),
    Key("--dataset", parse_str),
    Key("--seed", parse_int, "train.seed", default=12345),
    Key("--num-gpus-per-node", parse_int, default=1),
    Key("--num-nodes", parse_int, default=1),
    Key("--node-ips", parse_str),
    Key("--ctrl-port", parse_int, default=50051),
    Key("--use-rdma", parse_str, switch=True),
    Key("--use-external-dataset", parse_str, switch=True),
    Key("--multihead-attention-fusion", parse_str, switch=True, same_effect=KERNEL),
    Key("--no-scale-tril-softmax-dropout-fusion", parse_str, switch=True, same_effect=KERNEL),
    Key("--no-bias-dropout-fusion", parse_str, switch=True, same_effect=KERNEL),
    Key("--save-last", parse_str, switch=True, same_effect="the last step is always saved"),
    Key(
        "--save-init",
        parse_str,
        switch=True,
        ignored_because="fresh weights follow from train.seed and are not written",
    ),
    Key("--log", parse_str, default="./output"),
    Key("--metric-print-format", parse_str, ignored_because="the log has a form of its own (train.log_style)"),
    Key(
        "--profile-transformer-layer",
        parse_str,
        switch=True,
        ignored_because="train.profile=[first, last] traces steps",
    ),
]
CONTAINER = [
    Key("--src", parse_str),
    Key("--py", parse_str, default="3.7", ignored_because="the image has its Python"),
    Key("--image", parse_str, default="oneflow-manylinux2014-cuda11.2:0.1"),
    Key(
        "--wheel",
        parse_str,
        ignored_because="OneFlow is not needed: gptworks, which must be in the image, runs the command",
    ),
    Key("--cmd", parse_str),
    Key("--extra-mount", parse_str, default="/data"),
    Key("--proxy", parse_str),
    Key("--no-interactive", parse_str, switch=True, same_effect="a terminal is passed on only where there is one"),
]
_SIZED = re.compile(r"pretrain_(117M|345M)\.sh")
# {machines}n{devices}d_{data}x{tensor}x{pipeline}_{batch}_{width}x{depth}
_NAMED = re.compile(r"(?:distribute_)?pretrain_(\d+)n(\d+)d_(\d+)x(\d+)x(\d+)_(\d+)_(\d+)x(\d+)\.sh")
_EXTERNAL = "Megatron's data set, which they copied in 2021; its split was rounded in another way then"


def recognise(command: Command) -> bool:
    name = Path(command.program).name
    return (
        command.program == "oneflow_gpt.training"
        or command.program.endswith("oneflow_gpt/training.py")
        or name == "launch_container.py"
        or (name == "preprocess_data.py" and "--vocab" in command.arguments)
        or bool(_SIZED.fullmatch(name) or _NAMED.fullmatch(name))
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
        return megatron_prepare.translate(command, NAME)
    if name.endswith(".sh"):
        return _of_script(name, command)
    return _train(command, command_line.flags(command.arguments, _SWITCHES), [])


def _of_script(name: str, command: Command) -> Translation:
    """One of the documents' that is not here: what its name says, and what all of them have. Variables that are set in
    front are there to be tried, and go before; one that is here has been read, and overrules them as in a shell."""
    if command.arguments:
        raise UsageError(
            f"{command.program}: takes no arguments, got {command.arguments[0]}. It is set by variables in front, "
            f"such as ONEFLOW_GPT_TRAIN_ITERS=10 bash {command.program}."
        )
    shared = registry.shipped("pretrain.sh")
    assert shared is not None
    values = {**os.environ, **_settings_in_name(name), **command.environment}
    text = shared.read_text(encoding="utf-8")
    (started,) = shell_block.commands(text, shared.name, values, command.folder, lambda script, folder: None)
    inside = command_line.take_apart(started.words, command.environment, command.folder)
    flags = command_line.flags(inside.arguments, _SWITCHES)
    remarks = [
        f"{command.program} is not here: the settings of the original are used, which ship with gptworks: {shared}"
    ]
    if int(flags["--num-nodes"]) > 1 and "ONEFLOW_GPT_NODE_IPS" not in values:
        machines = f"{flags['--node-ips']} are the original's machines. Yours: ONEFLOW_GPT_NODE_IPS=A,B,... in front"
        remarks.append(f"{machines} of the command, the same on each.")
    return _train(command, flags, remarks)


def _settings_in_name(name: str) -> dict[str, str]:
    """The variables that a script of that name sets."""
    size, named = _SIZED.fullmatch(name), _NAMED.fullmatch(name)
    if size:
        shape = presets.find(size[1])
        return _variables({
            "NUM_GPUS_PER_NODE": "1", "SEQ_LENGTH": "1024", "NUM_LAYERS": str(shape["num_layers"]),
            "HIDDEN_SIZE": str(shape["hidden_size"]), "NUM_ATTENTION_HEADS": str(shape["num_heads"]),
            "MICRO_BATCH_SIZE": "8", "GLOBAL_BATCH_SIZE": "8",
        })  # fmt: skip
    assert named  # or it would not have been recognised
    nodes, devices, replicas, tensor, stages, size_of_batch, width_there, depth = named.groups()
    times = 32 if int(stages) > 1 else 1  # their pipelines accumulate so many micro-batches, the others none
    return _variables({
        "NUM_NODES": nodes, "NUM_GPUS_PER_NODE": devices, "TENSOR_MODEL_PARALLEL_SIZE": tensor,
        "PIPELINE_MODEL_PARALLEL_SIZE": stages, "GLOBAL_BATCH_SIZE": size_of_batch, "HIDDEN_SIZE": width_there,
        "NUM_LAYERS": depth, "MICRO_BATCH_SIZE": str(max(1, int(size_of_batch) // int(replicas) // times)),
        "NUM_ATTENTION_HEADS": {"2304": "24", "3072": "32"}.get(width_there, "16"),
    })  # fmt: skip


def _variables(settings: dict[str, str]) -> dict[str, str]:
    return {f"ONEFLOW_GPT_{name}": value for name, value in settings.items()}


_SWITCHES = {key.theirs for key in TRAINING if key.switch}


def _train(command: Command, flags: dict[str, str], remarks: list[str]) -> Translation:
    settings = Settings(command.program, TRAINING, flags)
    megatron_flags.model(settings)
    vocabulary = megatron_flags.padded(settings, settings["--vocab-size"])
    settings.map(["--vocab-size", "--make-vocab-size-divisible-by"], {"model.vocab_size": vocabulary})
    again = "full" if settings.is_given("--checkpoint-activations") else "none"
    settings.map("--checkpoint-activations", {"train.recompute": again})
    settings.ours["model.gelu"] = "erf"
    length = settings["--seq-length"] or 1024
    settings.map("--seq-length", {"data.seq_len": length, "model.max_positions": length})
    nodes, devices = settings["--num-nodes"], settings["--num-gpus-per-node"]
    times = settings["--num-accumulation-steps"]
    replicas = megatron_flags.batch(settings, nodes * devices, times)
    settings.map("--num-accumulation-steps", {"batch.global_size": settings.ours["batch.global_size"]})
    settings.map("--num-gpus-per-node", {"parallel.dp": replicas})
    _learning_rate(settings, megatron_flags.length(settings), remarks)
    megatron_flags.precision(settings)
    settings.ours["precision.scaler.hysteresis"] = 1
    _data(settings, command.folder)
    optimizer = settings["--optimizer"]
    if optimizer != "adamw":
        raise ConfigError(
            settings.where, [f"--optimizer: got {optimizer!r}; OneFlow-GPT has only adamw, as gptworks has."]
        )
    settings.same("--optimizer", "AdamW, the only one there and here")
    settings.same("--no-bias-gelu-fusion", KERNEL)
    out, arguments, more = megatron_flags.checkpoints(settings, command.folder, str(settings["--log"]), NAME)
    if settings["--save"]:
        settings.ignore("--log", "logs are in the run folder, that of --save")
    else:
        settings.map("--log", {"run.out": out})
    arguments += _machines(settings, nodes)
    settings.map_plain()
    settings.ours |= {"train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000, "run.device": "cuda"}
    settings.ours["evaluate.every"] = 0  # theirs has no evaluation
    if settings.ours.get("init.checkpoint"):  # a snapshot does not say how many heads it has: the whole shape is said
        whole_shape = {"model.ffn_size": 4 * settings["--hidden-size"], "model.tied": True, "model.attention": "auto"}
        settings.ours |= {**whole_shape, "model.layernorm_eps": 1e-5}
    after = [AfterTraining(NAME, f"{out}/iter{{step}}_snapshot")] if settings["--save"] else []
    return settings.translated(
        NAME,
        "train",
        command.program,
        config=settings.ours,
        arguments=arguments,
        remarks=remarks + more,
        after=after,
        device="gpu",
    )


def _learning_rate(settings: Settings, steps: int, remarks: list[str]) -> None:
    style = settings["--lr-decay-style"]
    megatron_flags.schedule(
        settings, steps, "--learning-rate", {"cosine": "cosine", "linear": "linear", "constant": "constant"}
    )
    settings.ours |= {"optim.warmup_from": 0, "optim.cosine_clock": "from_start"}
    if style != "cosine":
        remarks.append(f"--lr-decay-style {style}: OneFlow-GPT itself stops here, it has cosine only; we have it.")
    highest, lowest = settings["--learning-rate"], settings["--min-lr"]
    if lowest > highest:
        settings.ours["optim.allow_rising_lr"] = True
        remarks.append(
            f"--min-lr {lowest:g} is above --learning-rate {highest:g}: the rate will rise, as it would in OneFlow. "
            "They are probably swapped."
        )


def _data(settings: Settings, folder: Path) -> None:
    if not settings["--dataset"]:
        raise ConfigError(settings.where, ["--dataset: is required: X of a pair X.bin and X.idx."])
    prefix = str(settings["--dataset"])
    settings.map("--dataset", {"data.path": (prefix,)})
    settings.ours["data.order"] = "oneflow"
    if settings.is_given("--use-external-dataset"):
        settings.map("--use-external-dataset", {"data.order": "megatron"}, why=_EXTERNAL)
    megatron_flags.tokenizer_of(settings, folder, [prefix])


def _machines(settings: Settings, nodes: int) -> list[str]:
    arguments: list[str] = []
    addresses = settings["--node-ips"]
    if nodes > 1:
        if len((addresses or "").split(",")) < nodes:
            raise ConfigError(
                settings.where,
                [f"--node-ips: got {addresses or 'nothing'!r}; {nodes} machines need {nodes} addresses, as a,b."],
            )
        used = ",".join(addresses.split(",")[:nodes])
        on_command_line(settings, "--num-nodes", {"--nproc": settings["--num-gpus-per-node"]})
        on_command_line(settings, "--node-ips", {"--node-ips": used})
        master = f"{used.partition(',')[0]}:{settings['--ctrl-port']}"
        on_command_line(settings, "--ctrl-port", {"--master": master})
        arguments += ["--master", master, "--node-ips", used, "--nproc", str(settings["--num-gpus-per-node"])]
    else:
        settings.same("--num-nodes", "one machine")
        settings.same(["--node-ips", "--ctrl-port"], "one machine: there is no other to connect to")
    if settings.is_given("--use-rdma"):
        arguments.append("--rdma")
        on_command_line(settings, "--use-rdma", {"--rdma": True})
    return arguments


def _container(command: Command) -> Translation:
    settings = Settings.of_command(command, CONTAINER)
    if not settings["--cmd"]:
        raise ConfigError(command.program, ["--cmd: is required, the command to run in the container."])
    arguments = ["--image", settings["--image"]]
    on_command_line(settings, "--image", {"--image": settings["--image"]})
    for key in ("--src", "--extra-mount"):
        where = settings[key]
        if where and (settings.is_given(key) or Path(where).is_dir()):
            arguments += ["--mount", where]
            on_command_line(settings, key, {"--mount": where})
    if proxy := settings["--proxy"]:
        for name in ("http_proxy", "https_proxy"):
            arguments += ["--env", f"{name}={proxy}"]
        on_command_line(settings, "--proxy", {"--env": f"https_proxy={proxy}"})
    inside = shlex.split(settings["--cmd"].replace("\\\n", " "))
    on_command_line(settings, "--cmd", {"--": f"gptworks run -- {' '.join(inside[:3])} ..."})
    settings.map_plain()
    remark = (
        f"{settings['--image']} must have gptworks in it. Dockerfile.cuda makes such an image: "
        "docker build -f Dockerfile.cuda -t gptworks:cuda ."
    )
    return settings.translated(
        NAME, "launch", command.program, arguments=arguments, remarks=[remark], device="gpu", inside=inside
    )
