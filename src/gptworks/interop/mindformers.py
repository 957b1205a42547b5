"""MindFormers' GPT-2: run_mindformer.py and its YAML, run_distribute.sh, and the tools beside them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.config.load import flatten
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import mindformers_settings, registry, yaml_files
from gptworks.interop import mindformers_tools as tools
from gptworks.interop.mindformers_keys import FLAGS, KEYS
from gptworks.interop.mindformers_settings import EVAL_DATA, RUNNER, TRAIN_DATA, M
from gptworks.interop.notes import Note
from gptworks.interop.settings import Key, Settings, parse_bool
from gptworks.interop.translation import AfterTraining, Command, Translation
from gptworks.launch import rank_table
from gptworks.launch.rank_table import RankTable

NAME = "mindformers"
TITLE = "MindFormers GPT-2"
MODES = ("train", "finetune", "eval", "predict")


def recognise(command: Command) -> bool:
    name = Path(command.program).name
    return name in {"run_mindformer.py", "run_distribute.sh", "run_standalone.sh"} or tools.recognise(name, command)


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    model = values.get("model")
    return "runner_config" in values or "base_config" in values or (isinstance(model, dict) and "model_config" in model)


def read_yaml(path: Path, seen: tuple[Path, ...] = (), remarks: list[str] | None = None) -> dict[str, Any]:
    """With the files of `base_config`: of these a later one takes the place of a whole block; the file itself changes
    single keys of what they give. One that is not there may be among those that ship with gptworks: `remarks` takes a
    remark."""
    if path.resolve() in seen:
        raise ConfigError(str(path), ["base_config: the files include each other."])
    values = yaml_files.read(path)
    bases = values.pop("base_config", None) or []
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        below, ours = path.parent / str(base), registry.shipped(Path(str(base)).name)
        if not below.is_file() and ours is not None:
            if remarks is not None:
                remarks.append(f"base_config: {base} is not here; the one that comes with gptworks is used: {ours}")
            below = ours
        merged.update(read_yaml(below, (*seen, path.resolve()), remarks))
    return yaml_files.deep_merge(merged, values)


def keys_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Dotted keys and text; an entry of a list of callbacks goes by its type."""
    lists = {name: values[name] for name in ("callbacks", "eval_callbacks") if isinstance(values.get(name), list)}
    flat = flatten({name: value for name, value in values.items() if name not in lists})
    for name, entries in lists.items():
        for entry in entries:
            about = dict(entry) if isinstance(entry, dict) else {"type": entry}
            kind = about.pop("type", "")
            flat[f"{name}.{kind}"] = None
            flat |= {f"{name}.{kind}.{key}": value for key, value in about.items()}
    return {key: yaml_files.as_text(value) for key, value in flat.items()}


def translate(command: Command, find: Any) -> Translation:
    name = Path(command.program).name
    if tools.recognise(name, command):
        return tools.translate(command)
    if name == "run_distribute.sh":
        return _distribute(command, find)
    if name == "run_standalone.sh":
        words = dict(zip(("CONFIG_PATH", "DEVICE_ID", "RUN_STATUS"), command.arguments, strict=False))
        if len(command.arguments) != 3:
            raise UsageError(
                f"{command.program}: got {len(command.arguments)} words; needs CONFIG_PATH DEVICE_ID RUN_STATUS."
            )
        values = _read(words["CONFIG_PATH"], find)
        stand_for = {"CONFIG_PATH": "", "DEVICE_ID": "context.device_id", "RUN_STATUS": "run_mode"}
        return _translate(values, words, stand_for, words["CONFIG_PATH"], command)
    flags, overrides = _arguments(command)
    if not flags.get("--config"):
        raise UsageError(f"{command.program}: --config is missing. Needed: --config FILE.yaml.")
    values = _read(flags["--config"], find) | overrides
    return _translate(values, flags, FLAGS, flags["--config"], command)


def _read(name: str, find: Any) -> dict[str, str]:
    return keys_of(read_yaml(find(name), remarks=find.remarks if isinstance(find, registry.Files) else None))


def translate_yaml(path: Path) -> Translation:
    return _translate(keys_of(read_yaml(path)), {}, {}, str(path), None)


