"""OneFlow-GPT: oneflow_gpt.training, its shell scripts, Megatron's preprocess_data.py, launch_container.py."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.config import presets
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import command_line, megatron_flags, megatron_prepare
from gptworks.interop.megatron_flags import KERNEL, SHARED, on_command_line
from gptworks.interop.settings import Key, Settings, number, whole, words
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "oneflow"
TITLE = "OneFlow-GPT"

TRAINING = [
    *SHARED,
    Key("--vocab-size", whole, default=50257),
    Key("--num-accumulation-steps", whole),
    Key("--learning-rate", number, default=1e-3),
    Key("--optimizer", words, default="adamw"),
    Key("--dataset", words),
    Key("--seed", whole, "train.seed", default=12345),
    Key("--num-gpus-per-node", whole, default=1),
    Key("--num-nodes", whole, default=1),
    Key("--node-ips", words),
    Key("--ctrl-port", whole, default=50051),
    Key("--use-rdma", words, switch=True),
    Key("--use-external-dataset", words, switch=True),
    Key("--multihead-attention-fusion", words, switch=True, same=KERNEL),
    Key("--no-scale-tril-softmax-dropout-fusion", words, switch=True, same=KERNEL),
    Key("--no-bias-dropout-fusion", words, switch=True, same=KERNEL),
    Key("--save-last", words, switch=True, same="the last step is always saved"),
    Key("--save-init", words, switch=True, why="fresh weights follow from train.seed and are not written"),
    Key("--log", words, default="./output"),
    Key("--metric-print-format", words, why="the log has a form of its own (train.log_style)"),
    Key("--profile-transformer-layer", words, switch=True, why="train.profile=[first, last] traces steps"),
]
CONTAINER = [
    Key("--src", words),
    Key("--py", words, default="3.7", why="the image has its Python"),
    Key("--image", words, default="oneflow-manylinux2014-cuda11.2:0.1"),
    Key("--wheel", words, why="OneFlow is not needed: gptworks, which must be in the image, runs the command"),
    Key("--cmd", words),
    Key("--extra-mount", words, default="/data"),
    Key("--proxy", words),
    Key("--no-interactive", words, switch=True, same="a terminal is passed on only where there is one"),
]
# Their scripts read these, with these values where they are not set.
VARIABLES = {
    "ONEFLOW_GPT_DATASET": ("--dataset", "gpt_sample_dataset_text_document"),
    "ONEFLOW_GPT_SEQ_LENGTH": ("--seq-length", "2048"),
    "ONEFLOW_GPT_NUM_LAYERS": ("--num-layers", "16"),
    "ONEFLOW_GPT_HIDDEN_SIZE": ("--hidden-size", "1536"),
    "ONEFLOW_GPT_NUM_ATTENTION_HEADS": ("--num-attention-heads", "16"),
    "ONEFLOW_GPT_MICRO_BATCH_SIZE": ("--micro-batch-size", "8"),
    "ONEFLOW_GPT_GLOBAL_BATCH_SIZE": ("--global-batch-size", ""),
    "ONEFLOW_GPT_TENSOR_MODEL_PARALLEL_SIZE": ("--tensor-model-parallel-size", ""),
    "ONEFLOW_GPT_PIPELINE_MODEL_PARALLEL_SIZE": ("--pipeline-model-parallel-size", ""),
    "ONEFLOW_GPT_NUM_ACCUMULATION_STEPS": ("--num-accumulation-steps", ""),
    "ONEFLOW_GPT_NUM_GPUS_PER_NODE": ("--num-gpus-per-node", "4"),
    "ONEFLOW_GPT_NUM_NODES": ("--num-nodes", "1"),
    "ONEFLOW_GPT_NODE_IPS": ("--node-ips", "10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5"),
    "ONEFLOW_GPT_TRAIN_ITERS": ("--train-iters", "500000"),
    "ONEFLOW_GPT_LOG_INTERVAL": ("--log-interval", "100"),
    "ONEFLOW_GPT_INIT_LOSS_SCALE": ("--initial-loss-scale", "4294967296"),
    "ONEFLOW_GPT_LOAD_PATH": ("--load", ""),
    "ONEFLOW_GPT_SAVE_PATH": ("--save", "checkpoint"),
    "ONEFLOW_GPT_SAVE_INTERVAL": ("--save-interval", "10000"),
}
# What they pass whatever is set.
ALWAYS = {
    "--learning-rate": "0.00015", "--min-lr": "1.0e-5", "--lr-decay-style": "cosine", "--lr-decay-iters": "320000",
    "--lr-warmup-fraction": "0.01", "--optimizer": "adamw", "--weight-decay": "1e-2", "--clip-grad": "1.0",
    "--vocab-size": "50257", "--split": "949,50,1", "--checkpoint-activations": "",
    "--multihead-attention-fusion": "", "--fp16": "",
}  # fmt: skip
_SIZED = re.compile(r"pretrain_(117M|345M)\.sh")
# {machines}n{devices}d_{data}x{tensor}x{pipeline}_{batch}_{width}x{depth}
_NAMED = re.compile(r"(?:distribute_)?pretrain_(\d+)n(\d+)d_(\d+)x(\d+)x(\d+)_(\d+)_(\d+)x(\d+)\.sh")
_EXPORT = re.compile(r"^\s*export\s+(ONEFLOW_GPT_\w+)=[\"']?([^\"'\s#]*)", re.MULTILINE)
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
        given, remarks = _of_script(name, command)
        return _train(command, given, remarks)
    return _train(command, command_line.flags(command.arguments, _SWITCHES), [])


def _of_script(name: str, command: Command) -> tuple[dict[str, str], list[str]]:
    """The flags that a script of theirs passes: its own settings over the caller's, over what all of them have."""
    if command.arguments:
        raise UsageError(
            f"{command.program}: takes no arguments, got {command.arguments[0]}. It is set by variables in front, "
            f"such as ONEFLOW_GPT_TRAIN_ITERS=10 bash {command.program}."
        )
    given = dict(VARIABLES.values())
    called = {**os.environ, **command.environment}
    given |= {flag: called[variable] for variable, (flag, _) in VARIABLES.items() if variable in called}
    file, remarks = _script_on_disk(command), []
    if file is None:
        own = _settings_in_name(name)
        remarks.append(f"{command.program} is not here: the settings of the original are used, which come with us.")
        # What the caller sets is there to be tried; a script that is here overrules it, as a shell would have it.
        given |= {flag: text for flag, text in own.items() if not any(_sets(v, flag) for v in command.environment)}
    else:
        found = dict(_EXPORT.findall(file.read_text(encoding="utf-8")))
        given |= {VARIABLES[variable][0]: text for variable, text in found.items() if variable in VARIABLES}
    given |= ALWAYS
    if int(given["--num-nodes"]) > 1:
        given["--use-rdma"] = ""
    return {flag: text for flag, text in given.items() if text or flag in _SWITCHES}, remarks


