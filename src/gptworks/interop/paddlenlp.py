"""PaddleNLP GPT and GPT-3: run_pretrain(.py, _static.py), run_eval.py, export_model.py, inference.py,
create_pretraining_data.py, by their flags; and Paddle's check of an installation."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError, UsageError
from gptworks.interop import command_line, paddle_launch, shell_block
from gptworks.interop.notes import Note
from gptworks.interop.paddlenlp_keys import EVALUATION, EXPORT, INFERENCE, PREPARATION, TRAINING
from gptworks.interop.paddlenlp_models import SHAPES, shape_of
from gptworks.interop.settings import Key, Settings, parse_bool
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "paddlenlp"
TITLE = "PaddleNLP GPT and GPT-3"

# run_pretrain.py of these flags also exists in FleetX, which names a YAML with -c.
_HINTS = {
    "--mirco_batch_size": "the document's misspelling; the flag is --micro_batch_size.",
    "--mini_batch_size": "did you mean --micro_batch_size?",
}
PROGRAMS: dict[str, Any] = {}
CHECK = "paddle.utils.run_check()"  # typed into Python, or given to it with -c
SCRIPT = "run.sh"  # with a command of these programs in it
QUESTIONS = [
    "Question: Who is the CEO of Apple? Answer:",
    "Question: Who is the CEO of Facebook? Answer:",
    "Question: How tall is the highest peak in the world? Answer:",
    "Question: Who is the president of the united states? Answer:",
    "Question: Where is the capital of France? Answer:",
    "Question: What is the largest animal in the ocean? Answer:",
    "Question: Who is the chancellor of Germany? Answer:",
]  # the built-in prompts of their inference.py
CHINESE_QUESTIONS = [
    "问题：中国的首都是哪里？答案：北京。\n问题：苹果的CEO是谁? 答案：",
    "问题：中国的首都是哪里？答案：北京。\n问题：百度的厂长是谁? 答案：",
    "问题：中国的首都是哪里？答案：北京。\n问题：世界最高峰是什么? 答案：",
]


def recognise(command: Command) -> bool:
    if Path(command.program).name == "tar" and any(".json.zst.tar" in word for word in command.arguments):
        return True
    if Path(command.program).name == SCRIPT or _checks(command):
        return True
    if Path(command.program).name == "preprocess_data.py":  # of FleetX; Megatron's has other flags
        return any(word.partition("=")[0] == "--input_path" for word in command.arguments)
    return Path(command.program).name in PROGRAMS and not any(w in ("-c", "--config") for w in command.arguments)


def _checks(command: Command) -> bool:
    return any(CHECK in word for word in command.words)


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    return False  # PaddleNLP has flags only


def translate_yaml(path: Path) -> Translation:
    raise UsageError(f"{path}: PaddleNLP has no YAML; translate its command with `gptworks translate -- COMMAND`.")


def translate(command: Command, find: Any) -> Translation:
    if _checks(command):
        return Translation(NAME, "doctor", CHECK, notes=[Note(CHECK, "", "mapped", "gptworks doctor")])
    if Path(command.program).name == "tar":
        raise UsageError(
            "openwebtext2.json.zst.tar: a slip in the document; the archive is called openwebtext2.jsonl.zst.tar. It "
            "need not be unpacked: --input_path of create_pretraining_data.py (and `gptworks prepare`) reads the tar."
        )
    if Path(command.program).name == SCRIPT:
        command = _inside(find(command.program), command)
    translation: Translation = PROGRAMS[Path(command.program).name](command)
    if translation.verb == "train":
        return translation
    return replace(translation, notes=paddle_launch.notes(command, translation.verb) + translation.notes)


def _inside(script: Path, command: Command) -> Command:
    """The training command in the script that comes with us. (One that is here has been read before.)"""
    values = {**os.environ, **command.environment}
    text = script.read_text(encoding="utf-8")
    started = shell_block.commands(text, command.program, values, command.folder, lambda name, folder: None)
    commands = [command_line.take_apart(each.words, each.environment, each.folder) for each in started]
    commands = [each for each in commands if Path(each.program).name in PROGRAMS]
    if not commands:
        raise UsageError(f"{script}: no line in it runs one of {', '.join(PROGRAMS)}.")
    if command.arguments:
        raise UsageError(
            f"{command.program}: {' '.join(command.arguments)} behind it: it reads no words. Run the command that is "
            "in it, with these words."
        )
    return commands[-1]


def _settings(command: Command, keys: list[Key]) -> Settings:
    settings = Settings.of_command(command, keys, hints=_HINTS)
    for name in _bare(settings):  # their parser takes the bare flag for an empty text, which is false
        settings.values[name] = False
    return settings


def _bare(settings: Settings) -> list[str]:
    return [name for name, text in settings.texts.items() if text == "" and settings.keys[name].read is parse_bool]


def _train(command: Command) -> Translation:
    settings = _settings(command, TRAINING)
    needed = [name for name in ("--model_name_or_path", "--input_dir", "--output_dir") if not settings[name]]
    if needed:
        raise ConfigError(command.program, [f"{name}: is required." for name in needed])
    remarks = [
        f"{name} stands alone: PaddleNLP's parser reads that as false, and so do we. Write {name} true."
        for name in _bare(settings)
    ]
    output = str(settings["--output_dir"])
    _weights(settings, command.folder)
    _layout(settings, paddle_launch.num_processes(command))
    _schedule(settings, remarks)
    _rest(settings)
    if Path(command.program).name.endswith("_static.py"):
        settings.ours["precision.scaler.backoff"] = 0.8  # the scaler of static graphs
    settings.map_plain()
    settings.require_noted()
    return Translation(
        NAME, "train", command.program, config=settings.ours,
        arguments=paddle_launch.arguments(command, settings.ours),
        notes=paddle_launch.notes(command) + settings.notes, remarks=remarks + paddle_launch.remarks(command),
        after=[AfterTraining(NAME, f"{output}/model_{{step}}")], logs=paddle_launch.logs(command),
        device=str(settings["--device"]), their_names=settings.their_names,
    )  # fmt: skip


def _weights(settings: Settings, folder: Path) -> None:
    """A preset is a shape with fresh weights; a folder is where to go on from."""
    name = str(settings["--model_name_or_path"])
    if name in SHAPES:
        layers, width, heads, vocabulary = shape_of(name, settings["--mp_degree"], settings["--pp_degree"])
        shape = {"num_layers": layers, "hidden_size": width, "num_heads": heads, "vocab_size": vocabulary}
        ours = {f"model.{key}": value for key, value in shape.items()} | {"model.max_positions": 1024}
        settings.map("--model_name_or_path", ours)
    elif (folder / name).exists():
        settings.map(
            "--model_name_or_path", {"init.checkpoint": name}, why="the weights; steps begin at 1, as theirs do"
        )
    else:
        raise ConfigError(
            settings.where,
            [f"--model_name_or_path: {name!r} is neither a folder nor a preset ({', '.join(SHAPES)})."],
        )
    # What follows an end of document is not scored. Of Chinese data, the data say which tokenizer made them.
    tokenizer = {} if str(settings["--model_type"]).endswith("-cn") else {"data.tokenizer": "gpt2"}
    settings.map("--model_type", {**tokenizer, "data.mask_eod": True})
    settings.map("--input_dir", {"data.path": (settings["--input_dir"],)})
    settings.map("--output_dir", {"run.out": str(settings["--output_dir"])})


def _layout(settings: Settings, launched: int) -> None:
    sharded = settings["--sharding_degree"] if settings["--use_sharding"] or settings["--sharding_degree"] > 1 else 1
    if settings.is_given("--use_sharding") and not settings["--use_sharding"]:
        sharded = 1
    stage = {"parallel.zero": settings["--sharding_stage"]} if sharded > 1 else {}
    settings.map(["--use_sharding", "--sharding_degree"], {"parallel.fsdp": sharded, **stage})
    if stage:
        settings.map("--sharding_stage", stage)
    else:
        settings.same("--sharding_stage", "nothing is sharded")
    dp = settings["--dp_degree"]
    settings.map("--dp_degree", {"parallel.dp": dp})
    product = dp * sharded * settings["--mp_degree"] * settings["--pp_degree"]
    if launched and product != launched:
        raise ConfigError(
            settings.where,
            [
                f"mp_degree {settings['--mp_degree']} x sharding_degree {sharded} x pp_degree "
                f"{settings['--pp_degree']} x dp_degree {dp} = {product}, but {launched} devices are launched. Their "
                "product must be the number of devices."
            ],
        )
    micro, replicas = settings["--micro_batch_size"], dp * sharded
    whole_batch = settings["--global_batch_size"] or (settings["--local_batch_size"] or micro) * replicas
    local = settings["--local_batch_size"]
    if whole_batch % (micro * replicas) or (local and local * replicas != whole_batch):
        remark = f" (local_batch_size {local})" if local else ""
        raise ConfigError(
            settings.where,
            [
                f"--global_batch_size: {whole_batch} is not micro_batch_size {micro} x sharding_degree {sharded} x "
                f"dp_degree {dp} x a whole number of accumulated micro-batches{remark}."
            ],
        )
    settings.map(["--global_batch_size", "--local_batch_size"], {"batch.global_size": whole_batch})
    # Each replica reads so many batches: micro-batches, or those of --local_batch_size where a program has that.
    times = settings["--eval_iters"]
    settings.map_evaluation("--eval_iters", times * replicas * (local or micro), whole_batch)
    settings.map("--eval_freq", {"evaluate.every": settings["--eval_freq"] if times else 0})


def _schedule(settings: Settings, remarks: list[str]) -> None:
    highest, lowest = settings["--max_lr"], settings["--min_lr"]
    settings.map("--max_lr", "optim.lr")
    settings.map("--min_lr", "optim.min_lr")
    decay = settings["--decay_steps"] or settings["--max_steps"]
    settings.map("--decay_steps", {"optim.decay_steps": decay})
    style = settings["--lr_decay_style"]
    if style not in ("cosine", "none"):
        raise ConfigError(settings.where, [f"--lr_decay_style: got {style!r}; needs cosine or none."])
    settings.map("--lr_decay_style", {"optim.schedule": "cosine" if style == "cosine" else "constant"})
    if style == "none":
        settings.ours["optim.warmup_steps"] = 0.0
        settings.ignore("--warmup_rate", "--lr_decay_style none has one rate, without a warmup")
    else:
        settings.map("--warmup_rate", {"optim.warmup_steps": settings["--warmup_rate"] * decay})
    settings.ours |= {"optim.warmup_from": 1, "optim.cosine_clock": "after_warmup"}
    if lowest > highest:
        settings.ours["optim.allow_rising_lr"] = True
        remarks.append(f"max_lr {highest:g} is below min_lr {lowest:g}: the rate will rise. They are probably swapped.")


def _rest(settings: Settings) -> None:
    off = settings["--check_accuracy"]
    hidden = 0.0 if off else settings["--hidden_dropout_prob"]
    attention = 0.0 if off else settings["--attention_probs_dropout_prob"]
    settings.map("--hidden_dropout_prob", {"model.dropout_hidden": hidden, "model.dropout_embed": hidden})
    settings.map("--attention_probs_dropout_prob", {"model.dropout_attention": attention})
    settings.map("--check_accuracy", {"model.dropout_hidden": hidden, "model.dropout_attention": attention})
    on = settings["--use_amp"] or settings["--use_pure_fp16"]
    settings.map(["--use_amp", "--use_pure_fp16"], {"precision.compute": "fp16" if on else "fp32"})
    settings.same("--amp_level", "products in fp16, parameters, sums and norms in fp32")
    mode = settings["--recompute_granularity"] if settings["--use_recompute"] else "none"
    settings.map(["--use_recompute", "--recompute_granularity"], {"train.recompute": mode})
    device = settings["--device"]
    settings.map("--device", {"run.device": {"gpu": "cuda"}.get(device, device)})
    options = str(settings["-p"] or settings["--profiler_options"] or "")
    steps = re.search(r"batch_range=\[(\d+),\s*(\d+)\]", options)
    if steps:
        settings.map(["-p", "--profiler_options"], {"train.profile": (int(steps[1]), int(steps[2]))})
    else:
        settings.same(["-p", "--profiler_options"], "no batch_range in it")
    settings.ours |= {
        "parallel.sequence": False, "model.gelu": "tanh", "init.residual_scale": "none", "init.std": 0.02,
        "data.order": "paddle", "train.log_style": "fleetx", "train.nonfinite": "skip",
        "checkpoint.keep_last": 1_000_000, "precision.scaler.window": 1000, "precision.scaler.hysteresis": 2,
    }  # fmt: skip


def _evaluate(command: Command) -> Translation:
    settings = _settings(command, EVALUATION)
    if not settings["--eval_path"] or not settings["--model_name"]:
        raise ConfigError(command.program, ["--model_name and --eval_path are required."])
    cloze = settings.is_given("--cloze_eval")
    arguments = ["--task", "lambada" if cloze else "wikitext", "--data", settings["--eval_path"]]
    settings.map("--eval_path", {"--data": settings["--eval_path"]})
    if cloze:
        settings.map("--cloze_eval", {"--task": "lambada"})
    overlap = settings["--overlapping_eval"]
    if cloze:
        settings.ignore("--overlapping_eval", "--cloze_eval scores a last word each, without windows")
    else:
        arguments += ["--overlap", str(overlap)]
        settings.map("--overlapping_eval", {"--overlap": overlap})
    arguments += _model_arguments(settings, command.folder)
    arguments += ["--batch-size", str(settings["--batch_size"]), "--log-style", "fleetx"]
    settings.map("--batch_size", {"--batch-size": settings["--batch_size"]})
    settings.ignore("--seq_length", "windows are as long as the model's context")
    settings.map("--device", {"--device": {"gpu": "cuda"}.get(settings["--device"], settings["--device"])})
    settings.map_plain()
    return settings.translated(NAME, "eval", command.program, arguments=arguments, device=str(settings["--device"]))


def _model_arguments(settings: Settings, folder: Path) -> list[str]:
    """The checkpoint beside which the model is only a shape; without one it is a name."""
    name, checkpoint = str(settings["--model_name"]), settings["--init_checkpoint_path"]
    if not checkpoint:
        settings.map("--model_name", {"--model": name})
        settings.same("--init_checkpoint_path", "empty: the model of that name")
        return ["--model", name]
    settings.map("--init_checkpoint_path", {"--model": checkpoint})
    shape = SHAPES.get(name)
    arguments = ["--model", str(checkpoint)]
    there = folder / str(checkpoint)
    if shape and there.exists() and not _is_described(there):
        settings.map("--model_name", {"model.num_heads": shape[2]})
        arguments += ["-o", f"model.num_heads={shape[2]}"]
    else:
        settings.same("--model_name", "the checkpoint says what it is")
    return [*arguments, "--tokenizer", "gpt2"] if not name.endswith("-cn") else arguments


def _is_described(checkpoint: Path) -> bool:
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return any((folder / name).is_file() for name in ("model_config.json", "config.json"))


def _export(command: Command) -> Translation:
    settings = _settings(command, EXPORT)
    prefix = Path(str(settings["--output_path"] or "./infer_model/model"))
    model = str(settings["--model_path"] or "gpt2-en")
    settings.map("--model_path", {"--model": model})
    settings.map("--output_path", {"--out": str(prefix.parent)})
    settings.map_plain()
    arguments = ["--model", model, "--to", "torch", "--out", str(prefix.parent), "--name", prefix.name]
    remark = f"instead of Paddle's {prefix.name}.pdmodel and .pdiparams, a program of torch.export with its weights"
    return settings.translated(NAME, "export", command.program, arguments=arguments, remarks=[remark])


def _infer(command: Command) -> Translation:
    settings = _settings(command, INFERENCE)
    folder = Path(str(settings["--model_path"])).parent
    chinese = str(settings["--model_type"] or "").endswith("-cn")
    prompts = CHINESE_QUESTIONS if chinese else QUESTIONS
    settings.map("--model_path", {"DIR": str(folder)})
    settings.map("--model_type", {"--prompt": f"their {len(prompts)} built-in questions"})
    settings.same("--select_device", "what was exported runs on the CPU")
    arguments = [str(folder), "--max-new-tokens", "32"]
    for prompt in prompts:
        arguments += ["--prompt", prompt]
    remark = "their program stops at the end of a line as well"
    return settings.translated(NAME, "infer", command.program, arguments=arguments, remarks=[remark])


def _prepare(command: Command) -> Translation:
    settings = _settings(command, PREPARATION)
    needed = [name for name in ("--input_path", "--output_prefix") if not settings[name]]
    if needed:
        raise ConfigError(command.program, [f"{name}: is required." for name in needed])
    source = str(settings["--input_path"])
    if source.endswith(".json.zst.tar") and not (command.folder / source).exists():
        raise UsageError(f"--input_path: no {source}. OpenWebText2's archive is called openwebtext2.jsonl.zst.tar.")
    prefix = str(settings["--output_prefix"])
    arguments = [source, "--out", prefix, "--format", "paddle"]
    arguments += ["--key", settings["--json_key"], "--workers", str(settings["--workers"]), "--strip"]
    settings.map("--input_path", {"INPUT": settings["--input_path"]})
    settings.map("--output_prefix", {"--out": prefix, "--format": "paddle"})
    settings.map("--json_key", {"--key": settings["--json_key"]})
    settings.map("--workers", {"--workers": settings["--workers"]})
    tokenizer = settings["--tokenizer_name"] or "GPTTokenizer"
    if tokenizer != "GPTTokenizer":
        raise ConfigError(
            command.program,
            [
                f"--tokenizer_name: got {tokenizer!r}; needs GPTTokenizer. For Chinese GPT: `gptworks prepare INPUT "
                "--tokenizer FILE.model`, its sentencepiece file."
            ],
        )
    settings.map(["--model_name", "--tokenizer_name"], {"--tokenizer": "gpt2"})
    if settings.is_given("--append_eos"):
        arguments.append("--append-eod")
        settings.map("--append_eos", {"--append-eod": True})
    settings.map_plain()
    return settings.translated(NAME, "prepare", command.program, arguments=arguments)


PROGRAMS.update(
    {
        "run_pretrain.py": _train,
        "run_pretrain_static.py": _train,
        "run_eval.py": _evaluate,
        "export_model.py": _export,
        "inference.py": _infer,
        "create_pretraining_data.py": _prepare,
        "preprocess_data.py": _prepare,
    }
)