def _arguments(command: Command) -> tuple[dict[str, str], dict[str, str]]:
    """The flags as they were written, and settings in the words of the YAML: of --options, and as --A.b.c value."""
    flags: dict[str, str] = {}
    overrides: dict[str, str] = {}
    left = list(command.arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"{command.program}: {word!r} stands where a flag was expected.")
        name, equals, value = word.partition("=")
        taken = [value] if equals else []
        while left and not left[0].startswith("--") and (not taken or name in ("--options", "--predict_data")):
            taken.append(left.pop(0))
        if not taken:
            raise UsageError(f"{command.program}: {name}: no value. Needed: such as {name} {_example(name)}.")
        if name == "--options":
            for text in taken:
                key, equals, value = text.partition("=")
                if not equals:
                    raise UsageError(f"--options {text}: needed KEY=VALUE, such as runner_config.epochs=1.")
                overrides[key] = value
        elif "." in name:
            overrides[name.removeprefix("--")] = taken[0]
        else:
            flags[name] = "\n".join(taken)
    Settings(command.program, [Key(flag) for flag in FLAGS], flags)  # an unknown one, with the nearest
    return flags, overrides


def _example(flag: str) -> str:
    key = next((key for key in KEYS if key.theirs == FLAGS.get(flag)), None)
    return "True" if key and key.read is parse_bool else "VALUE"


def _distribute(command: Command, find: Any) -> Translation:
    """run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_STATUS [RANK_SIZE]"""
    names = ("RANK_TABLE_FILE", "CONFIG_PATH", "DEVICE_RANGE", "RUN_STATUS", "RANK_SIZE")
    words = dict(zip(names, command.arguments, strict=False))
    if len(command.arguments) not in (4, 5):
        raise UsageError(
            f"{command.program}: got {len(command.arguments)} words; needs {' '.join(names[:4])} and, if you like, "
            "RANK_SIZE. A range is one word: [0,8]."
        )
    file = command.folder / words["RANK_TABLE_FILE"]
    if not file.is_file():
        named = words["RANK_TABLE_FILE"]
        place = "" if Path(named).is_absolute() else f" in {command.folder.resolve()}"
        raise UsageError(
            f"{'' if named == names[0] else f'{names[0]}: '}{named}: no such file{place}. Make one on each machine: "
            "gptworks run -- python mindformers/tools/hccl_tools.py --device_num [0,8]; of those of several machines "
            "make one: gptworks launch --merge-rank-tables FILE FILE."
        )
    table = rank_table.read(file)
    ranks = rank_table.parse_range(words["DEVICE_RANGE"], "DEVICE_RANGE")
    if ranks.stop > table.world_size:
        raise UsageError(
            f"DEVICE_RANGE: {words['DEVICE_RANGE']} needs {ranks.stop} ranks, but {words['RANK_TABLE_FILE']} has "
            f"{table.world_size}. Merge the tables of all machines and use the same file on each: "
            "gptworks launch --merge-rank-tables FILE FILE."
        )
    if words.get("RANK_SIZE", str(table.world_size)) != str(table.world_size):
        raise UsageError(
            f"RANK_SIZE: got {words['RANK_SIZE']}, but {words['RANK_TABLE_FILE']} has {table.world_size} ranks. "
            "Leave it out."
        )
    values = _read(words["CONFIG_PATH"], find)
    stand_for = {name: "run_mode" if name == "RUN_STATUS" else "" for name in names}
    return _translate(values, words, stand_for, words["CONFIG_PATH"], command, table)


def _translate(
    values: dict[str, str],
    flags: Mapping[str, str],
    stand_for: Mapping[str, str],
    where: str,
    command: Command | None,
    table: RankTable | None = None,
) -> Translation:
    """`flags`: what the command says beside the YAML; `stand_for`: the key that each of them sets."""
    mode = flags.get("--run_mode") or flags.get("RUN_STATUS") or values.get("run_mode") or "train"
    if mode not in MODES:
        raise UsageError(f"run_mode: got {mode!r}; needs one of {', '.join(MODES)}.")
    sets = {flag: stand_for[flag] for flag in flags}
    if "--dataset_dir" in flags:
        sets["--dataset_dir"] = EVAL_DATA if mode == "eval" else TRAIN_DATA
    in_yaml = set(values)
    values = values | {key: flags[flag] for flag, key in sets.items() if key}
    if table is not None:
        values["use_parallel"] = "True"  # as the script says
    settings = Settings(where, KEYS, values)
    remarks: list[str] = []
    mindformers_settings.model(settings)
    mindformers_settings.layout(settings, table, remarks)
    mindformers_settings.batch(settings)
    mindformers_settings.data(settings, command.folder if command else Path(), remarks)
    mindformers_settings.optimizer(settings)
    mindformers_settings.precision(settings)
    mindformers_settings.running(settings)
    mindformers_settings.generation(settings)
    settings.map_plain()
    device = str(settings["context.device_target"])
    settings.map("context.device_target", {"run.device": {"gpu": "cuda"}.get(device.lower(), device.lower())})
    verb = {"eval": "eval", "predict": "generate"}.get(mode, "train")
    settings.map("run_mode", {"verb": verb})
    del settings.ours["verb"]
    folder = command.folder if command else Path()
    stated: dict[str, Any] = {}
    after: list[AfterTraining] = []
    if verb == "train":
        arguments = _start(settings, mode, folder)
        after = _names(settings)
    else:
        arguments, stated = _use(settings, mode, folder)
    settings.require_noted()
    notes = _with_flags(settings.notes, flags, sets, in_yaml)
    if table is not None:
        arguments, notes = _placed(arguments, notes, flags, verb)
    return Translation(
        NAME,
        verb,
        command.program if command else "",
        config=settings.ours if verb == "train" else {},
        arguments=arguments,
        stated=stated,
        notes=notes,
        remarks=remarks,
        after=after,
        device=device,
        their_names=_names_with_flags(settings, sets, command),
    )


