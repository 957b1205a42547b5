"""MindFormers' GPT-2: run_mindformer.py and its YAML, run_distribute.sh, and the tools beside them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptworks.config.load import flatten
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import mindformers_tools as tools
from gptworks.interop import registry, yaml_files
from gptworks.interop.mindformers_keys import FLAGS, KEYS
from gptworks.interop.notes import Note
from gptworks.interop.settings import Key, Settings, truth
from gptworks.interop.translation import AfterTraining, Command, Translation
from gptworks.launch import rank_table
from gptworks.launch.rank_table import RankTable

NAME = "mindformers"
TITLE = "MindFormers GPT-2"
MODES = ("train", "finetune", "eval", "predict")
GELU = {"gelu": "tanh", "fast_gelu": "sigmoid"}
COMPUTE = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}
_ADAM = {
    "fusedadamweightdecay": "AdamW; theirs leaves out Adam's correction of the first steps",
    "adamweightdecay": "AdamW; theirs leaves out Adam's correction of the first steps",
    "fusedcastadamweightdecay": "AdamW; theirs leaves out Adam's correction of the first steps",
    "fp32stateadamweightdecay": "",
    "adamw": "",
}
_SCHEDULES = {
    "polynomial": "linear",
    "polynomialwithwarmuplr": "linear",
    "warmupdecaylr": "linear",
    "linear": "linear",
    "linearwithwarmuplr": "linear",
    "cosine": "cosine",
    "cosinewithwarmuplr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "constantwarmuplr": "constant",
}
_M, _RUNNER, _PARALLEL = "model.model_config", "runner_config", "parallel_config"
_TRAIN_DATA, _EVAL_DATA = "train_dataset.data_loader.dataset_dir", "eval_dataset.data_loader.dataset_dir"


def recognise(command: Command) -> bool:
    name = Path(command.program).name
    return name in {"run_mindformer.py", "run_distribute.sh", "run_standalone.sh"} or tools.recognise(name, command)


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    model = values.get("model")
    return "runner_config" in values or "base_config" in values or (isinstance(model, dict) and "model_config" in model)


def read_yaml(path: Path, seen: tuple[Path, ...] = (), told: list[str] | None = None) -> dict[str, Any]:
    """With the files of `base_config`: of these a later one takes the place of a whole block; the file itself changes
    single keys of what they give. One that is not there may be among those that ship with gptworks: `told` takes a
    remark."""
    if path.resolve() in seen:
        raise ConfigError(str(path), ["base_config: the files include each other."])
    values = yaml_files.read(path)
    bases = values.pop("base_config", None) or []
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        below, ours = path.parent / str(base), registry.shipped(Path(str(base)).name)
        if not below.is_file() and ours is not None:
            if told is not None:
                told.append(f"base_config: {base} is not here; the one that comes with gptworks is used: {ours}")
            below = ours
        merged.update(read_yaml(below, (*seen, path.resolve()), told))
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
        given = dict(zip(("CONFIG_PATH", "DEVICE_ID", "RUN_STATUS"), command.arguments, strict=False))
        if len(command.arguments) != 3:
            raise UsageError(
                f"{command.program}: got {len(command.arguments)} words; needs CONFIG_PATH DEVICE_ID RUN_STATUS."
            )
        values = _read(given["CONFIG_PATH"], find)
        stand_for = {"CONFIG_PATH": "", "DEVICE_ID": "context.device_id", "RUN_STATUS": "run_mode"}
        return _translate(values, given, stand_for, given["CONFIG_PATH"], command)
    flags, overrides = _arguments(command)
    if not flags.get("--config"):
        raise UsageError(f"{command.program}: --config is missing. Needed: --config FILE.yaml.")
    values = _read(flags["--config"], find) | overrides
    return _translate(values, flags, FLAGS, flags["--config"], command)


def _read(name: str, find: Any) -> dict[str, str]:
    return keys_of(read_yaml(find(name), told=find.remarks if isinstance(find, registry.Files) else None))


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
    return "True" if key and key.read is truth else "VALUE"


def _distribute(command: Command, find: Any) -> Translation:
    """run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_STATUS [RANK_SIZE]"""
    names = ("RANK_TABLE_FILE", "CONFIG_PATH", "DEVICE_RANGE", "RUN_STATUS", "RANK_SIZE")
    given = dict(zip(names, command.arguments, strict=False))
    if len(command.arguments) not in (4, 5):
        raise UsageError(
            f"{command.program}: got {len(command.arguments)} words; needs {' '.join(names[:4])} and, if you like, "
            "RANK_SIZE. A range is one word: [0,8]."
        )
    file = command.folder / given["RANK_TABLE_FILE"]
    if not file.is_file():
        named = given["RANK_TABLE_FILE"]
        place = "" if Path(named).is_absolute() else f" in {command.folder.resolve()}"
        raise UsageError(
            f"{'' if named == names[0] else f'{names[0]}: '}{named}: no such file{place}. Make one on each machine: "
            "gptworks run -- python mindformers/tools/hccl_tools.py --device_num [0,8]; of those of several machines "
            "make one: gptworks launch --merge-rank-tables FILE FILE."
        )
    table = rank_table.read(file)
    ranks = rank_table.parse_range(given["DEVICE_RANGE"], "DEVICE_RANGE")
    if ranks.stop > table.world_size:
        raise UsageError(
            f"DEVICE_RANGE: {given['DEVICE_RANGE']} needs {ranks.stop} ranks, but {given['RANK_TABLE_FILE']} has "
            f"{table.world_size}. Merge the tables of all machines and use the same file on each: "
            "gptworks launch --merge-rank-tables FILE FILE."
        )
    if given.get("RANK_SIZE", str(table.world_size)) != str(table.world_size):
        raise UsageError(
            f"RANK_SIZE: got {given['RANK_SIZE']}, but {given['RANK_TABLE_FILE']} has {table.world_size} ranks. "
            "Leave it out."
        )
    values = _read(given["CONFIG_PATH"], find)
    stand_for = {name: "run_mode" if name == "RUN_STATUS" else "" for name in names}
    return _translate(values, given, stand_for, given["CONFIG_PATH"], command, table)


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
        sets["--dataset_dir"] = _EVAL_DATA if mode == "eval" else _TRAIN_DATA
    in_yaml = set(values)
    values = values | {key: flags[flag] for flag, key in sets.items() if key}
    if table is not None:
        values["use_parallel"] = "True"  # as the script says
    settings = Settings(where, KEYS, values)
    remarks: list[str] = []
    _model(settings)
    _layout(settings, table, remarks)
    _batch(settings)
    _data(settings, command.folder if command else Path(), remarks)
    _optimizer(settings)
    _precision(settings)
    _running(settings)
    _generation(settings)
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
    told = []
    for flag, value in flags.items():
        if sets[flag]:
            told.append(replace(by_key[sets[flag]], theirs=flag, value=value.replace("\n", " ")))
        elif flag in ("--config", "CONFIG_PATH"):
            told.append(Note(flag, value, "mapped", "the settings below"))
    return told + [note for note in notes if note.theirs in in_yaml]


def _names_with_flags(settings: Settings, sets: Mapping[str, str], command: Command | None) -> dict[str, str]:
    """A key of ours by the flag that was given, else by the key of the YAML."""
    by_key = {key: flag for flag, key in sets.items() if key}
    names = {"data.path": _TRAIN_DATA, **settings.their_names}
    if command is not None and Path(command.program).name == "run_mindformer.py":
        by_key.setdefault(_TRAIN_DATA, "--dataset_dir")
    return {ours: by_key.get(theirs, theirs) for ours, theirs in names.items()}


def _placed(
    arguments: list[str], notes: list[Note], flags: Mapping[str, str], verb: str
) -> tuple[list[str], list[Note]]:
    """Which processes run here."""
    told = []
    options = {"RANK_TABLE_FILE": "--rank-table", "DEVICE_RANGE": "--rank-range"}
    for flag, option in options.items():
        if verb == "train":
            arguments = [*arguments, option, flags[flag]]
            told.append(Note(flag, flags[flag], "mapped", f"{option} {flags[flag]}"))
        else:
            told.append(Note(flag, flags[flag], "ignored", "", "one process is enough for this"))
    if "RANK_SIZE" in flags:
        told.append(Note("RANK_SIZE", flags["RANK_SIZE"], "mapped", "", "the rank table says it too"))
    return arguments, told + notes


def _first(settings: Settings, names: list[str], default: Any) -> Any:
    """The first of several spellings that has a value."""
    return next((settings[name] for name in names if settings[name] is not None), default)


def _model(settings: Settings) -> None:
    widths = [f"{_M}.embedding_size", f"{_M}.hidden_size"]
    hidden = _first(settings, widths, 768)
    settings.map(widths, {"model.hidden_size": hidden})
    settings.map(f"{_M}.expand_ratio", {"model.ffn_size": settings[f"{_M}.expand_ratio"] * hidden})
    length = settings[f"{_M}.seq_length"]
    settings.map(f"{_M}.seq_length", {"model.max_positions": length, "data.seq_len": length})
    for names, ours, default in (
        (["dropout_prob", "embedding_dropout_prob"], "model.dropout_embed", 0.1),
        (["hidden_dropout_prob", "hidden_dropout_rate"], "model.dropout_hidden", 0.1),
        (["attention_probs_dropout_prob", "attention_dropout_rate"], "model.dropout_attention", 0.1),
    ):
        spelled = [f"{_M}.{name}" for name in names]
        settings.map(spelled, {ours: _first(settings, spelled, default)})
    problems = []
    activation = settings[f"{_M}.hidden_act"]
    if activation not in GELU:
        problems.append(f"{_M}.hidden_act: got {activation!r}; needs gelu or fast_gelu.")
    for key, needed in ((f"{_M}.type", "GPT2Config"), ("model.arch.type", "GPT2LMHeadModel")):
        if settings[key] != needed:
            problems.append(f"{key}: got {settings[key]!r}; needs {needed}: the model here is a GPT.")
        settings.same(key, "there is one model")
    if settings[f"{_M}.post_layernorm_residual"]:
        problems.append(f"{_M}.post_layernorm_residual: got True; needs False: LayerNorm stands before each part here.")
    if settings["moe_config.expert_num"] > 1:
        problems.append(
            f"moe_config.expert_num: got {settings['moe_config.expert_num']}; needs 1: there are no experts here."
        )
    if problems:
        raise ConfigError(settings.where, problems)
    settings.same([f"{_M}.post_layernorm_residual"], "False: LayerNorm stands before each part")
    settings.same("moe_config.expert_num", "one expert is none")
    settings.map(f"{_M}.hidden_act", {"model.gelu": GELU[activation]})
    settings.ours |= {"model.tied": True, "model.attention": "auto", "init.std": 0.01, "init.residual_scale": "none"}
    why = "its matrices are drawn with 0.01 whatever it says; the document's version drew embeddings from a truncated "
    settings.map(f"{_M}.initializer_range", {"init.std": 0.01}, why=why + "normal of 0.02, which are of 0.01 here")
    again = settings["recompute_config.recompute"]
    settings.map("recompute_config.recompute", {"train.recompute": "full" if again else "none"})


def _layout(settings: Settings, table: RankTable | None, remarks: list[str]) -> None:
    degrees = {name: settings[f"{_PARALLEL}.{name}"] for name in ("data_parallel", "model_parallel", "pipeline_stage")}
    dp, tp, pp = degrees.values()
    world = table.world_size if table is not None else None
    names = [f"{_PARALLEL}.{name}" for name in degrees]
    plain = str(settings["parallel.parallel_mode"]) in ("0", "data_parallel")
    if not settings["use_parallel"]:
        if dp * tp * pp > 1:
            remarks.append(
                f"parallel_config asks for {dp} x {tp} x {pp} devices, but use_parallel is False: one process, as in "
                "MindFormers. --use_parallel True, or run_distribute.sh, starts them all."
            )
        dp = tp = pp = 1
        settings.same([*names, "parallel.parallel_mode"], "use_parallel is False: one process")
    elif plain:
        dp, tp, pp = world or dp, 1, 1
        told = {"parallel.dp": dp}
        settings.map("parallel.parallel_mode", told)
        if world is None:
            settings.map(names[0], told)
        settings.same(names, "parallel_mode 0 is plain data parallelism, as many replicas as there are devices")
    elif world is not None and dp * tp * pp != world:
        fits = f"data_parallel: {max(1, world // (tp * pp))}"
        raise ConfigError(
            settings.where,
            [
                f"parallel_config: data_parallel {dp} x model_parallel {tp} x pipeline_stage {pp} = {dp * tp * pp}, "
                f"but the rank table has {world} devices. Needed: the product is the number of devices, such as "
                f"{fits}. In a file of your own, which has two lines, base_config: {settings.where} and "
                f"parallel_config: {{{fits}}}, and is given in the place of that one."
            ],
        )
    settings.map("use_parallel", {"parallel.tp": tp, "parallel.pp": pp})
    settings.map(names[1], {"parallel.tp": tp})
    settings.map(names[2], {"parallel.pp": pp})
    shards = ["parallel.enable_parallel_optimizer", f"{_PARALLEL}.optimizer_shard"]
    if any(settings[name] for name in shards) and dp > 1:
        told = {"parallel.fsdp": dp, "parallel.dp": 1, "parallel.zero": 1}
        settings.map([name for name in shards if settings[name]], told)
        settings.map(names[0], {"parallel.fsdp": dp})
        settings.same(shards, "the other of the two says to shard the optimizer, and one is enough")
    else:
        settings.map(names[0], {"parallel.dp": dp})
        settings.map(shards, {"parallel.fsdp": 1})
    if not plain:
        settings.same("parallel.parallel_mode", "the layout is what parallel_config says")
    settings.map(f"{_PARALLEL}.use_seq_parallel", {"parallel.sequence": settings[f"{_PARALLEL}.use_seq_parallel"]})


def _batch(settings: Settings) -> None:
    """A replica reads batch_size samples at a time; a pipeline, micro_batch_num times as many, one after the other."""
    ours = settings.ours
    replicas = ours.get("parallel.dp", 1) * ours["parallel.fsdp"]
    size, times = settings[f"{_RUNNER}.batch_size"], settings[f"{_PARALLEL}.micro_batch_num"]
    more = settings[f"{_RUNNER}.gradient_accumulation_steps"]
    if ours["parallel.pp"] > 1:
        told = {"batch.global_size": size * replicas * times}
        settings.map(f"{_PARALLEL}.micro_batch_num", told)
        tell = settings.ignore if more > 1 else settings.same
        tell(f"{_RUNNER}.gradient_accumulation_steps", "a pipeline has micro_batch_num in its place")
    else:
        told = {"batch.global_size": size * replicas * more}
        settings.same(f"{_PARALLEL}.micro_batch_num", "only a pipeline (pipeline_stage above 1) has micro-batches")
    settings.map(f"{_RUNNER}.batch_size", {"batch.micro_size": size, **told})
    settings.map(f"{_RUNNER}.gradient_accumulation_steps", told)


def _data(settings: Settings, folder: Path, remarks: list[str]) -> None:
    if settings[_TRAIN_DATA]:
        settings.map(_TRAIN_DATA, {"data.path": (settings[_TRAIN_DATA],)})
    settings.same(_TRAIN_DATA, "empty: no data yet; --dataset_dir DIR names it")
    settings.same(_EVAL_DATA, "for run_mode eval" if settings[_EVAL_DATA] else "empty")
    shuffled = settings["train_dataset.data_loader.shuffle"]
    settings.map("train_dataset.data_loader.shuffle", {"data.order": "shuffled" if shuffled else "sequential"})
    settings.same("eval_dataset.data_loader.shuffle", "the loss of all samples has no order")
    settings.same(["eval_dataset.data_loader.num_samples", "eval_dataset.repeat"], "for run_mode eval: all, once")
    settings.ours |= {"data.split": "1", "data.tokenizer": "gpt2", "data.too_long": "refuse", "evaluate.every": 0}
    if settings[f"{_M}.vocab_size"] < 50257:
        del settings.ours["data.tokenizer"]  # another one, which the data may know
    _mask(settings, folder, remarks)
    epochs = settings[f"{_RUNNER}.epochs"] * settings["train_dataset.repeat"]
    samples = settings["train_dataset.data_loader.num_samples"]
    lasting = [f"{_RUNNER}.epochs", "train_dataset.repeat", "train_dataset.data_loader.num_samples"]
    if samples:
        steps = max(1, epochs * (samples // settings.ours["batch.global_size"]))
        settings.map(
            lasting, {"train.steps": steps}, why="so many samples in each epoch; theirs are the first of the file"
        )
    else:
        settings.map(lasting[:2], {"train.epochs": float(epochs)})
        settings.same(lasting[2], "empty: all samples")


def _mask(settings: Settings, folder: Path, remarks: list[str]) -> None:
    """Where the input is the end of a text, theirs has no loss and no attention."""
    names = [f"{_M}.eos_token", f"{_M}.eos_token_id"]
    end = _first(settings, names, 50256)
    data = settings[_TRAIN_DATA]
    is_there = "data.tokenizer" in settings.ours and not (data and tools.has_no_ends(folder / data))
    if is_there and end != 50256:
        why = "what follows the tokenizer's own end of a text, 50256, is not scored; theirs looks for this token"
        settings.map(names, {"data.mask_eod": True}, why=why)
    else:
        settings.map(names, {"data.mask_eod": is_there})
    if is_there:
        remarks.append(
            "what follows an end of a text (50256) is not scored, as in MindFormers, which also hides that token from "
            "attention; here it is seen."
        )


def _optimizer(settings: Settings) -> None:
    kind = str(settings["optimizer.type"])
    if kind.lower() not in _ADAM:
        raise ConfigError(
            settings.where, [f"optimizer.type: got {kind!r}; needs one of AdamW's: FusedAdamWeightDecay, AdamW."]
        )
    settings.map("optimizer.type", {"optim.decay_params": "weights"}, why=_ADAM[kind.lower()])
    pair = str(settings["optimizer.betas"] or "").strip("[]()").split(",")
    for place, name in enumerate(("beta1", "beta2")):
        value = float(pair[place]) if len(pair) == 2 else settings[f"optimizer.{name}"]
        settings.map(f"optimizer.{name}", {f"optim.{name}": value})
    settings.map("optimizer.betas", {f"optim.{name}": settings.ours[f"optim.{name}"] for name in ("beta1", "beta2")})
    _rates(settings)
    clip = settings["runner_wrapper.max_grad_norm"] if settings["runner_wrapper.use_clip_grad"] else 0.0
    settings.map("runner_wrapper.use_clip_grad", {"optim.clip": clip})
    if clip:
        settings.map("runner_wrapper.max_grad_norm", {"optim.clip": clip})
    settings.same("runner_wrapper.max_grad_norm", "use_clip_grad is False")


def _rates(settings: Settings) -> None:
    at = "lr_schedule"
    kind = str(settings[f"{at}.type"])
    shape = _SCHEDULES.get(kind.lower())
    problems = []
    if shape is None:
        problems.append(f"{at}.type: got {kind!r}; needs polynomial, linear, cosine or constant.")
    highest = _first(settings, [f"{at}.learning_rate", "optimizer.learning_rate"], 5e-5)
    ends = [f"{at}.lr_end", f"{at}.end_learning_rate"]
    lowest = _first(settings, ends, 1e-7 if shape == "linear" else 0.0)
    if shape == "linear" and highest <= lowest:
        problems.append(
            f"{at}.learning_rate: {highest:g} is not above lr_end ({lowest:g}); MindFormers refuses that, too. They "
            "are probably swapped."
        )
    if settings[f"{at}.power"] != 1.0:
        problems.append(f"{at}.power: got {settings[f'{at}.power']:g}; needs 1, a straight line. Leave it out.")
    if problems:
        raise ConfigError(settings.where, problems)
    factor = settings["lr_scale_factor"] if settings["lr_scale"] else None
    scale = settings.ours["batch.global_size"] / factor if factor else 1.0
    settings.map([f"{at}.learning_rate", "optimizer.learning_rate"], {"optim.lr": highest * scale})
    settings.map("lr_scale", {"optim.lr": highest * scale})
    if factor:
        settings.map("lr_scale_factor", {"optim.lr": highest * scale})
    settings.same("lr_scale_factor", "lr_scale is False")
    settings.map(ends, {"optim.min_lr": lowest})
    settings.map(f"{at}.type", {"optim.schedule": shape})
    settings.same(f"{at}.power", "1: a straight line")
    lasts = [f"{at}.total_steps", f"{at}.decay_steps"]
    total = next((settings[name] for name in lasts if settings[name] > 0), 0)
    settings.map(lasts, {"optim.decay_steps": total})
    if settings[f"{at}.warmup_lr_init"]:
        why = "a warmup begins at 0 here"
        settings.map(f"{at}.warmup_lr_init", {"optim.warmup_from": 0}, why=why)
    settings.map(f"{at}.warmup_lr_init", {"optim.warmup_from": 0})
    settings.ours |= {"optim.warmup_from": 0, "optim.cosine_clock": "after_warmup"}


def _precision(settings: Settings) -> None:
    key = f"{_M}.compute_dtype"
    if settings[key] not in COMPUTE:
        raise ConfigError(settings.where, [f"{key}: got {settings[key]!r}; needs {', '.join(COMPUTE)}."])
    settings.map(key, {"precision.compute": COMPUTE[settings[key]]})
    at = "runner_wrapper.scale_sense"
    names = [f"{at}.loss_scale_value", at]
    fixed = "Fixed" in str(settings[f"{at}.type"] or "Fixed") or settings[at] is not None
    start = _first(settings, names, 1.0)
    settings.map(names, {"precision.scaler.init": start})
    factor = settings[f"{at}.scale_factor"]
    grow = {"precision.scaler.growth": 1.0 if fixed else factor}
    settings.map(f"{at}.type", grow, why="it never grows; an overflow halves it all the same" if fixed else "")
    settings.map(f"{at}.scale_factor", {**grow, "precision.scaler.backoff": 1 / factor})
    settings.ours |= {"precision.scaler.hysteresis": 1, "precision.scaler.floor": 1.0, "train.nonfinite": "skip"}


def _running(settings: Settings) -> None:
    at = "callbacks.CheckpointMointor"
    every = settings[f"{at}.save_checkpoint_steps"] if settings.is_given(at) else 0
    settings.map([f"{at}.save_checkpoint_steps", at], {"checkpoint.every": every})
    settings.map(f"{at}.keep_checkpoint_max", {"checkpoint.keep_last": settings[f"{at}.keep_checkpoint_max"]})
    steps = ["profile", "profile_start_step", "profile_stop_step"]
    profiled = (settings[steps[1]], settings[steps[2]]) if settings["profile"] else ()
    settings.map("profile", {"train.profile": profiled})
    if profiled:
        settings.map(steps, {"train.profile": profiled})
    settings.same(steps, "no profile")
    sinking = "how MindSpore hands data to the device; the names of its checkpoints follow from it"
    settings.same([f"{_RUNNER}.sink_mode", f"{_RUNNER}.sink_size"], sinking)


def _generation(settings: Settings) -> None:
    strategy = "sampling" if settings[f"{_M}.do_sample"] else "greedy"
    settings.map(f"{_M}.do_sample", {"generate.strategy": strategy})
    longest = min(settings[f"{_M}.max_decode_length"], settings[f"{_M}.seq_length"])
    settings.map(f"{_M}.max_decode_length", {"generate.max_new_tokens": longest})
    settings.ours |= {"generate.rules": "mindformers", "generate.seed": 0}  # their numpy begins at 0 for each text


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
    return max(0, settings[f"{_RUNNER}.sink_size"]) if settings[f"{_RUNNER}.sink_mode"] else 0


_LOADING = ["load_checkpoint", "resume_or_finetune_checkpoint"]


def _start(settings: Settings, mode: str, folder: Path) -> list[str]:
    """Fresh weights, weights of a checkpoint, or where a run of ours has stopped."""
    settings.same("input_data", "for run_mode predict")
    given = next((str(settings[name]) for name in _LOADING if settings[name]), "")
    named = settings[f"{_M}.checkpoint_name_or_path"]
    asked = str(settings["resume_training"] or "false").lower()  # True, or the name of a file
    resumes = bool(settings["resume_or_finetune_checkpoint"]) or asked not in ("false", "no", "0")
    if not given and mode == "finetune":
        if not named:
            raise ConfigError(
                settings.where, ["load_checkpoint: empty, and run_mode is finetune. Give --load_checkpoint FILE."]
            )
        settings.map(f"{_M}.checkpoint_name_or_path", {"init.checkpoint": named})
    settings.same(
        f"{_M}.checkpoint_name_or_path", "training begins afresh; run_mode finetune begins with these weights"
    )
    if not given:
        settings.same([*_LOADING, "resume_training"], "empty: fresh weights")
        return []
    ours = _our_step(settings, given, folder) if mode == "train" and resumes else None
    if ours is not None:
        settings.map([*_LOADING, "resume_training"], {"--resume": str(ours)})
        del settings.ours["--resume"]
        return ["--resume", str(ours)]
    why = "the weights only; their optimizer is not read" if mode == "train" and resumes else ""
    settings.map([*_LOADING, "resume_training"], {"init.checkpoint": given}, why=why)
    return []


def _our_step(settings: Settings, given: str, folder: Path) -> Path | None:
    """Our checkpoint of the same step, where a run of ours wrote the file."""
    out = Path(str(settings["output_dir"]))
    if (folder / given).is_dir():
        inside = (folder / given).resolve() == (folder / out).resolve() or (folder / given / "manifest.json").is_file()
        return Path(given) if inside else None
    name = re.search(r"-(\d+)_(\d+)\.ckpt$", given)
    if not name or not (per_epoch := _sink(settings)):
        return None
    step = (int(name[1]) - 1) * per_epoch + int(name[2])
    ours = out / "checkpoints" / f"step-{step:08d}"
    return ours if (folder / ours).is_dir() else None


def _use(settings: Settings, mode: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """run_mode eval and predict: arguments, and what a .ckpt file does not carry."""
    names = [*_LOADING, f"{_M}.checkpoint_name_or_path"]
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
    data = settings[_EVAL_DATA] or settings[_TRAIN_DATA]
    if not data:
        raise ConfigError(settings.where, [f"{_EVAL_DATA}: empty, and run_mode is eval. Give --eval_dataset_dir DIR."])
    rows = tools.row_length(folder / data)
    stated["data.seq_len"] = min(settings.ours["data.seq_len"], rows - 1) if rows else settings.ours["data.seq_len"]
    size = str(settings[f"{_RUNNER}.batch_size"])
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
