"""The configuration of a run: one frozen pydantic model per section.

Checks that need one section live in that section; checks that need several live in `checks.py`.
An empty value (`key:` or null) always means "the default".
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gptworks.config.data_section import DataConfig as DataConfig
from gptworks.config.generate_section import GenerateConfig as GenerateConfig
from gptworks.config.model_section import ModelConfig as ModelConfig
from gptworks.config.model_section import RopeScalingConfig as RopeScalingConfig
from gptworks.config.section import Count, CountOrAuto, CountOrOff, Degree, Probability, Rate, Section

AXES = ("pp", "dp", "fsdp", "tp")  # outermost first


class InitConfig(Section):
    """Where the weights come from."""

    checkpoint: str = Field("", description="Folder to start from (ours or Hugging Face); empty = fresh weights.")
    std: Annotated[float, Field(gt=0.0)] = Field(0.02, description="Standard deviation of fresh weights.")
    residual_scale: Literal["gpt2", "none"] = Field(
        "gpt2", description="gpt2: projections into the residual stream get std / sqrt(2 x num_layers); none: std."
    )


class BatchConfig(Section):
    """global_size = micro_size x accumulation x data-parallel degree. Give any; what is missing is derived. Without
    any of them the batch is one that suits the size of the model; `gptworks config show --origin` shows it."""

    global_size: CountOrOff = Field(
        0,
        description="Samples per optimizer step over all devices; 0 = derived from the other two, else by the size of "
        "the model: 2,048 tokens for tiny ones, 16,384 from 2M parameters in its blocks, 0.5M tokens for GPT-2.",
    )
    micro_size: CountOrOff = Field(
        0,
        description="Samples per forward pass on one device; 0 = derived: all of a global_size that is given, "
        "several per stage of a pipeline.",
    )
    accumulation: CountOrOff = Field(0, description="Forward passes per optimizer step; 0 = derived.")


class OptimConfig(Section):
    """AdamW and the learning rate."""

    lr: Rate = Field(3e-4, description="Highest learning rate.")
    min_lr: Rate = Field(0.0, description="Learning rate at and after decay_steps.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warmup; wsd = warmup, stable, linear cooldown."
    )
    warmup_steps: Rate = Field(0.0, description="Steps of linear warmup; may be a fraction such as 36.5.")
    decay_steps: CountOrOff = Field(0, description="Step at which min_lr is reached; 0 = the last step.")
    cooldown_steps: CountOrOff = Field(0, description="wsd: length of the final descent; 0 = a fifth of decay_steps.")
    warmup_from: Literal[0, 1] = Field(
        1, description="What the schedule's clock shows at the first update; 0 = the first update has rate 0."
    )
    cosine_clock: Literal["after_warmup", "from_start"] = Field(
        "after_warmup", description="Whether the decay begins to count after the warmup or at the start."
    )
    allow_rising_lr: bool = Field(False, description="Accept min_lr above lr.")
    weight_decay: Rate = Field(0.1, description="Decoupled weight decay.")
    decay_params: Literal["weights", "matrices", "all"] = Field(
        "weights",
        description="weights: all but biases and norms; matrices: embeddings are excluded too; all: everything.",
    )
    beta1: Probability = Field(0.9, description="Adam's first decay rate.")
    beta2: Probability = Field(0.95, description="Adam's second decay rate.")
    eps: Annotated[float, Field(gt=0.0)] = Field(1e-8, description="Adam's epsilon.")
    clip: Rate = Field(1.0, description="Largest global gradient norm; 0 = no clipping.")


class GuardConfig(Section):
    """What is done about a step whose loss or gradient norm is far above those of the steps before it, or that has a
    sample whose loss is far from the others or that repeats itself."""

    action: Literal["off", "warn", "skip", "rollback"] = Field(
        "off",
        description="warn: write the step and its samples down; skip: and make no update; rollback: and go back to the "
        "last good checkpoint, passing over all samples since then. Numbers that are not finite go the same way unless "
        "train.nonfinite is skip.",
    )
    window: Annotated[int, Field(ge=4)] = Field(
        64, description="Good steps that median and deviation are taken of; nothing is judged before there are so many."
    )
    loss_z: Rate = Field(6.0, description="Deviations above the median from which on a loss is bad; 0 = not judged.")
    grad_norm_z: Rate = Field(
        8.0, description="The same for the logarithm of the gradient norm before clipping; 0 = not judged."
    )
    sample_high_z: Rate = Field(
        11.0,
        description="The same for how far the highest loss of a sample lies above the median of its batch; 0 = not "
        "judged.",
    )
    sample_low_z: Rate = Field(
        12.0, description="The same for how far the lowest one lies below it: tables and lists are easy, too."
    )
    variety: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.25,
        description="Share of the usual variety of tokens below which a sample is bad, since it repeats itself; 0 = "
        "not judged.",
    )
    max_rollbacks: CountOrOff = Field(3, description="Rollbacks of a run after which it stops instead.")


class TrainConfig(Section):
    """How long, how verbose, how compiled. The end is one of steps, epochs, tokens."""

    steps: CountOrOff = Field(0, description="Optimizer steps.")
    epochs: Rate = Field(
        0.0, description="Passes over the training split, rounded down to whole batches (at least one)."
    )
    tokens: CountOrOff = Field(0, description="Tokens to train on.")
    seed: Annotated[int, Field(ge=0)] = Field(1234, description="Seed of weights, sample order and dropout.")
    log_every: Count = Field(10, description="Steps between log lines.")
    log_style: Literal["gptworks", "fleetx"] = Field("gptworks", description="Form of the log lines.")
    compile: bool = Field(False, description="Compile each block with torch.compile.")
    recompute: Literal["none", "full", "full_attn", "core_attn"] = Field(
        "none", description="What is computed again in the backward pass instead of being kept."
    )
    check_memory: Literal["warn", "refuse", "off"] = Field(
        "warn", description="What to do before the first step when the plan says that memory will not be enough."
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="What to do when a loss or a gradient is not finite."
    )
    guard: GuardConfig = Field(default_factory=GuardConfig)
    max_skips: Count = Field(100, description="Consecutive skipped steps after which training stops all the same.")
    sample_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Beginnings of texts that the model continues at each evaluation; kept in texts.jsonl."
    )
    sample_tokens: Count = Field(64, description="Longest such text, in tokens.")
    profile: tuple[int, ...] = Field((), description="[first, last] step of a profiler trace; empty = none.")

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_end(self) -> "TrainConfig":
        ends = {name: value for name, value in self.ends().items() if value}
        if len(ends) > 1:
            listed = ", ".join(f"train.{name}={value:g}" for name, value in ends.items())
            raise ValueError(f"steps: several ends are given ({listed}). Keep one of them.")
        if self.profile and (len(self.profile) != 2 or not 1 <= self.profile[0] <= self.profile[1]):
            raise ValueError(f"profile: got {list(self.profile)}; needs [first, last] with 1 <= first <= last.")
        if self.profile and self.steps and self.profile[1] > self.steps:
            raise ValueError(f"profile: step {self.profile[1]} is after the last one (train.steps={self.steps}).")
        return self

    def ends(self) -> dict[str, float]:
        return {"steps": self.steps, "epochs": self.epochs, "tokens": self.tokens}


class ParallelConfig(Section):
    """How many processes in each direction; the product is the number of processes. One of the four may be `auto`."""

    pp: Degree = Field(1, description="Pipeline stages of processes, or auto: what the others leave.")
    dp: Degree = Field(1, description="Replicas, or auto.")
    fsdp: Degree = Field(1, description="Shards of what zero says; each reads samples of its own. Or auto.")
    tp: Degree = Field(1, description="Tensor-parallel parts, or auto.")
    sequence: bool = Field(True, description="With tp: the part between the matrices is split too, along the sequence.")
    zero: Literal[0, 1, 2, 3] = Field(
        default_factory=lambda data: _usual_zero(data),
        description="What is sharded over fsdp: 1 the optimizer, 2 gradients too, 3 parameters too; 0 nothing. "
        "Empty = 3, with pp 1 (stage 3 gathers the parameters again for every micro-batch); without fsdp 0.",
    )
    offload: bool = Field(
        False, description="Keep the shards of parameters and optimizer in the memory of the CPU, and update there."
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="With pp: the order of forward and backward passes."
    )
    virtual_stages: Count = Field(1, description="Stages per process; above 1 for interleaved and zero_bubble.")
    timeout: Count = Field(600, description="Seconds after which a process that waits for the others gives up.")

    @model_validator(mode="after")
    def _one_auto(self) -> "ParallelConfig":
        autos = [axis for axis in AXES if getattr(self, axis) == "auto"]
        if len(autos) > 1:
            raise ValueError(f"{autos[1]}: auto, but parallel.{autos[0]} is auto too. Say a number for one of them.")
        return self


def _usual_zero(data: dict[str, Any]) -> Literal[0, 1, 3]:
    if data.get("fsdp", 1) == 1:
        return 0
    return 3 if data.get("pp", 1) == 1 else 1


class ScalerConfig(Section):
    """Dynamic loss scaling; used with precision.compute: fp16 only."""

    init: Annotated[float, Field(gt=0.0)] = Field(65536.0, description="Loss scale at the start.")
    growth: Annotated[float, Field(ge=1.0)] = Field(2.0, description="Factor after `window` good steps.")
    backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="Factor after `hysteresis` bad steps.")
    window: Count = Field(1000, description="Good steps in a row before the scale grows.")
    hysteresis: Count = Field(1, description="Bad steps before the scale shrinks.")
    refill: Literal["good_step", "growth"] = Field(
        "good_step",
        description="What makes hysteresis count anew: a good step or a shrink (Paddle), or only a growth (Megatron).",
    )
    floor: Annotated[float, Field(gt=0.0)] = Field(1.0, description="The scale never falls below this.")


class PrecisionConfig(Section):
    """Parameters are always fp32 masters; this is what the matrices are multiplied in."""

    compute: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type of activations and products; bf16 on some CPUs that of products alone."
    )
    reduce: Literal["fp32", "compute"] = Field(
        "fp32", description="Type in which gradients are summed over data-parallel ranks: fp32, or that of `compute`."
    )
    scaler: ScalerConfig = Field(default_factory=ScalerConfig)


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: CountOrOff = Field(1000, description="Steps between checkpoints; 0 = only at the end.")
    every_minutes: Rate = Field(0.0, description="Minutes after which there is a checkpoint in any case; 0 = off.")
    keep_last: Count = Field(3, description="Newest checkpoints that are kept.")
    keep_every: CountOrOff = Field(0, description="Checkpoints at multiples of this step are kept for good; 0 = none.")
    keep_best: bool = Field(False, description="Keep the checkpoint with the best `best_by` as `best`.")
    best_by: str = Field(
        "held_out_loss",
        description="What is best, also for evaluate.patience: the lowest held_out_loss, or a number of evaluate.tasks "
        "such as lambada_accuracy.",
    )
    portable: bool = Field(True, description="Write a Hugging Face folder with each checkpoint.")
    asynchronous: bool = Field(False, description="Continue training while a copy of the state in memory is written.")


class EvaluateConfig(Section):
    """Evaluation on the held-out split during training."""

    every: CountOrAuto = Field(
        "auto",
        description="Steps between evaluations; 0 = none; auto = a tenth of the run, but not below train.log_every, "
        "where something is held out.",
    )
    batches: CountOrOff = Field(
        10, description="Batches of batch.global_size samples per evaluation; 0 = the whole split."
    )
    tasks: tuple[str, ...] = Field(
        (), description="Tasks of `gptworks eval` that are measured at each evaluation, too."
    )
    task_data: tuple[str, ...] = Field((), description="The file of each of them.")
    task_protocols: tuple[str, ...] = Field(
        (), description="The protocol of each of them; '' or nothing at all = the task's first."
    )
    task_limit: CountOrOff = Field(0, description="Only so many passages or windows of each; 0 = all.")
    patience: CountOrOff = Field(0, description="Stop after this many evaluations without a new best; 0 = never.")

    @field_validator("tasks", "task_data", "task_protocols", mode="before")
    @classmethod
    def _one_task(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _each_task_has_data(self) -> "EvaluateConfig":
        if len(self.tasks) != len(self.task_data):
            raise ValueError(
                f"task_data: {len(self.task_data)} files for {len(self.tasks)} tasks; give one for each, in order."
            )
        if self.task_protocols and len(self.task_protocols) != len(self.tasks):
            raise ValueError(
                f"task_protocols: {len(self.task_protocols)} for {len(self.tasks)} tasks; give one for each, in order "
                "('' for a task's first), or none."
            )
        return self


class RunFolderConfig(Section):
    """Where the run lives and on what it runs."""

    out: str = Field("", description="Run folder; empty = runs/NAME of the config file or preset.")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto = cuda, then mps, then cpu.")
    threads: CountOrOff = Field(0, description="CPU threads; 0 = torch's choice.")
    track: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), description="Programs that get each line of metrics.jsonl too; empty = tensorboard where it is installed."
    )
    project: str = Field("gptworks", description="The name under which wandb, mlflow and trackio list the run.")

    @field_validator("track", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RunConfig(Section):
    """Everything a run needs. Built by `config.load`, never changed afterwards."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    init: InitConfig = Field(default_factory=InitConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    run: RunFolderConfig = Field(default_factory=RunFolderConfig)


Section.whole = RunConfig


def editor_schema() -> dict[str, Any]:
    """JSON schema of a YAML file: also what `load` accepts beyond the sections themselves."""
    schema = RunConfig.model_json_schema()
    names = {"type": "array", "items": {"type": "string"}}
    text = {"type": "string"}
    schema["properties"] |= {"base": {"anyOf": [text, names]}, "preset": text}
    data = schema["$defs"]["DataConfig"]["properties"]
    for key in ("path", "split", "weights"):  # a single one needs no brackets
        data[key] = {"anyOf": [data[key], text if key == "path" else {"type": ["string", "number"]}]}
    for section in schema["$defs"].values():  # an empty value means the default
        section["properties"] = {k: {"anyOf": [v, {"type": "null"}]} for k, v in section["properties"].items()}
    return schema