def _with_flags(notes: list[Note], flags: Mapping[str, str], sets: Mapping[str, str], in_yaml: set[str]) -> list[Note]:
    """A flag has the note of the key that it sets."""
    by_key = {note.theirs: note for note in notes}
    own_notes = []
    for flag, value in flags.items():
        if sets[flag]:
            own_notes.append(replace(by_key[sets[flag]], theirs=flag, value=value.replace("\n", " ")))
        elif flag in ("--config", "CONFIG_PATH"):
            own_notes.append(Note(flag, value, "mapped", "the settings below"))
    return own_notes + [note for note in notes if note.theirs in in_yaml]


def _names_with_flags(settings: Settings, sets: Mapping[str, str], command: Command | None) -> dict[str, str]:
    """A key of ours by the flag that was given, else by the key of the YAML."""
    by_key = {key: flag for flag, key in sets.items() if key}
    names = {"data.path": TRAIN_DATA, **settings.their_names}
    if command is not None and Path(command.program).name == "run_mindformer.py":
        by_key.setdefault(TRAIN_DATA, "--dataset_dir")
    return {ours: by_key.get(theirs, theirs) for ours, theirs in names.items()}


def _placed(
    arguments: list[str], notes: list[Note], flags: Mapping[str, str], verb: str
) -> tuple[list[str], list[Note]]:
    """Which processes run here."""
    own_notes = []
    options = {"RANK_TABLE_FILE": "--rank-table", "DEVICE_RANGE": "--rank-range"}
    for flag, option in options.items():
        if verb == "train":
            arguments = [*arguments, option, flags[flag]]
            own_notes.append(Note(flag, flags[flag], "mapped", f"{option} {flags[flag]}"))
        else:
            own_notes.append(Note(flag, flags[flag], "ignored", "", "one process is enough for this"))
    if "RANK_SIZE" in flags:
        own_notes.append(Note("RANK_SIZE", flags["RANK_SIZE"], "mapped", "", "the rank table says it too"))
    return arguments, own_notes + notes


def _names(settings: Settings) -> list[AfterTraining]:
    """MindSpore counts in epochs, and a sink is one."""
    at = "callbacks.CheckpointMointor"
    prefix = settings[f"{at}.prefix"]
    folder = settings[f"{at}.directory"] or f"{settings['output_dir']}/rank_0/checkpoint"
    path = f"{folder}/{prefix}_rank_0-{{epoch}}_{{step_in_epoch}}.ckpt"
    names = [f"{at}.prefix", f"{at}.directory"]
    if not settings.is_given(at):
        settings.same(names, "there is no CheckpointMointor")
        return []
    settings.map(names, {"theirs": path})
    del settings.ours["theirs"]
    return [AfterTraining("mindspore", path, steps_per_epoch=_sink(settings))]


def _sink(settings: Settings) -> int:
    """Steps of what MindSpore calls an epoch; 0: those of the data."""
    return max(0, settings[f"{RUNNER}.sink_size"]) if settings[f"{RUNNER}.sink_mode"] else 0


_LOADING = ["load_checkpoint", "resume_or_finetune_checkpoint"]


