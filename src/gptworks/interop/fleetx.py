"""FleetX (PaddleFleetX): run_pretrain.py, run_generation.py and their YAML, of 2022 and of 2023."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError, UsageError
from gptworks.interop import yaml_files
from gptworks.interop.settings import Key, Settings, number, truth, whole, words
from gptworks.interop.translation import AfterTraining, Command, Translation

NAME = "fleetx"
TITLE = "FleetX (PaddleFleetX) GPT"
PROGRAMS = {
    "run_pretrain.py": "train",
    "train.py": "train",
    "run_generation.py": "generate",
    "generation.py": "generate",
}
PROMPT = "Hi, GPT2. Tell me who Jack Ma is."  # the one in their run_generation.py

_ALWAYS_FP32 = "LayerNorm, softmax and the loss are computed in fp32 here, products in fp16; there are no lists"
_FASTEST = "the fastest equivalent is always used; the numbers are the same"
_FUSED = "a choice of kernels, not of numbers; torch chooses"

KEYS = [
    Key("Global.device", words, default="gpu"),
    Key("Global.seed", whole, "train.seed", default=1024),
    Key("Global.global_batch_size", whole),
    Key("Global.local_batch_size", whole),
    Key("Global.micro_batch_size", whole),
    Key("Engine.max_steps", whole, "train.steps", default=500000),
    Key("Engine.num_train_epochs", whole, default=1),
    Key("Engine.run_mode", words, default="step"),
    Key("Engine.accumulate_steps", words, why="FleetX always derives it from local and micro batch size, and so do we"),
    Key("Engine.logging_freq", whole, "train.log_every", default=1),
    Key("Engine.eval_freq", whole, "evaluate.every", default=500),
    Key("Engine.eval_iters", whole, "evaluate.batches", default=10),
    Key("Engine.test_iters", whole, why="the third share is measured by `gptworks eval --task heldout --split test`"),
    Key("Engine.mix_precision.use_pure_fp16", truth),
    Key("Engine.mix_precision.enable", truth),
    Key("Engine.mix_precision.dtype", words, default="float16"),
    Key("Engine.mix_precision.level", words, default="O2"),
    Key("Engine.mix_precision.scale_loss", number, default=32768.0),
    Key("Engine.mix_precision.use_main_grad", truth, why="gradients are summed in fp32 always"),
    Key("Engine.mix_precision.custom_black_list", words, why=_ALWAYS_FP32),
    Key("Engine.mix_precision.custom_white_list", words, why=_ALWAYS_FP32),
    Key("Engine.save_load.save_steps", whole, "checkpoint.every", default=1000),
    Key("Engine.save_load.save_epoch", whole, why="checkpoints are counted in steps: checkpoint.every"),
    Key("Engine.save_load.output_dir", words, default="./output"),
    Key("Engine.save_load.ckpt_dir", words),
    Key("Data.batch_size.global_batch_size", whole),
    Key("Data.batch_size.local_batch_size", whole),
    Key("Data.batch_size.micro_batch_size", whole),
    Key("Data.dataset.input_dir", words),
    Key("Data.dataset.split", words),
    Key("Data.dataset.max_seq_len", whole),
    *[
        Key(f"Data.{part}.{key}", words)
        for part in ("Train", "Eval", "Test")
        for key in (
            "dataset.name", "dataset.input_dir", "dataset.split", "dataset.max_seq_len", "dataset.mode",
            "dataset.num_samples", "dataset.model_type", "dataset.seed", "dataset.eos_id", "sampler.name", "sampler.batch_size",
            "sampler.shuffle", "sampler.drop_last", "loader.num_workers", "loader.return_list", "loader.collate_fn",
        )
    ],
    Key("Model.module", words, why="the kind of task follows from the program that is run"),
    Key("Model.name", words, why="there is one model"),
    Key("Model.vocab_size", whole, default=50304),
    Key("Model.vocab_size_divisible_unit", whole, default=128),
    Key("Model.hidden_size", whole, "model.hidden_size", default=2048),
    Key("Model.num_layers", whole, "model.num_layers", default=24),
    Key("Model.num_attention_heads", whole, "model.num_heads", default=16),
    Key("Model.ffn_hidden_size", whole, "model.ffn_size"),
    Key("Model.hidden_dropout_prob", number, default=0.1),
    Key("Model.attention_probs_dropout_prob", number, "model.dropout_attention", default=0.1),
    Key("Model.max_position_embeddings", whole, "model.max_positions", default=1024),
    Key("Model.type_vocab_size", whole, why="FleetX takes it and does not use it"),
    Key("Model.initializer_range", number, "init.std", default=0.02),
    Key("Model.use_recompute", truth, default=True),
    Key("Model.recompute_granularity", words, default="full"),
    Key("Model.no_recompute_layers", words),
    Key("Model.fused_linear", truth, why=_FASTEST),
    Key("Model.fuse_attn_qkv", truth, why="QKV is one matrix here always"),
    Key("Model.scale_qk_by_layer_num", truth, why="divides and multiplies by the same number"),
    Key("Model.sequence_parallel", truth, default=False),
    Key("Model.use_flash_attn", truth, why="torch's fastest attention is used always (model.attention: auto)"),
    Key("Model.fused_softmax_with_triangular", truth, why=_FUSED),
    Key("Model.virtual_pp_degree", whole, default=1),
    Key("Distributed.dp_degree", whole),
    Key("Distributed.mp_degree", whole, "parallel.tp", default=1),
    Key("Distributed.pp_degree", whole, "parallel.pp", default=1),
    Key("Distributed.sharding.sharding_degree", whole, default=1),
    Key("Distributed.sharding.sharding_stage", whole, default=1),
    Key("Distributed.sharding.sharding_offload", truth, default=False),
    Key("Distributed.sharding.reduce_overlap", truth, why="communication overlaps wherever torch can"),
    Key("Distributed.sharding.broadcast_overlap", truth, why="communication overlaps wherever torch can"),
    Key("Distributed.pp_recompute_interval", whole, why="every block is recomputed, or none"),
    Key("Distributed.fuse_sequence_parallel_allreduce", truth, why="those gradients are always summed in one message"),
    Key("Fused.tensor_fusion", truth, why=_FASTEST),
    Key("Optimizer.name", words),
    Key("Optimizer.weight_decay", number, "optim.weight_decay", default=0.0),
    Key("Optimizer.adam_beta1", number),
    Key("Optimizer.adam_beta2", number),
    Key("Optimizer.adam_epsilon", number),
    Key("Optimizer.beta1", number),
    Key("Optimizer.beta2", number),
    Key("Optimizer.epsilon", number),
    Key("Optimizer.multi_precision", truth, why="parameters are fp32 masters here always"),
    Key("Optimizer.tensor_fusion", truth, why=_FASTEST),
    Key("Optimizer.lr.name", words),
    Key("Optimizer.lr.decay_steps", whole, default=360000),
    Key("Optimizer.lr.max_steps", whole, why="FleetX does not use it"),
    Key("Optimizer.lr.warmup_rate", number, default=0.01),
    Key("Optimizer.lr.max_lr", number, default=1e-5),
    Key("Optimizer.lr.min_lr", number, default=5e-5),
    Key("Optimizer.lr.use_increments", truth),
    Key("Optimizer.grad_clip", number),
    Key("Optimizer.grad_clip.name", words, why="by the global norm, the only way here"),
    Key("Optimizer.grad_clip.clip_norm", number),
    Key("Inference.model_dir", words, why="for run_inference.py; here `gptworks infer DIR`"),
    Key("Inference.mp_degree", whole, why="for run_inference.py; here `gptworks infer DIR`"),
    Key("Generation.top_k", whole, "generate.top_k", default=5),
    Key("Generation.top_p", number, "generate.top_p", default=1.0),
    Key("Generation.temperature", number, "generate.temperature", default=1.0),
    Key("Generation.min_dec_len", whole, "generate.min_new_tokens", default=1),
    Key("Generation.max_dec_len", whole, default=16),
    Key("Generation.num_return_sequences", whole, "generate.num_return_sequences", default=1),
    Key("Generation.decode_strategy", words, default="sampling"),
    Key("Generation.num_beams", whole, default=0),
    Key("Generation.length_penalty", number, default=1.0),
    Key("Generation.early_stopping", truth, default=False),
    Key("Generation.use_topp_sampling", truth, why=_FUSED),
    Key("Generation.inference", truth, why="for their exported graph"),
    Key("Offline_Eval.eval_path", words, why="`gptworks eval --data`"),
    Key("Offline_Eval.cloze_eval", truth, why="`gptworks eval --task lambada`"),
    Key("Offline_Eval.overlapping_eval", whole, why="`gptworks eval --overlap`"),
    Key("Offline_Eval.batch_size", whole, why="`gptworks eval --batch-size`"),
    Key("Offline_Eval.max_seq_len", whole, why="windows are as long as the model's context"),
    Key("Offline_Eval.logging_freq", whole, why="a progress bar shows where it is"),
    *[
        Key(f"Quantization.{key}", words, why="no training with quantization; `--weights int8` when generating")
        for key in (
            "enable", "weight_quantize_type", "activation_quantize_type", "weight_bits", "activation_bits",
            "quantizable_layer_type", "onnx_format", "weight_preprocess_type", "activation_preprocess_type",
        )
    ],
    *[
        Key(f"Compress.{key}", words, why="no pruning, no distillation")
        for key in ("pretrained", "Quantization", "Prune", "Distillation")
    ],
    *[
        Key(f"Tuning.{key}", words, why="`gptworks plan --search` finds a layout")
        for key in ("enable", "tuning_recompute", "profile_start_step", "profile_end_step", "verbose")
    ],
    Key("Profiler.enable", truth, default=False),
    Key("Profiler.scheduler", words),
    *[
        Key(f"Profiler.{key}", words, why="the trace of train.profile holds all of it")
        for key in (
            "profiler_log", "detailed", "timer_only", "record_shapes", "profile_memory", "summary.overview",
            "summary.device", "summary.model", "summary.dist", "summary.kernel", "summary.op", "summary.mem",
            "summary.memcpy",
        )
    ],
]  # fmt: skip


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
    return _merge(read_yaml(path.parent / str(base), (*seen, path.resolve())), values)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        replaces = isinstance(value, dict) and value.get("_inherited_") is False
        both = isinstance(below, dict) and isinstance(value, dict) and not replaces
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return _without_marks(merged)


def _without_marks(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_marks(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key != "_inherited_"
    }


def translate(command: Command, find: Any) -> Translation:
    """`find`: the file that is meant by a name in the command, on disk or among the recipes we ship."""
    config, overrides = _arguments(command)
    values = yaml_files.flatten(read_yaml(find(config)))
    where = config
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or "=" in value:
            raise UsageError(f"-o {text}: needed one =, as in -o Engine.max_steps=10.")
        values[key] = value
    return translate_values(values, where, PROGRAMS[Path(command.program).name], command)


def _arguments(command: Command) -> tuple[str, list[str]]:
    config, overrides, left = "", [], list(command.arguments)
    while left:
        word = left.pop(0)
        if word in ("-c", "--config", "-o", "--override"):
            if not left:
                raise UsageError(f"{command.program}: {word} without a value.")
            if word in ("-c", "--config"):
                config = left.pop(0)
            else:
                overrides.append(left.pop(0))
        else:
            raise UsageError(f"{command.program}: unknown argument {word}. Known: -c FILE, -o A.b.c=value.")
    return config, overrides


def translate_values(
    values: Mapping[str, Any], where: str, verb: str = "train", command: Command | None = None
) -> Translation:
    given = {key: yaml_files.as_text(value) for key, value in values.items()}
    settings = Settings(where, KEYS, given)
    remarks: list[str] = []
    processes = _processes(command)
    _model(settings)
    dp = _layout(settings, processes)
    _batch(settings, dp)
    _data(settings)
    _optimizer(settings, remarks)
    _precision(settings)
    _engine(settings)
    _generation(settings)
    settings.map_plain()
    device = str(settings["Global.device"])
    settings.map("Global.device", "run.device", _device(device))
    output = str(settings["Engine.save_load.output_dir"])
    settings.map("Engine.save_load.output_dir", "run.out", output)
    arguments, after = _checkpoints(settings, verb, output)
    settings.require_noted()
    ours = settings.ours if verb == "train" else {}
    if verb == "generate":
        arguments = _generate_arguments(settings, arguments)
    return Translation(
        NAME, verb, command.program if command else "", config=ours, arguments=arguments, notes=settings.notes, remarks=remarks, after=after, device=device,
        processes=processes,
    )  # fmt: skip


def _processes(command: Command | None) -> int:
    if command is None or not command.launcher:
        return 1
    named = command.launcher_options.get("--gpus") or command.launcher_options.get("--devices") or "0"
    return len(named.strip("\"'").split(","))


def _device(name: str) -> str:
    return {"gpu": "cuda", "cpu": "cpu"}.get(name, name)


def _model(settings: Settings) -> None:
    unit, vocab = settings["Model.vocab_size_divisible_unit"], settings["Model.vocab_size"]
    if settings.is_given("Model.vocab_size_divisible_unit"):
        vocab = -(-vocab // (unit * settings["Distributed.mp_degree"])) * unit * settings["Distributed.mp_degree"]
    settings.map(["Model.vocab_size", "Model.vocab_size_divisible_unit"], {"model.vocab_size": vocab})
    dropout = settings["Model.hidden_dropout_prob"]
    settings.map("Model.hidden_dropout_prob", {"model.dropout_hidden": dropout, "model.dropout_embed": dropout})
    settings.ours |= {"model.gelu": "tanh", "init.residual_scale": "none"}
    mode = settings["Model.recompute_granularity"] if settings["Model.use_recompute"] else "none"
    settings.map(["Model.use_recompute", "Model.recompute_granularity"], {"train.recompute": mode})
    skipped = settings["Model.no_recompute_layers"]
    settings.ignore("Model.no_recompute_layers", "all blocks are recomputed, or none" if skipped else "empty")


def _layout(settings: Settings, processes: int) -> int:
    degree, stage = settings["Distributed.sharding.sharding_degree"], settings["Distributed.sharding.sharding_stage"]
    other = settings["Distributed.mp_degree"] * settings["Distributed.pp_degree"] * degree
    dp = settings["Distributed.dp_degree"] or max(1, processes // other)
    if processes > 1 and dp * other != processes:
        raise ConfigError(
            settings.where,
            [
                f"Distributed: dp {dp} x mp x pp x sharding {other} = {dp * other}, but {processes} devices are launched."
            ],
        )
    settings.map("Distributed.dp_degree", {"parallel.dp": dp})
    sharded = {"parallel.fsdp": degree, **({"parallel.zero": stage} if degree > 1 else {})}
    settings.map(["Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage"], sharded)
    settings.map("Distributed.sharding.sharding_offload", "parallel.offload")
    settings.map("Model.sequence_parallel", "parallel.sequence")
    virtual = settings["Model.virtual_pp_degree"]
    if virtual > 1:
        settings.map(
            "Model.virtual_pp_degree", {"parallel.virtual_stages": virtual, "parallel.schedule": "interleaved"}
        )
    else:
        settings.map("Model.virtual_pp_degree", {"parallel.virtual_stages": 1})
    return int(dp * degree)


def _batch(settings: Settings, replicas: int) -> None:
    """global = local x dp x sharding; local is cut into micro-batches."""
    names = {
        size: [f"Global.{size}_batch_size", f"Data.batch_size.{size}_batch_size"]
        for size in ("global", "local", "micro")
    }
    found = {size: next((settings[key] for key in keys if settings[key]), None) for size, keys in names.items()}
    if found["global"] is None and found["local"] is not None:
        found["global"] = found["local"] * replicas
    if found["global"] is None:
        raise ConfigError(settings.where, ["global_batch_size: neither it nor local_batch_size is given."])
    if found["local"] is not None and found["local"] * replicas != found["global"]:
        raise ConfigError(
            settings.where,
            [
                f"global_batch_size: {found['global']} is not local_batch_size {found['local']} x {replicas} replicas "
                f"= {found['local'] * replicas}. Leave one of them empty."
            ],
        )
    settings.map(names["global"], {"batch.global_size": found["global"]})
    settings.ignore(names["local"], "global = local x replicas; it follows from global_batch_size")
    settings.map(names["micro"], {"batch.micro_size": found["micro"] or 8})


def _data(settings: Settings) -> None:
    old, new = "Data.dataset", "Data.Train.dataset"
    where = settings[f"{old}.input_dir"] or settings[f"{new}.input_dir"] or "./data"
    settings.map([f"{old}.input_dir", f"{new}.input_dir"], {"data.path": (where,)})
    split = settings[f"{old}.split"] or settings[f"{new}.split"] or "949,50,1"
    settings.map([f"{old}.split", f"{new}.split"], {"data.split": split})
    length = settings[f"{old}.max_seq_len"] or settings[f"{new}.max_seq_len"] or 1024
    settings.map([f"{old}.max_seq_len", f"{new}.max_seq_len"], {"data.seq_len": int(length)})
    settings.ours |= {"data.order": "paddle", "data.tokenizer": "gpt2"}
    for part in ("Train", "Eval", "Test"):
        for key in settings.keys:
            if key.startswith(f"Data.{part}."):
                settings.ignore(key, "one data set is cut by `split`, and read in the order of data.order")


def _optimizer(settings: Settings, remarks: list[str]) -> None:
    for name, ours, default in (("beta1", "beta1", 0.9), ("beta2", "beta2", 0.999), ("epsilon", "eps", 1e-8)):
        old, new = settings[f"Optimizer.adam_{name}"], settings[f"Optimizer.{name}"]
        value = old if old is not None else new if new is not None else default
        settings.map([f"Optimizer.adam_{name}", f"Optimizer.{name}"], {f"optim.{ours}": value})
    settings.ignore("Optimizer.name", "AdamW, the optimizer of all GPT models")
    settings.ignore("Optimizer.lr.name", "cosine after a warmup, as FleetX does whatever stands here")
    highest, lowest = settings["Optimizer.lr.max_lr"], settings["Optimizer.lr.min_lr"]
    settings.map("Optimizer.lr.max_lr", "optim.lr")
    settings.map("Optimizer.lr.min_lr", "optim.min_lr")
    decay = settings["Optimizer.lr.decay_steps"]
    warmup = settings["Optimizer.lr.warmup_rate"] * decay
    settings.map("Optimizer.lr.warmup_rate", {"optim.warmup_steps": warmup})
    if settings["Optimizer.lr.use_increments"]:
        batch = settings.ours["batch.global_size"]
        why = "their clock counts samples; ours steps"
        settings.map("Optimizer.lr.decay_steps", {"optim.decay_steps": decay // batch}, why=why)
        settings.map("Optimizer.lr.use_increments", {"optim.warmup_steps": warmup / batch}, why=why)
    else:
        settings.map("Optimizer.lr.decay_steps", {"optim.decay_steps": decay})
        settings.ignore("Optimizer.lr.use_increments", "the schedule counts steps")
    settings.ours |= {"optim.schedule": "cosine", "optim.warmup_from": 1, "optim.cosine_clock": "after_warmup"}
    if lowest > highest:
        settings.ours["optim.allow_rising_lr"] = True
        remarks.append(
            f"max_lr {highest:g} is below min_lr {lowest:g}: the rate will rise after the warmup, as it would in FleetX. "
            "They are probably swapped; -o Optimizer.lr.max_lr=... -o Optimizer.lr.min_lr=... mends it."
        )
    clip = settings["Optimizer.grad_clip"]
    clip = settings["Optimizer.grad_clip.clip_norm"] if clip is None else clip
    settings.map(["Optimizer.grad_clip", "Optimizer.grad_clip.clip_norm"], {"optim.clip": clip or 0.0})


def _precision(settings: Settings) -> None:
    at = "Engine.mix_precision"
    on = settings[f"{at}.enable"]
    on = settings[f"{at}.use_pure_fp16"] if on is None else on
    on = True if on is None else on
    compute = {"float16": "fp16", "bfloat16": "bf16"}.get(settings[f"{at}.dtype"], "fp16") if on else "fp32"
    told = {"precision.compute": compute}
    settings.map([f"{at}.use_pure_fp16", f"{at}.enable", f"{at}.dtype"], told)
    settings.ignore(f"{at}.level", "parameters are fp32 masters and products are fp16: what O2 computes")
    scaler = {"precision.scaler.init": settings[f"{at}.scale_loss"]}
    settings.map(f"{at}.scale_loss", scaler)
    settings.ours |= {
        "precision.scaler.window": 1000,
        "precision.scaler.hysteresis": 2,
        "precision.scaler.refill": "good_step",
    }


def _engine(settings: Settings) -> None:
    settings.ignore(
        ["Engine.num_train_epochs", "Engine.run_mode"],
        "their data set is laid out for max_steps, so the steps end first: train.steps",
    )
    settings.ours |= {"train.log_style": "fleetx", "train.nonfinite": "skip", "checkpoint.keep_last": 1_000_000}
    first_last = re.findall(r"\d+", str(settings["Profiler.scheduler"] or ""))
    if settings["Profiler.enable"] and len(first_last) >= 2:
        settings.map("Profiler.enable", {"train.profile": tuple(int(n) for n in first_last[:2])})
    else:
        settings.ignore("Profiler.enable", "off")
    settings.ignore("Profiler.scheduler", "the steps of train.profile")


def _generation(settings: Settings) -> None:
    longest = settings["Generation.max_dec_len"]
    longest = 512 if longest < 0 or longest > 512 else longest
    settings.map("Generation.max_dec_len", {"generate.max_new_tokens": longest})
    strategy = {"sampling": "sampling", "greedy_search": "greedy", "beam_search": "beam"}.get(
        settings["Generation.decode_strategy"]
    )
    if strategy is None:
        raise ConfigError(
            settings.where,
            [
                f"Generation.decode_strategy: got {settings['Generation.decode_strategy']!r}; needs sampling, "
                "greedy_search or beam_search."
            ],
        )
    settings.map("Generation.decode_strategy", {"generate.strategy": strategy})
    beams = settings["Generation.num_beams"]
    searching = ["Generation.num_beams", "Generation.length_penalty", "Generation.early_stopping"]
    if strategy == "beam":
        settings.map("Generation.num_beams", {"generate.num_beams": max(2, beams)})
        settings.map("Generation.length_penalty", "generate.length_penalty")
        settings.map("Generation.early_stopping", "generate.early_stopping")
    else:
        settings.ignore(searching, "only beam_search looks at it")
    settings.ours["generate.rules"] = "paddle"


def _checkpoints(settings: Settings, verb: str, output: str) -> tuple[list[str], list[AfterTraining]]:
    """A step of ours that they would call step_N, or weights of their own."""
    given = settings["Engine.save_load.ckpt_dir"]
    after = [AfterTraining(NAME, f"{output}/step_{{step}}", settings.ours["parallel.tp"], settings.ours["parallel.pp"])]
    if not given:
        settings.ignore(
            "Engine.save_load.ckpt_dir", "empty: fresh weights, or the newest checkpoint of the output folder"
        )
        return [], after
    if verb == "generate":
        settings.map("Engine.save_load.ckpt_dir", {"--model": given})
        del settings.ours["--model"]
        return ["--model", str(given)], []
    number = re.search(r"step_(\d+)/?(?:mp_\d+_sharding_\d+_pp_\d+/?)?$", str(given))
    ours = Path(output) / "checkpoints" / f"step-{int(number[1]):08d}" if number else None
    if ours is not None and ours.is_dir():
        settings.map("Engine.save_load.ckpt_dir", {"--resume": str(ours)})
        del settings.ours["--resume"]
        return ["--resume", str(ours)], after
    settings.map("Engine.save_load.ckpt_dir", {"init.checkpoint": given})
    return [], after


def _generate_arguments(settings: Settings, arguments: list[str]) -> list[str]:
    if not arguments:
        raise ConfigError(settings.where, ["Engine.save_load.ckpt_dir: empty; needs the folder with model.pdparams."])
    for key, value in settings.ours.items():
        if key.startswith("generate."):
            option = "--" + key.removeprefix("generate.").replace("_", "-")
            arguments += [option, str(value).lower() if isinstance(value, bool) else str(value)]
    shape = {"num_heads": settings.ours["model.num_heads"]}
    for name, value in shape.items():
        arguments += ["-o", f"model.{name}={value}"]
    return [*arguments, "--tokenizer", "gpt2", "--log-style", "fleetx", "--prompt", PROMPT]


def translate_yaml(path: Path) -> Translation:
    return translate_values(yaml_files.flatten(read_yaml(path)), str(path))