def _sets(variable: str, flag: str) -> bool:
    return variable in VARIABLES and VARIABLES[variable][0] == flag


def _script_on_disk(command: Command) -> Path | None:
    """Their folder is examples/; the document once says example/."""
    other = re.sub(r"(^|/)examples?/", r"\1examples/", command.program)
    return next((f for n in (command.program, other) if (f := command.folder / n).is_file()), None)


def _settings_in_name(name: str) -> dict[str, str]:
    size, named = _SIZED.fullmatch(name), _NAMED.fullmatch(name)
    if size:
        shape = presets.find(size[1])
        return {
            "--num-gpus-per-node": "1", "--seq-length": "1024", "--num-layers": str(shape["num_layers"]),
            "--hidden-size": str(shape["hidden_size"]), "--num-attention-heads": str(shape["num_heads"]),
            "--micro-batch-size": "8", "--global-batch-size": "8",
        }  # fmt: skip
    assert named  # or it would not have been recognised
    nodes, devices, replicas, tensor, stages, size_of_batch, width_there, depth = named.groups()
    times = 32 if int(stages) > 1 else 1  # their pipelines accumulate so many micro-batches, the others none
    return {
        "--num-nodes": nodes, "--num-gpus-per-node": devices, "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": stages, "--global-batch-size": size_of_batch, "--hidden-size": width_there,
        "--num-layers": depth, "--micro-batch-size": str(max(1, int(size_of_batch) // int(replicas) // times)),
        "--num-attention-heads": {"2304": "24", "3072": "32"}.get(width_there, "16"),
    }  # fmt: skip


_SWITCHES = {key.theirs for key in TRAINING if key.switch}


def _train(command: Command, given: dict[str, str], remarks: list[str]) -> Translation:
    settings = Settings(command.program, TRAINING, given)
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
            settings.where, [f"--optimizer: got {optimizer!r}; OneFlow-GPT has no other than adamw, and so have we."]
        )
    settings.same("--optimizer", "AdamW, the only one there and here")
    settings.same("--no-bias-gelu-fusion", KERNEL)
    out, arguments, told = megatron_flags.checkpoints(settings, command.folder, str(settings["--log"]), NAME)
    if settings["--save"]:
        settings.ignore("--log", "logs are in the run folder, that of --save")
    else:
        settings.map("--log", {"run.out": out})
    arguments += _machines(settings, nodes)
    settings.map_plain()
    settings.ours |= {"train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000, "run.device": "cuda"}
    if settings.ours.get("init.checkpoint"):  # a snapshot does not say how many heads it has: the whole shape is said
        whole_shape = {"model.ffn_size": 4 * settings["--hidden-size"], "model.tied": True, "model.attention": "auto"}
        settings.ours |= {**whole_shape, "model.layernorm_eps": 1e-5}
    settings.require_noted()
    after = [AfterTraining(NAME, f"{out}/iter{{step}}_snapshot")] if settings["--save"] else []
    return Translation(
        NAME, "train", command.program, config=settings.ours, arguments=arguments, notes=settings.notes,
        remarks=remarks + told, after=after, device="gpu",
    )  # fmt: skip


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
        meeting = f"{used.partition(',')[0]}:{settings['--ctrl-port']}"
        on_command_line(settings, "--ctrl-port", {"--master": meeting})
        arguments += ["--master", meeting, "--node-ips", used, "--nproc", str(settings["--num-gpus-per-node"])]
    else:
        settings.same("--num-nodes", "one machine")
        settings.same(["--node-ips", "--ctrl-port"], "one machine: nobody is called")
    if settings.is_given("--use-rdma"):
        arguments.append("--rdma")
        on_command_line(settings, "--use-rdma", {"--rdma": True})
    return arguments


def _container(command: Command) -> Translation:
    given = command_line.flags(command.arguments, {key.theirs for key in CONTAINER if key.switch})
    settings = Settings(command.program, CONTAINER, given)
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
    settings.require_noted()
    remark = (
        f"{settings['--image']} must have gptworks in it. Dockerfile.cuda makes such an image: "
        "docker build -f Dockerfile.cuda -t gptworks:cuda ."
    )
    return Translation(
        NAME, "launch", command.program, arguments=arguments, notes=settings.notes, remarks=[remark], device="gpu",
        inside=inside,
    )  # fmt: skip