def _start(settings: Settings, mode: str, folder: Path) -> list[str]:
    """Fresh weights, weights of a checkpoint, or where a run of ours has stopped."""
    settings.same("input_data", "for run_mode predict")
    checkpoint = next((str(settings[name]) for name in _LOADING if settings[name]), "")
    named = settings[f"{M}.checkpoint_name_or_path"]
    asked = str(settings["resume_training"] or "false").lower()  # True, or the name of a file
    resumes = bool(settings["resume_or_finetune_checkpoint"]) or asked not in ("false", "no", "0")
    if not checkpoint and mode == "finetune":
        if not named:
            raise ConfigError(
                settings.where, ["load_checkpoint: empty, and run_mode is finetune. Give --load_checkpoint FILE."]
            )
        settings.map(f"{M}.checkpoint_name_or_path", {"init.checkpoint": named})
    settings.same(f"{M}.checkpoint_name_or_path", "training begins afresh; run_mode finetune begins with these weights")
    if not checkpoint:
        settings.same([*_LOADING, "resume_training"], "empty: fresh weights")
        return []
    ours = _our_step(settings, checkpoint, folder) if mode == "train" and resumes else None
    if ours is not None:
        settings.map([*_LOADING, "resume_training"], {"--resume": str(ours)})
        del settings.ours["--resume"]
        return ["--resume", str(ours)]
    why = "the weights only; their optimizer is not read" if mode == "train" and resumes else ""
    settings.map([*_LOADING, "resume_training"], {"init.checkpoint": checkpoint}, why=why)
    return []


def _our_step(settings: Settings, path: str, folder: Path) -> Path | None:
    """Our checkpoint of the same step, where a run of ours wrote the file."""
    out = Path(str(settings["output_dir"]))
    if (folder / path).is_dir():
        inside = (folder / path).resolve() == (folder / out).resolve() or run_paths.is_checkpoint(folder / path)
        return Path(path) if inside else None
    name = re.search(r"-(\d+)_(\d+)\.ckpt$", path)
    if not name or not (per_epoch := _sink(settings)):
        return None
    step = (int(name[1]) - 1) * per_epoch + int(name[2])
    ours = out / run_paths.CHECKPOINTS / run_paths.step_name(step)
    return ours if (folder / ours).is_dir() else None


def _use(settings: Settings, mode: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """run_mode eval and predict: arguments, and what a .ckpt file does not carry."""
    names = [*_LOADING, f"{M}.checkpoint_name_or_path"]
    model = next((str(settings[name]) for name in names if settings[name]), "")
    if not model:
        raise ConfigError(
            settings.where, [f"load_checkpoint: empty, and run_mode is {mode}. Give --load_checkpoint FILE."]
        )
    settings.map([name for name in names if settings[name] == model], {"--model": model})
    del settings.ours["--model"]
    settings.same([*names, "resume_training"], "the weights are those of --model")
    at = "callbacks.CheckpointMointor"
    settings.same([f"{at}.prefix", f"{at}.directory"], "for run_mode train")
    arguments, stated = ["--model", model], {}
    if model.endswith(".ckpt"):
        keys = ("model.num_heads", "model.gelu", "parallel.tp")
        stated = {key: settings.ours[key] for key in keys}
        arguments += ["--tokenizer", settings.ours["data.tokenizer"]] if "data.tokenizer" in settings.ours else []
    if mode == "predict":
        return _predict(settings, arguments, stated, folder)
    settings.same("input_data", "for run_mode predict")
    data = settings[EVAL_DATA] or settings[TRAIN_DATA]
    if not data:
        raise ConfigError(settings.where, [f"{EVAL_DATA}: empty, and run_mode is eval. Give --eval_dataset_dir DIR."])
    rows = tools.row_length(folder / data)
    stated["data.seq_len"] = min(settings.ours["data.seq_len"], rows - 1) if rows else settings.ours["data.seq_len"]
    size = str(settings[f"{RUNNER}.batch_size"])
    return [*arguments, "--task", "heldout", "--data", str(data), "--split", "all", "--batch-size", size], stated


def _predict(
    settings: Settings, arguments: list[str], stated: dict[str, Any], folder: Path
) -> tuple[list[str], dict[str, Any]]:
    prompts = [text for text in str(settings["input_data"] or "").split("\n") if text]
    if not prompts:
        raise ConfigError(settings.where, ["input_data: empty, and run_mode is predict. Give --predict_data TEXT."])
    settings.map("input_data", {"--prompt": " ".join(prompts)})
    del settings.ours["--prompt"]
    stated["generate.max_new_tokens"] = settings.ours["generate.max_new_tokens"]
    for name in ("strategy", "rules", "top_k", "top_p", "repetition_penalty", "seed"):
        arguments += [f"--{name.replace('_', '-')}", f"{settings.ours[f'generate.{name}']}"]
    for text in prompts:
        arguments += ["--prompts" if len(prompts) == 1 and (folder / text).is_file() else "--prompt", text]
    return arguments, stated
