"""FleetX (PaddleFleetX): run_pretrain.py, run_generation.py and their YAML, of 2022 and of 2023."""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.config.load import flatten
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import fleetx_generation, paddle_launch, yaml_files
from gptworks.interop.fleetx_keys import INSTEAD, KEYS, LISTS, OFF, TENSORS
from gptworks.interop.notes import Note
from gptworks.interop.settings import Settings
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "fleetx"
TITLE = "FleetX (PaddleFleetX) GPT"
PROGRAMS = {
    "run_pretrain.py": "train",
    "train.py": "train",
    "run_generation.py": "generate",
    "generation.py": "generate",
}


def recognise(command: Command) -> bool:
    return Path(command.program).name in PROGRAMS and any(w in ("-c", "--config") for w in command.arguments)


def recognise_yaml(values: Mapping[str, Any]) -> bool:
    return "Model" in values and ("Engine" in values or "Optimizer" in values or "Global" in values)


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """With `_base_` files below it, recursively; a block with `_inherited_: False` replaces that of the base."""
    if path.resolve() in seen:
        raise ConfigError(str(path), ["_base_: the files include each other."])
    values = yaml_files.read(path)
    base = values.pop("_base_", None)
    if base is None:
        return _without_marks(values)
    below = read_yaml(path.parent / str(base), (*seen, path.resolve()))
    return _without_marks(yaml_files.deep_merge(below, values, "_inherited_"))


