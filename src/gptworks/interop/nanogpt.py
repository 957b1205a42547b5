"""nanoGPT: train.py and sample.py with config/*.py files and --key=value, and data/NAME/prepare.py.

A file of settings is Python; it is read, never run.
"""

import ast
import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks import json_text, run_paths
from gptworks.config.other_names import NANOGPT
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import torch_launch
from gptworks.interop.megatron_flags import on_command_line
from gptworks.interop.settings import Key, Settings, parse_bool, parse_float, parse_int, parse_str
from gptworks.interop.translation import AfterTraining, Command, Translation
from gptworks.tokenizer import nanogpt_meta

NAME = "nanogpt"
TITLE = "nanoGPT"
SEED = 1337  # written into their code

_LOGS = "the run folder has metrics.jsonl and TensorBoard files; nothing is sent anywhere"
TRAINING = [
    Key("out_dir", parse_str, default="out"),
    Key("eval_interval", parse_int, default=2000),
    Key("log_interval", parse_int, NANOGPT["log_interval"][0], default=1),
    Key("eval_iters", parse_int, default=200),
    Key("eval_only", parse_bool, default=False),
    Key("always_save_checkpoint", parse_bool, default=True),
    Key("init_from", parse_str, default="scratch"),
    *[Key(name, parse_str, ignored_because=_LOGS) for name in ("wandb_log", "wandb_project", "wandb_run_name")],
    Key("dataset", parse_str, default="openwebtext"),
    Key("gradient_accumulation_steps", parse_int, default=40),
    Key("batch_size", parse_int, default=12),
    Key("block_size", parse_int, default=1024),
    Key("n_layer", parse_int, NANOGPT["n_layer"][0], default=12),
    Key("n_head", parse_int, NANOGPT["n_head"][0], default=12),
    Key("n_embd", parse_int, NANOGPT["n_embd"][0], default=768),
    Key("dropout", parse_float, default=0.0),
    Key("bias", parse_bool, default=False),
    Key("learning_rate", parse_float, NANOGPT["learning_rate"][0], default=6e-4),
    Key("max_iters", parse_int, default=600000),
    Key("weight_decay", parse_float, NANOGPT["weight_decay"][0], default=0.1),
    Key("beta1", parse_float, NANOGPT["beta1"][0], default=0.9),
    Key("beta2", parse_float, NANOGPT["beta2"][0], default=0.95),
    Key("grad_clip", parse_float, NANOGPT["grad_clip"][0], default=1.0),
    Key("decay_lr", parse_bool, default=True),
    Key("warmup_iters", parse_int, default=2000),
    Key("lr_decay_iters", parse_int, default=600000),
    Key("min_lr", parse_float, default=6e-5),
    Key("backend", parse_str, default="nccl", same_effect="NCCL on GPUs, gloo on CPUs"),
    Key("device", parse_str, default="cuda"),
    Key("dtype", parse_str, default="bfloat16"),
    Key("compile", parse_bool, NANOGPT["compile"][0], default=True),
]
SAMPLING = [
    Key("init_from", parse_str, default="resume"),
    Key("out_dir", parse_str, default="out"),
    Key("start", parse_str, default="\n"),
    Key("num_samples", parse_int, default=10),
    Key("max_new_tokens", parse_int, default=500),
    Key("temperature", parse_float, default=0.8),
    Key("top_k", parse_int, default=200),
    Key("seed", parse_int, default=SEED),
    Key("device", parse_str, default="cuda"),
    Key("dtype", parse_str, ignored_because="weights are fp32; --weights bf16 keeps them so"),
    Key("compile", parse_bool, same_effect="a matter of speed"),
]
# The settings of config/*.py, for those who do not have the files.
RECIPES: dict[str, dict[str, Any]] = {
    "train_shakespeare_char.py": {
        "out_dir": "out-shakespeare-char", "eval_interval": 250, "eval_iters": 200, "log_interval": 10,
        "always_save_checkpoint": False, "wandb_log": False, "wandb_project": "shakespeare-char",
        "wandb_run_name": "mini-gpt", "dataset": "shakespeare_char", "gradient_accumulation_steps": 1,
        "batch_size": 64, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384, "dropout": 0.2,
        "learning_rate": 1e-3, "max_iters": 5000, "lr_decay_iters": 5000, "min_lr": 1e-4, "beta2": 0.99,
        "warmup_iters": 100,
    },
    "train_gpt2.py": {
        "wandb_log": True, "wandb_project": "owt", "wandb_run_name": "gpt2-124M", "batch_size": 12,
        "block_size": 1024, "gradient_accumulation_steps": 40, "max_iters": 600000, "lr_decay_iters": 600000,
        "eval_interval": 1000, "eval_iters": 200, "log_interval": 10, "weight_decay": 1e-1,
    },
    "finetune_shakespeare.py": {
        "out_dir": "out-shakespeare", "eval_interval": 5, "eval_iters": 40, "wandb_log": False,
        "wandb_project": "shakespeare", "dataset": "shakespeare", "init_from": "gpt2-xl",
        "always_save_checkpoint": False, "batch_size": 1, "gradient_accumulation_steps": 32, "max_iters": 20,
        "learning_rate": 3e-5, "decay_lr": False,
    },
}  # fmt: skip
_PREPARE = re.compile(r"(?:.*/)?data/([^/]+)/prepare\.py")
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def recognise(command: Command) -> bool:
    if _PREPARE.fullmatch(command.program):
        return True
    if Path(command.program).name not in ("train.py", "sample.py"):
        return False
    if any(word in ("-c", "--config") for word in command.arguments):
        return False
    names = {f"--{key.theirs}" for key in (*TRAINING, *SAMPLING)}
    plain = all(word.startswith("--") or word.endswith(".py") for word in command.arguments)
    return plain or any(word in names for word in command.arguments)  # perhaps --key value


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    return False


