"""What the settings of a MindFormers YAML become: model, layout, batch, data, optimizer, precision, generation."""

from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError
from gptworks.interop import mindformers_tools as tools
from gptworks.interop.settings import Settings
from gptworks.launch.rank_table import RankTable

M, RUNNER, PARALLEL = "model.model_config", "runner_config", "parallel_config"
TRAIN_DATA, EVAL_DATA = "train_dataset.data_loader.dataset_dir", "eval_dataset.data_loader.dataset_dir"
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


def _first(settings: Settings, names: list[str], default: Any) -> Any:
    """The first of several spellings that has a value."""
    return next((settings[name] for name in names if settings[name] is not None), default)


def model(settings: Settings) -> None:
    widths = [f"{M}.embedding_size", f"{M}.hidden_size"]
    hidden = _first(settings, widths, 768)
    settings.map(widths, {"model.hidden_size": hidden})
    settings.map(f"{M}.expand_ratio", {"model.ffn_size": settings[f"{M}.expand_ratio"] * hidden})
    length = settings[f"{M}.seq_length"]
    settings.map(f"{M}.seq_length", {"model.max_positions": length, "data.seq_len": length})
    for names, ours, default in (
        (["dropout_prob", "embedding_dropout_prob"], "model.dropout_embed", 0.1),
        (["hidden_dropout_prob", "hidden_dropout_rate"], "model.dropout_hidden", 0.1),
        (["attention_probs_dropout_prob", "attention_dropout_rate"], "model.dropout_attention", 0.1),
    ):
        spelled = [f"{M}.{name}" for name in names]
        settings.map(spelled, {ours: _first(settings, spelled, default)})
    problems = []
    activation = settings[f"{M}.hidden_act"]
    if activation not in GELU:
        problems.append(f"{M}.hidden_act: got {activation!r}; needs gelu or fast_gelu.")
    for key, needed in ((f"{M}.type", "GPT2Config"), ("model.arch.type", "GPT2LMHeadModel")):
        if settings[key] != needed:
            problems.append(f"{key}: got {settings[key]!r}; needs {needed}: the model here is a GPT.")
        settings.same(key, "there is one model")
    if settings[f"{M}.post_layernorm_residual"]:
        problems.append(f"{M}.post_layernorm_residual: got True; needs False: LayerNorm stands before each part here.")
    if settings["moe_config.expert_num"] > 1:
        problems.append(
            f"moe_config.expert_num: got {settings['moe_config.expert_num']}; needs 1: there are no experts here."
        )
    if problems:
        raise ConfigError(settings.where, problems)
    settings.same([f"{M}.post_layernorm_residual"], "False: LayerNorm stands before each part")
    settings.same("moe_config.expert_num", "one expert is none")
    settings.map(f"{M}.hidden_act", {"model.gelu": GELU[activation]})
    settings.ours |= {"model.tied": True, "model.attention": "auto", "init.std": 0.01, "init.residual_scale": "none"}
    why = "its matrices are drawn with 0.01 whatever it says; the document's version drew embeddings from a truncated "
    settings.map(f"{M}.initializer_range", {"init.std": 0.01}, why=why + "normal of 0.02, which are of 0.01 here")
    again = settings["recompute_config.recompute"]
    settings.map("recompute_config.recompute", {"train.recompute": "full" if again else "none"})


def layout(settings: Settings, table: RankTable | None, remarks: list[str]) -> None:
    degrees = {name: settings[f"{PARALLEL}.{name}"] for name in ("data_parallel", "model_parallel", "pipeline_stage")}
    dp, tp, pp = degrees.values()
    world = table.world_size if table is not None else None
    names = [f"{PARALLEL}.{name}" for name in degrees]
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
        ours = {"parallel.dp": dp}
        settings.map("parallel.parallel_mode", ours)
        if world is None:
            settings.map(names[0], ours)
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
    shards = ["parallel.enable_parallel_optimizer", f"{PARALLEL}.optimizer_shard"]
    if any(settings[name] for name in shards) and dp > 1:
        ours = {"parallel.fsdp": dp, "parallel.dp": 1, "parallel.zero": 1}
        settings.map([name for name in shards if settings[name]], ours)
        settings.map(names[0], {"parallel.fsdp": dp})
        settings.same(shards, "the other of the two says to shard the optimizer, and one is enough")
    else:
        settings.map(names[0], {"parallel.dp": dp})
        settings.map(shards, {"parallel.fsdp": 1})
    if not plain:
        settings.same("parallel.parallel_mode", "the layout is what parallel_config says")
    settings.map(f"{PARALLEL}.use_seq_parallel", {"parallel.sequence": settings[f"{PARALLEL}.use_seq_parallel"]})