def _without_marks(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_marks(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key != "_inherited_"
    }


def translate(command: Command, find: Any) -> Translation:
    """`find`: the file that is meant by a name in the command, on disk or among the recipes we ship."""
    config, overrides, devices = _arguments(command)
    values = flatten(read_yaml(find(config)))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or "=" in value:
            raise UsageError(f"-o {text}: needed one =, as in -o Engine.max_steps=10.")
        _override(values, key, _evaluated(value))
    verb = PROGRAMS[Path(command.program).name]
    translation = translate_values(values, config, verb, command)
    return replace(translation, notes=_of_devices(devices, verb, command) + translation.notes)


def _of_devices(devices: str | None, verb: str, command: Command) -> list[Note]:
    """--devices belongs to the launcher; people write it behind the program, too, where the comments have it."""
    if devices is None:
        return []
    if verb == "train" and len(devices.split(",")) > 1:
        raise UsageError(
            f"--devices {devices}: is for the launcher. Put it in front of the program: python -m "
            f"paddle.distributed.launch --devices {devices} {command.program} ..."
        )
    return [Note("--devices", devices, "mapped", "", "one process does it")]


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    """A number at the end of a key is a place in a list."""
    parent, _, place = key.rpartition(".")
    if not place.isdecimal() or not isinstance(values.get(parent), list):
        values[key] = value
        return
    if int(place) >= len(values[parent]):
        raise UsageError(f"-o {key}: {parent} has {len(values[parent])} values, from 0.")
    values[parent] = [value if at == int(place) else each for at, each in enumerate(values[parent])]


def translate_yaml(path: Path) -> Translation:
    return translate_values(flatten(read_yaml(path)), str(path))


def _arguments(command: Command) -> tuple[str, list[str], str | None]:
    """The YAML, what is set on top of it, and devices."""
    config, overrides, left = "", [], list(command.arguments)
    devices = None
    while left:
        word = left.pop(0)
        if word.startswith("--") and "=" in word:
            word, _, value = word.partition("=")
            left.insert(0, value)
        if word not in ("-c", "--config", "-o", "--override", "--devices"):
            raise UsageError(f"{command.program}: unknown argument {word}. Known: -c FILE, -o A.b.c=value.")
        if not left:
            raise UsageError(f"{command.program}: {word} without a value.")
        if word in ("-c", "--config"):
            config = left.pop(0)
        elif word == "--devices":
            devices = left.pop(0)
        else:
            overrides.append(left.pop(0))
    return config, overrides, devices


def _evaluated(text: str) -> Any:
    """As FleetX does: a Python literal, else a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def translate_values(
    values: Mapping[str, Any], where: str, verb: str = "train", command: Command | None = None
) -> Translation:
    settings = Settings(where, KEYS, {key: yaml_files.as_text(value) for key, value in values.items()})
    remarks: list[str] = []
    launched = paddle_launch.num_processes(command)
    _model(settings)
    _batch(settings, _layout(settings, launched if verb == "train" else 0))
    _data(settings)
    _optimizer(settings, remarks if verb == "train" else [])
    _precision(settings)
    _engine(settings)
    fleetx_generation.read(settings)
    _switched_off(settings, remarks)
    settings.map_plain()
    device = str(settings["Global.device"])
    settings.map("Global.device", "run.device", {"gpu": "cuda"}.get(device, device))
    output = str(settings["Engine.save_load.output_dir"])
    settings.map("Engine.save_load.output_dir", "run.out", output)
    folder = command.folder if command else Path()
    if verb == "generate":
        arguments = fleetx_generation.arguments(settings, folder)
        after: list[AfterTraining] = []
    else:
        arguments = _go_on_from(settings, folder) + paddle_launch.arguments(command, settings.ours)
        remarks += paddle_launch.remarks(command)
        cut = settings.ours["parallel.tp"], settings.ours["parallel.pp"]
        after = [AfterTraining(NAME, f"{output}/step_{{step}}", *cut)]
    settings.require_noted()
    notes = settings.notes if verb == "train" else [fleetx_generation.for_generation(note) for note in settings.notes]
    return Translation(
        NAME, verb, command.program if command else "", config=settings.ours if verb == "train" else {},
        arguments=arguments, notes=paddle_launch.notes(command, verb) + notes, remarks=remarks, after=after,
        logs=paddle_launch.logs(command) if verb == "train" else "", device=device, their_names=settings.their_names,
    )  # fmt: skip


def _is_of_2023(settings: Settings) -> bool:
    return any(name.startswith(("Data.Train.", "Global.global_b", "Global.local_b")) for name in settings.texts)


def _model(settings: Settings) -> None:
    unit, vocab = settings["Model.vocab_size_divisible_unit"], settings["Model.vocab_size"]
    if settings.is_given("Model.vocab_size_divisible_unit") or _is_of_2023(settings):
        vocab = -(-vocab // (unit * settings["Distributed.mp_degree"])) * unit * settings["Distributed.mp_degree"]
    settings.map(["Model.vocab_size", "Model.vocab_size_divisible_unit"], {"model.vocab_size": vocab})
    dropout = settings["Model.hidden_dropout_prob"]
    settings.map("Model.hidden_dropout_prob", {"model.dropout_hidden": dropout, "model.dropout_embed": dropout})
    settings.map(
        "Model.ffn_hidden_size",
        {"model.ffn_size": settings["Model.ffn_hidden_size"] or 4 * settings["Model.hidden_size"]},
    )
    # With these all of the model is said, and nothing is looked up in a checkpoint that has no settings.
    settings.ours |= {"model.tied": True, "model.gelu": "tanh", "model.attention": "auto", "model.layernorm_eps": 1e-5}
    settings.ours["init.residual_scale"] = "none"
    mode = settings["Model.recompute_granularity"] if settings["Model.use_recompute"] else "none"
    if mode not in ("none", "full", "full_attn", "core_attn"):
        raise ConfigError(
            settings.where, [f"Model.recompute_granularity: got {mode!r}; needs full, full_attn or core_attn."]
        )
    settings.map(["Model.use_recompute", "Model.recompute_granularity"], {"train.recompute": mode})
    if settings["Model.no_recompute_layers"]:
        settings.ignore("Model.no_recompute_layers", "all blocks are recomputed, or none")
    else:
        settings.same("Model.no_recompute_layers", "empty")


def _layout(settings: Settings, launched: int) -> int:
    """The number of replicas that read samples of their own."""
    degree, stage = settings["Distributed.sharding.sharding_degree"], settings["Distributed.sharding.sharding_stage"]
    stage = stage or (2 if _is_of_2023(settings) else 1)
    other = settings["Distributed.mp_degree"] * settings["Distributed.pp_degree"] * degree
    dp = settings["Distributed.dp_degree"] or max(1, launched // other)
    if launched and dp * other != launched:
        raise ConfigError(
            settings.where,
            [
                f"Distributed: dp {dp} x mp {settings['Distributed.mp_degree']} x pp "
                f"{settings['Distributed.pp_degree']} x sharding {degree} = {dp * other}, but {launched} "
                "devices are launched. Their product must be the number of devices."
            ],
        )
    settings.map("Distributed.dp_degree", {"parallel.dp": dp})
    sharded = {"parallel.fsdp": degree, **({"parallel.zero": stage} if degree > 1 else {})}
    settings.map("Distributed.sharding.sharding_degree", sharded)
    if degree > 1:
        settings.map("Distributed.sharding.sharding_stage", {"parallel.zero": stage})
    else:
        settings.same("Distributed.sharding.sharding_stage", "nothing is sharded")
    settings.map("Distributed.sharding.sharding_offload", "parallel.offload")
    settings.map("Model.sequence_parallel", "parallel.sequence")
    virtual = settings["Model.virtual_pp_degree"]
    ours = {"parallel.virtual_stages": virtual, "parallel.schedule": "interleaved"} if virtual > 1 else {}
    settings.map("Model.virtual_pp_degree", ours or {"parallel.virtual_stages": 1})
    return int(dp * degree)


def _batch(settings: Settings, replicas: int) -> None:
    """global = local x dp x sharding; local is cut into micro-batches."""
    names = {
        size: [f"Global.{size}_batch_size", f"Data.batch_size.{size}_batch_size"]
        for size in ("global", "local", "micro")
    }
    sizes: dict[str, Any] = {
        size: next((settings[key] for key in keys if settings[key]), None) for size, keys in names.items()
    }
    whole_batch, local, micro = sizes["global"], sizes["local"], sizes["micro"] or 8
    if whole_batch is None and local is None:
        raise ConfigError(settings.where, ["global_batch_size: neither it nor local_batch_size is given."])
    if whole_batch is None:
        whole_batch = local * replicas
    if local is not None and local * replicas != whole_batch:
        raise ConfigError(
            settings.where,
            [
                f"global_batch_size: {whole_batch} is not local_batch_size {local} x {replicas} replicas "
                f"= {local * replicas}. Leave one of them empty."
            ],
        )
    if whole_batch % (replicas * micro):
        raise ConfigError(
            settings.where,
            [
                f"micro_batch_size: {micro} does not divide local_batch_size {whole_batch / replicas:g} "
                f"(global {whole_batch} / {replicas} replicas)."
            ],
        )
    settings.map([*names["global"], *names["local"]], {"batch.global_size": whole_batch})
    settings.map(names["micro"], {"batch.micro_size": micro})


def _data(settings: Settings) -> None:
    old, new = "Data.dataset", "Data.Train.dataset"
    where = settings[f"{old}.input_dir"] or settings[f"{new}.input_dir"] or "./data"
    settings.map([f"{old}.input_dir", f"{new}.input_dir"], {"data.path": (where,)})
    split = settings[f"{old}.split"] or settings[f"{new}.split"] or "949,50,1"
    settings.map([f"{old}.split", f"{new}.split"], {"data.split": split})
    length = settings[f"{old}.max_seq_len"] or settings[f"{new}.max_seq_len"] or 1024
    settings.map([f"{old}.max_seq_len", f"{new}.max_seq_len"], {"data.seq_len": int(length)})
    # What follows an end of document is not scored; in 2023 a slip in their code makes that mask do nothing.
    settings.ours |= {"data.order": "paddle", "data.tokenizer": "gpt2", "data.mask_eod": not _is_of_2023(settings)}
    for section in ("Train", "Eval", "Test"):
        _data_of(settings, section, where, split, int(length))


def _data_of(settings: Settings, section: str, where: str, split: str, length: int) -> None:
    """A section of the data in the form of 2023: one data set is cut by `split` and read in FleetX's order."""
    at = f"Data.{section}"
    folder = settings[f"{at}.dataset.input_dir"]
    if folder and Path(folder) != Path(where) and section == "Eval":
        settings.map(
            f"{at}.dataset.input_dir", {"data.held_out_path": (folder,)}, why="all of it, not its second share"
        )
    usual: dict[str, tuple[Any, str]] = {  # what has our outcome, and what is done where it is another
        "dataset.name": ("GPTDataset", "read as GPTDataset does"),
        "dataset.input_dir": (Path(where), "the third share of Data.Train's is the test"),
        "dataset.split": (_shares(split), "one split for all: Data.Train's (data.split)"),
        "dataset.max_seq_len": (length, "all samples are as long as Data.Train's (data.seq_len)"),
        "dataset.eos_id": (50256, "the tokenizer says which token ends a text"),
        "dataset.seed": (
            settings["Global.seed"], "the order is drawn from Global.seed, which FleetX itself puts in its place"
        ),
        "sampler.name": ("GPTBatchSampler", "samples come as GPTBatchSampler gives them"),
        "sampler.shuffle": (False, "the data set is in a random order already (data.order)"),
        "sampler.drop_last": (True, "a step is always a whole batch"),
    }  # fmt: skip
    compared: dict[str, Callable[[Any], Any]] = {"dataset.input_dir": Path, "dataset.split": _shares}
    for key, (expected, otherwise) in usual.items():
        value = settings[f"{at}.{key}"]
        if value is None or compared.get(key, lambda value: value)(value) == expected:
            settings.same(f"{at}.{key}", "as it is here: one data set, cut by `split`, in FleetX's order (data.order)")
        else:
            settings.ignore(f"{at}.{key}", otherwise)
    taken = ("dataset.mode", "dataset.num_samples", "dataset.model_type", "sampler.batch_size")
    settings.same([f"{at}.{key}" for key in taken], "FleetX puts a number or name of its own in its place")
    loading = ("num_workers", "return_list", "collate_fn")
    settings.same([f"{at}.loader.{key}" for key in loading], "how samples come to the model, not which")


def _shares(text: str) -> list[float]:
    return [float(share) for share in re.findall(r"[0-9.]+", text)]


def _optimizer(settings: Settings, remarks: list[str]) -> None:
    for name, ours, default in (("beta1", "beta1", 0.9), ("beta2", "beta2", 0.999), ("epsilon", "eps", 1e-8)):
        old, new = settings[f"Optimizer.adam_{name}"], settings[f"Optimizer.{name}"]
        value = old if old is not None else new if new is not None else default
        settings.map([f"Optimizer.adam_{name}", f"Optimizer.{name}"], {f"optim.{ours}": value})
    name, shape = str(settings["Optimizer.name"] or "AdamW"), str(settings["Optimizer.lr.name"] or "cosine")
    if name.lower() not in ("adam", "adamw", "fusedadamw"):
        raise ConfigError(settings.where, [f"Optimizer.name: got {name!r}; GPT is trained with AdamW or FusedAdamW."])
    settings.same("Optimizer.name", "AdamW, the optimizer of all GPT models")
    if not shape.lower().startswith(("cosine", "consine")):
        raise ConfigError(settings.where, [f"Optimizer.lr.name: got {shape!r}; needs CosineAnnealingWithWarmupDecay."])
    settings.same("Optimizer.lr.name", "cosine after a warmup")
    highest, lowest = settings["Optimizer.lr.max_lr"], settings["Optimizer.lr.min_lr"]
    settings.map("Optimizer.lr.max_lr", "optim.lr")
    settings.map("Optimizer.lr.min_lr", "optim.min_lr")
    _schedule(settings, remarks)
    if lowest > highest:
        settings.ours["optim.allow_rising_lr"] = True
        remarks.append(
            f"max_lr {highest:g} is below min_lr {lowest:g}: the rate will rise after the warmup, as in FleetX. "
            f"They are probably swapped; -o Optimizer.lr.max_lr={lowest:g} -o Optimizer.lr.min_lr={highest:g} fixes it."
        )
    for name in ("Fused.tensor_fusion", "Optimizer.tensor_fusion"):
        if settings[name]:
            why = "theirs then decays biases too, by a slip in the names it looks at; here it does not"
            settings.map(name, {"optim.decay_params": "weights"}, why=why)
        else:
            settings.same(name, TENSORS)
    clip = settings["Optimizer.grad_clip"]
    clip = settings["Optimizer.grad_clip.clip_norm"] if clip is None else clip
    settings.map(["Optimizer.grad_clip", "Optimizer.grad_clip.clip_norm"], {"optim.clip": clip or 0.0})


def _schedule(settings: Settings, remarks: list[str]) -> None:
    decay = settings["Optimizer.lr.decay_steps"]
    warmup = settings["Optimizer.lr.warmup_rate"] * decay
    per_step = settings.ours["batch.global_size"] if settings["Optimizer.lr.use_increments"] else 1
    why = "FleetX counts samples here, we count steps" if per_step > 1 else ""
    settings.map("Optimizer.lr.warmup_rate", {"optim.warmup_steps": warmup / per_step})
    settings.map("Optimizer.lr.decay_steps", {"optim.decay_steps": max(1, decay // per_step)}, why=why)
    settings.map(
        "Optimizer.lr.use_increments",
        {"optim.decay_steps": max(1, decay // per_step), "optim.warmup_steps": warmup / per_step},
    )
    if _is_of_2023(settings) and per_step == 1 and not settings["Optimizer.lr.use_increments"]:
        remarks.append(
            "use_increments is false: the FleetX of 2023 never moves its schedule then, and trains with rate 0. "
            "Here it counts steps."
        )
    settings.ours |= {"optim.schedule": "cosine", "optim.warmup_from": 1, "optim.cosine_clock": "after_warmup"}


def _precision(settings: Settings) -> None:
    at = "Engine.mix_precision"
    on = settings[f"{at}.enable"]
    on = settings[f"{at}.use_pure_fp16"] if on is None else on
    on = True if on is None else on
    kinds = {"float16": "fp16", "bfloat16": "bf16"}
    kind = settings[f"{at}.dtype"]
    if kind not in kinds:
        raise ConfigError(settings.where, [f"{at}.dtype: got {kind!r}; needs float16 or bfloat16."])
    compute = {"precision.compute": kinds[kind] if on else "fp32"}
    settings.map([f"{at}.use_pure_fp16", f"{at}.enable", f"{at}.dtype"], compute)
    settings.same(f"{at}.level", "parameters are fp32 masters and products are in half precision: what O2 computes")
    for colour, usual in LISTS.items():
        name = f"{at}.custom_{colour}_list"
        if set((settings[name] or ",".join(usual)).split(",")) <= usual:
            settings.same(name, "LayerNorm, softmax and the loss are computed in fp32, products in half precision")
        else:
            settings.ignore(
                name, "LayerNorm, softmax and the loss are in fp32 here, products are not: there are no lists"
            )
    settings.map(f"{at}.scale_loss", "precision.scaler.init")
    settings.ours |= {
        "precision.scaler.window": 1000,
        "precision.scaler.hysteresis": 2,
        "precision.scaler.refill": "good_step",
    }


def _engine(settings: Settings) -> None:
    steps_end = "their data set is laid out for max_steps, so the steps end first: train.steps"
    settings.same("Engine.num_train_epochs", steps_end)
    if settings["Engine.run_mode"] == "step":
        settings.same("Engine.run_mode", steps_end)
    else:
        settings.ignore("Engine.run_mode", "evaluation and checkpoints are counted in steps, not in epochs")
    times = settings["Engine.eval_iters"]
    settings.map("Engine.eval_iters", {"evaluate.batches": times})  # of a step, over all replicas, there and here
    settings.map("Engine.eval_freq", {"evaluate.every": settings["Engine.eval_freq"] if times else 0})
    settings.ours |= {"train.log_style": "fleetx", "train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000}
    first_last = [int(number) for number in re.findall(r"\d+", str(settings["Profiler.scheduler"] or "1,5"))]
    if settings["Profiler.enable"] and len(first_last) >= 2:
        steps = (max(1, first_last[0]), max(1, first_last[1] - 1))  # theirs ends before the second
        settings.map(["Profiler.enable", "Profiler.scheduler"], {"train.profile": steps})
    else:
        settings.same(["Profiler.enable", "Profiler.scheduler"], "off")


def _switched_off(settings: Settings, remarks: list[str]) -> None:
    for names in OFF:
        on = settings[names[0]]
        if not on or str(on).lower() in ("false", "none", "0", "{}"):
            settings.same(names, "off")
            continue
        why = INSTEAD[names[0].partition(".")[0]]
        settings.ignore(names, why)
        remarks.append(f"{names[0]} is on: {why}.")


def _go_on_from(settings: Settings, folder: Path) -> list[str]:
    """A step of ours that they would call step_N, which is resumed to the bit, or weights of their own."""
    checkpoint = settings["Engine.save_load.ckpt_dir"]
    if not checkpoint:
        settings.same("Engine.save_load.ckpt_dir", "empty: fresh weights")
        return []
    named = re.fullmatch(r"(.*?)/?(?:epoch_\d+_)?step_(\d+)/?(?:mp_\d+_sharding_\d+_pp_\d+/?)?", str(checkpoint))
    ours = Path(named[1] or ".") / run_paths.CHECKPOINTS / run_paths.step_name(int(named[2])) if named else None
    if ours is not None and (folder / ours).is_dir():
        settings.map("Engine.save_load.ckpt_dir", {"--resume": str(ours)})
        del settings.ours["--resume"]
        return ["--resume", str(ours)]
    settings.map("Engine.save_load.ckpt_dir", {"init.checkpoint": checkpoint}, why="weights; the steps begin at 1")
    return []