def translate_yaml(path: Path) -> Translation:
    raise UsageError(f"{path}: nanoGPT has no YAML; translate its command with `gptworks translate -- COMMAND`.")


def translate(command: Command, find: Any) -> Translation:
    if _PREPARE.fullmatch(command.program):
        return _prepare(command)
    keys = TRAINING if Path(command.program).name == "train.py" else SAMPLING
    remarks: list[str] = []
    settings = Settings(command.program, keys, _read_settings(command, find, keys, remarks))
    return _train(command, settings, remarks) if keys is TRAINING else _sample(command, settings, remarks)


# Reading settings


def _read_settings(command: Command, find: Any, keys: list[Key], remarks: list[str]) -> dict[str, str]:
    """Files and --key=value, the later over the earlier, as their configurator takes them."""
    settings: dict[str, str] = {}
    for place, word in enumerate(command.arguments):
        if not word.startswith("--"):
            settings |= _of_file(word, command, find, keys, remarks)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = next(iter(command.arguments[place + 1 : place + 2]), "VALUE")
            raise UsageError(
                f"{command.program}: {word}: nanoGPT takes --key=value, with the equals sign: "
                f"{word}={'True' if value.startswith('--') else value}"
            )
        settings[name] = value
    return settings


def _of_file(name: str, command: Command, find: Any, keys: list[Key], remarks: list[str]) -> dict[str, str]:
    if not (command.folder / name).is_file() and Path(name).name in RECIPES:
        remarks.append(f"{name} is not here: the settings of the original are used, which ship with gptworks.")
        return {key: str(value) for key, value in RECIPES[Path(name).name].items()}
    file = find(name)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(name, [f"cannot be read as Python ({error})."]) from None
    values: dict[str, Any] = {}
    unused = {key.theirs for key in keys if key.ignored_because}
    for line in tree.body:
        if isinstance(line, ast.Import | ast.ImportFrom):
            continue
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # a text that stands alone
        if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
            raise ConfigError(name, [f"line {line.lineno}: needed KEY = VALUE. The file is read, it is not run."])
        key = line.targets[0].id
        try:
            values[key] = _value(line.value, values)
        except ValueError as error:
            if key not in unused:
                raise ConfigError(name, [f"{key}: {error}. The file is read, it is not run."]) from None
            values[key] = ast.unparse(line.value)
    return {key: str(value) for key, value in values.items()}


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """A number, a text, true or false; sums and products of those; a key from above."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, known)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, known), _value(node.right, known)
        if not all(isinstance(side, int | float) for side in (left, right)):
            raise ValueError(f"{ast.unparse(node)} is not a sum of numbers")
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"{ast.unparse(node)} is neither a number nor a text")


# train.py


def _train(command: Command, settings: Settings, remarks: list[str]) -> Translation:
    if settings["eval_only"]:
        raise UsageError(f"{command.program}: eval_only: here it is `gptworks eval --task heldout --model DIR`.")
    settings.same("eval_only", "false: it is trained")
    dropout = settings["dropout"]
    names = ("model.dropout_embed", "model.dropout_hidden", "model.dropout_attention")
    settings.map("dropout", dict.fromkeys(names, dropout))
    settings.ours |= {"model.gelu": "erf", "init.residual_scale": "gpt2", "train.seed": SEED}
    length = settings["block_size"]
    settings.map("block_size", {"data.seq_len": length, "model.max_positions": length})
    if settings["bias"]:
        settings.same("bias", "true: matrices and norms have biases, as here")
    else:
        settings.ignore("bias", "matrices and norms have biases here, which begin at 0 and are trained")
    start = torch_launch.read(command)
    _batch(settings, start.world_size)
    _schedule(settings)
    _data(command, settings)
    settings.map(
        "eval_interval", {"evaluate.every": settings["eval_interval"], "checkpoint.every": settings["eval_interval"]}
    )
    best = not settings["always_save_checkpoint"]
    why = "the best is kept as `best`; ckpt.pt is made from the last" if best else ""
    settings.map("always_save_checkpoint", {"checkpoint.keep_best": best}, why=why)
    device = str(settings["device"]).partition(":")[0]
    kinds = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if settings["dtype"] not in kinds:
        raise ConfigError(settings.where, [f"dtype: got {settings['dtype']!r}; needs one of {', '.join(kinds)}."])
    compute = "fp32" if device == "cpu" else kinds[settings["dtype"]]  # they have no autocast on a CPU
    settings.map("dtype", {"precision.compute": compute})
    settings.map("device", {"run.device": device})
    out, resume = _start(command, settings)
    settings.map_plain()
    if settings.ours.get("init.checkpoint"):  # it says its own shape
        for key in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions", "gelu"):
            settings.ours.pop(f"model.{key}", None)
    settings.require_noted()
    return Translation(
        NAME, "train", command.program, config=settings.ours, arguments=[*resume, *start.arguments],
        notes=[*start.notes, *settings.notes], remarks=remarks, after=[AfterTraining(NAME, f"{out}/ckpt.pt")],
        device=device, their_names=settings.their_names,
    )  # fmt: skip


def _batch(settings: Settings, processes: int) -> None:
    times, micro = settings["gradient_accumulation_steps"], settings["batch_size"]
    if times % processes:
        raise ConfigError(
            settings.where,
            [
                f"gradient_accumulation_steps: {times} is not a multiple of the {processes} processes; nanoGPT refuses "
                "it too."
            ],
        )
    settings.map("batch_size", {"batch.micro_size": micro})
    settings.map("gradient_accumulation_steps", {"batch.global_size": times * micro})
    settings.ours["parallel.dp"] = processes
    settings.map_evaluation("eval_iters", settings["eval_iters"] * micro, times * micro)


def _schedule(settings: Settings) -> None:
    """Their rate of iteration n, from 0: warmup (n+1)/(W+1), then a cosine over (n-W)/(D-W). Our clock shows n+1."""
    settings.map("max_iters", {"train.steps": settings["max_iters"]}, why="theirs makes one more, which is not saved")
    names = ["warmup_iters", "lr_decay_iters", "min_lr"]
    if not settings["decay_lr"]:
        settings.map("decay_lr", {"optim.schedule": "constant", "optim.warmup_steps": 0.0})
        settings.ignore(names, "decay_lr is false: one rate, without a warmup")
        return
    settings.map("decay_lr", {"optim.schedule": "cosine"})
    settings.map("warmup_iters", {"optim.warmup_steps": float(settings["warmup_iters"] + 1)})
    settings.map("lr_decay_iters", {"optim.decay_steps": settings["lr_decay_iters"] + 1})
    settings.map("min_lr", "optim.min_lr")
    settings.ours |= {"optim.warmup_from": 1, "optim.cosine_clock": "after_warmup"}
    if settings["min_lr"] > settings["learning_rate"]:
        settings.ours["optim.allow_rising_lr"] = True


def _data(command: Command, settings: Settings) -> None:
    place = f"data/{settings['dataset']}"
    ours: dict[str, Any] = {"data.path": (f"{place}/train.bin",)}
    if (command.folder / place / "val.bin").is_file() or not (command.folder / place / "train.bin").is_file():
        ours |= {"data.held_out_path": (f"{place}/val.bin",), "data.split": "1"}
    else:
        ours["data.split"] = "9,1"  # as they cut Shakespeare
    settings.map("dataset", ours, why="every window once per epoch, shuffled; theirs are drawn with replacement")
    settings.ours["data.order"] = "shuffled"
    vocabulary, is_gpt2 = _vocabulary(command.folder / place)
    settings.ours["model.vocab_size"] = vocabulary
    if is_gpt2:
        settings.ours["data.tokenizer"] = "gpt2"


def _vocabulary(place: Path) -> tuple[int, bool]:
    """The vocabulary's size, and whether it must be GPT-2's: as meta.pkl or our file beside the data says."""
    if (place / nanogpt_meta.NAME).is_file():
        return nanogpt_meta.read(place / nanogpt_meta.NAME).vocab_size, False
    try:
        described = json_text.loads((place / "train.bin.json").read_text(encoding="utf-8"))
        return int(described["vocab_size"]), False
    except (OSError, ValueError, KeyError, TypeError):
        return 50304, True


def _start(command: Command, settings: Settings) -> tuple[str, list[str]]:
    out, start = str(settings["out_dir"]), str(settings["init_from"])
    place = command.folder / out
    theirs = (place / "ckpt.pt").is_file() and not run_paths.was_begun(place)
    if start == "resume" and theirs:
        settings.map("init_from", {"init.checkpoint": f"{out}/ckpt.pt"}, why="its weights; the steps begin at 0")
        settings.map("out_dir", {"run.out": f"{out}/gptworks"})
        return f"{out}/gptworks", ["--resume", "auto"]
    settings.map("out_dir", {"run.out": out})
    if start == "scratch":
        settings.same("init_from", "scratch: fresh weights")
        return out, ["--resume", "never"]
    if start == "resume":
        on_command_line(settings, "init_from", {"--resume": "auto"})
        return out, ["--resume", "auto"]
    if not start.startswith("gpt2"):
        raise ConfigError(
            settings.where, [f"init_from: got {start!r}; needs scratch, resume or a GPT-2 such as gpt2-xl."]
        )
    settings.map("init_from", {"init.checkpoint": start})
    return out, ["--resume", "never"]


# sample.py and prepare.py


def _sample(command: Command, settings: Settings, remarks: list[str]) -> Translation:
    out, start = str(settings["out_dir"]), str(settings["init_from"])
    is_ours = run_paths.was_begun(command.folder / out)
    model = start if start.startswith("gpt2") else out if is_ours else f"{out}/ckpt.pt"
    on_command_line(settings, ["init_from", "out_dir"], {"--model": model})
    tokenizer = [] if is_ours or model == start else _tokenizer_of(command.folder, model, remarks)
    prompt = str(settings["start"])
    if prompt.startswith("FILE:"):
        file = command.folder / prompt[5:]
        if not file.is_file():
            raise UsageError(f"start: {file} is not a file.")
        prompt = file.read_text(encoding="utf-8")
    prompt = prompt.replace("\\n", "\n") if settings.is_given("start") else prompt
    arguments = ["--model", model, *tokenizer, "--prompt", prompt, "--window", "slide", "--ignore-eod"]
    on_command_line(settings, "start", {"--prompt": prompt})
    for theirs, ours in (
        ("num_samples", "--num-return-sequences"),
        ("max_new_tokens", "--max-new-tokens"),
        ("temperature", "--temperature"),
        ("top_k", "--top-k"),
        ("seed", "--seed"),
    ):
        value = settings[theirs]
        if theirs == "top_k" and value >= _rows_of(command.folder / model):
            value = 0  # as theirs: all there are
        arguments += [ours, str(value)]
        on_command_line(settings, theirs, {ours: value})
    device = str(settings["device"]).partition(":")[0]
    on_command_line(settings, "device", {"--device": device})
    settings.map_plain()
    return settings.translated(NAME, "generate", command.program, arguments=arguments, remarks=remarks, device=device)


def _rows_of(model: Path) -> float:
    """The size of the vocabulary of a run of ours or a ckpt.pt; what is not here yet has no end."""
    if model.is_dir():
        from gptworks.checkpoint.folder import config_of

        return config_of(model).get("model", {}).get("vocab_size", math.inf)
    if not model.is_file():
        return math.inf
    from gptworks.checkpoint.systems import nanogpt

    return nanogpt.open(model, {}).model.vocab_size


def _tokenizer_of(folder: Path, file: str, remarks: list[str]) -> list[str]:
    """As their script finds it: meta.pkl of the dataset that the checkpoint was trained on, else GPT-2's."""
    if not (folder / file).is_file():
        return []
    from gptworks.checkpoint.formats import torch_file

    content = torch_file.read(folder / file).content
    config = content.get("config") if isinstance(content, dict) else None
    dataset = config.get("dataset") if isinstance(config, dict) else None
    meta = f"data/{dataset}/{nanogpt_meta.NAME}"
    if isinstance(dataset, str) and (folder / meta).is_file():
        return ["--tokenizer", meta]
    if (folder / file).with_name("tokenizer.json").is_file():
        return []
    remarks.append("the checkpoint names no characters of its own: the tokenizer is GPT-2's, as theirs would be.")
    return ["--tokenizer", "gpt2"]


def _prepare(command: Command) -> Translation:
    """Their script downloads a text; ours takes the one that lies there."""
    match = _PREPARE.fullmatch(command.program)
    assert match  # or it would not have been recognised
    if command.arguments:
        raise UsageError(f"{command.program}: takes no arguments, got {command.arguments[0]}.")
    place = command.program.removesuffix("/prepare.py")
    text = f"{place}/input.txt"
    if not (command.folder / text).is_file():
        raise UsageError(f"{command.program}: {text} is not here. Nothing is downloaded: put the text there.")
    arguments = [text, "--out", f"{place}/train", "--format", "nanogpt", "--doc-separator", ""]
    remarks = ["all of the text is in train.bin; without a val.bin, training keeps a tenth of it for evaluation."]
    if match[1].endswith("_char"):
        arguments += ["--train-tokenizer", "chars"]
        remarks.append("its characters have the ids of the original; they are in train.tokenizer.json, not meta.pkl.")
    return Translation(NAME, "prepare", command.program, arguments=arguments, remarks=remarks)