def batch(settings: Settings) -> None:
    """A replica reads batch_size samples at a time; a pipeline, micro_batch_num times as many, one after the other."""
    ours = settings.ours
    replicas = ours.get("parallel.dp", 1) * ours["parallel.fsdp"]
    size, times = settings[f"{RUNNER}.batch_size"], settings[f"{PARALLEL}.micro_batch_num"]
    more = settings[f"{RUNNER}.gradient_accumulation_steps"]
    if ours["parallel.pp"] > 1:
        samples = {"batch.global_size": size * replicas * times}
        settings.map(f"{PARALLEL}.micro_batch_num", samples)
        tell = settings.ignore if more > 1 else settings.same
        tell(f"{RUNNER}.gradient_accumulation_steps", "a pipeline has micro_batch_num in its place")
    else:
        samples = {"batch.global_size": size * replicas * more}
        settings.same(f"{PARALLEL}.micro_batch_num", "only a pipeline (pipeline_stage above 1) has micro-batches")
    settings.map(f"{RUNNER}.batch_size", {"batch.micro_size": size, **samples})
    settings.map(f"{RUNNER}.gradient_accumulation_steps", samples)


def data(settings: Settings, folder: Path, remarks: list[str]) -> None:
    if settings[TRAIN_DATA]:
        settings.map(TRAIN_DATA, {"data.path": (settings[TRAIN_DATA],)})
    settings.same(TRAIN_DATA, "empty: no data yet; --dataset_dir DIR names it")
    settings.same(EVAL_DATA, "for run_mode eval" if settings[EVAL_DATA] else "empty")
    shuffled = settings["train_dataset.data_loader.shuffle"]
    settings.map("train_dataset.data_loader.shuffle", {"data.order": "shuffled" if shuffled else "sequential"})
    settings.same("eval_dataset.data_loader.shuffle", "the loss of all samples has no order")
    settings.same(["eval_dataset.data_loader.num_samples", "eval_dataset.repeat"], "for run_mode eval: all, once")
    settings.ours |= {"data.split": "1", "data.tokenizer": "gpt2", "data.too_long": "refuse", "evaluate.every": 0}
    if settings[f"{M}.vocab_size"] < 50257:
        del settings.ours["data.tokenizer"]  # another one, which the data may know
    _mask(settings, folder, remarks)
    epochs = settings[f"{RUNNER}.epochs"] * settings["train_dataset.repeat"]
    samples = settings["train_dataset.data_loader.num_samples"]
    lasting = [f"{RUNNER}.epochs", "train_dataset.repeat", "train_dataset.data_loader.num_samples"]
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
    names = [f"{M}.eos_token", f"{M}.eos_token_id"]
    end = _first(settings, names, 50256)
    data = settings[TRAIN_DATA]
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


def optimizer(settings: Settings) -> None:
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


def precision(settings: Settings) -> None:
    key = f"{M}.compute_dtype"
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


def running(settings: Settings) -> None:
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
    settings.same([f"{RUNNER}.sink_mode", f"{RUNNER}.sink_size"], sinking)


def generation(settings: Settings) -> None:
    strategy = "sampling" if settings[f"{M}.do_sample"] else "greedy"
    settings.map(f"{M}.do_sample", {"generate.strategy": strategy})
    longest = min(settings[f"{M}.max_decode_length"], settings[f"{M}.seq_length"])
    settings.map(f"{M}.max_decode_length", {"generate.max_new_tokens": longest})
    settings.ours |= {"generate.rules": "mindformers", "generate.seed": 0}  # their numpy begins at 0 for each text
