"""The configuration of a run: one frozen pydantic model per section.

Checks that need one section live in that section; checks that need several live in `contradictions.py`.
An empty value (`key:` or null) always means "the default".
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gptworks.config.generate_section import GenerateConfig as GenerateConfig
from gptworks.config.section import Count, CountOrAuto, CountOrOff, Degree, Probability, Rate, Section

AXES = ("pp", "dp", "fsdp", "tp")  # outermost first


class ModelConfig(Section):
    """The shape of the network. GPT-2 as Hugging Face computes it, with the variations the five systems need.

    >>> ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512, max_positions=128).ffn_size
    256
    """

    num_layers: Count = Field(12, description="Transformer blocks.")
    hidden_size: Count = Field(768, description="Width of the residual stream.")
    num_heads: Count = Field(12, description="Attention heads; must divide hidden_size.")
    ffn_size: Count = Field(
        default_factory=lambda data: 4 * data["hidden_size"],
        description="Width inside the feed-forward layer; empty = 4 x hidden_size.",
    )
    vocab_size: Count = Field(50257, description="Rows of the word embedding; at least the tokenizer's vocabulary.")
    max_positions: Count = Field(1024, description="Longest context; rows of the position embedding.")
    tied: bool = Field(True, description="The output head shares the word embedding.")
    gelu: Literal["tanh", "erf", "sigmoid"] = Field(
        "tanh", description="tanh: GPT-2's approximation; erf: exact; sigmoid: x * sigmoid(1.702 x)."
    )
    attention: Literal["auto", "math"] = Field(
        "auto", description="auto: the fastest kernel torch has; math: softmax(QK)V written out."
    )
    dropout_embed: Probability = Field(0.0, description="Dropout after the embeddings.")
    dropout_hidden: Probability = Field(0.0, description="Dropout after the attention and feed-forward projections.")
    dropout_attention: Probability = Field(0.0, description="Dropout of the attention probabilities.")
    layernorm_eps: Annotated[float, Field(gt=0.0)] = Field(1e-5, description="Epsilon of every LayerNorm.")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelConfig":
        if self.hidden_size % self.num_heads:
            around = range(max(1, self.num_heads - 1000), self.num_heads + 1000)
            divisors = [n for n in [*around, self.hidden_size] if self.hidden_size % n == 0]
            nearest = sorted(set(divisors), key=lambda n: abs(n - self.num_heads))[:2]
            fits = " or ".join(str(n) for n in sorted(nearest))
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide model.hidden_size ({self.hidden_size}). "
                f"Nearest that do: {fits}."
            )
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class InitConfig(Section):
    """Where the weights come from."""

    checkpoint: str = Field("", description="Folder to start from (ours or Hugging Face GPT-2); empty = fresh weights.")
    std: Annotated[float, Field(gt=0.0)] = Field(0.02, description="Standard deviation of fresh weights.")
    residual_scale: Literal["gpt2", "none"] = Field(
        "gpt2", description="gpt2: projections into the residual stream get std / sqrt(2 x num_layers); none: std."
    )


class DataConfig(Section):
    """What is read and how it is cut into samples."""

    path: tuple[str, ...] = Field(
        (),
        description="Prefix, file, folder or pattern (shards/*.bin) of a dataset in any known format, a file or folder "
        "of text of up to 64 MB, or a list.",
    )
    held_out_path: tuple[str, ...] = Field(
        (), description="The same for held-out text of its own; the second share of data.path is then trained on."
    )
    weights: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        (), description="One per path: its share of the samples; empty = in proportion to its size."
    )
    split: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        (949.0, 50.0, 1.0), description="Shares of documents for training, held-out and test."
    )
    seq_len: Count = Field(
        1024, description="Predicted tokens per sample (a window has one more); empty = model.max_positions."
    )
    order: Literal["shuffled", "sequential", "megatron", "paddle", "oneflow"] = Field(
        "shuffled",
        description="Order of the windows within an epoch; a function of train.seed and the sample index. megatron, "
        "paddle, oneflow: the samples of megatron-core, of PaddleNLP and FleetX, or of OneFlow, for a fixed number of "
        "steps.",
    )
    tokenizer: str = Field(
        "",
        description="The tokenizer of stores that do not say which it is, and of text: gpt2, a folder or a file; "
        "chars: the characters of the text.",
    )
    key: str = Field("", description="Key or column of the text, where data.path is text; empty = text.")
    mask_eod: bool = Field(False, description="Do not score what follows an end-of-document token.")
    reset_positions: bool = Field(False, description="Positions start at 0 after each end-of-document token.")
    reset_attention: bool = Field(False, description="Attention does not cross an end-of-document token.")
    too_long: Literal["refuse", "truncate", "skip"] = Field(
        "refuse", description="Prompt/completion examples, and rows that came cut, longer than seq_len + 1."
    )

    @field_validator("path", "held_out_path", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("weights", mode="before")
    @classmethod
    def _one_weight(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("split", mode="before")
    @classmethod
    def _split_from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return tuple(float(part) for part in value.replace("/", ",").split(","))
            except ValueError:
                raise ValueError(f"{value!r} is not a list of numbers such as '949,50,1'") from None
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _lengths_agree(self) -> "DataConfig":
        if self.weights and len(self.weights) != len(self.path):
            raise ValueError(f"weights: {len(self.weights)} weights for {len(self.path)} paths; give one for each.")
        if not 1 <= len(self.split) <= 3 or sum(self.split) <= 0:
            raise ValueError(
                f"split: got {list(self.split)}; needs one to three shares, not all zero, such as '949,50,1'."
            )
        return self


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


class TrainConfig(Section):
    """How long, how verbose, how compiled. The end is one of steps, epochs, tokens."""

    steps: CountOrOff = Field(0, description="Optimizer steps.")
    epochs: Rate = Field(
        0.0, description="Passes over the training split, rounded down to whole batches (at least one)."
    )
    tokens: CountOrOff = Field(0, description="Tokens to train on.")
    seed: Annotated[int, Field(ge=0)] = Field(1234, description="Of weights, sample order and dropout.")
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
    max_skips: Count = Field(100, description="Consecutive skipped steps after which training stops all the same.")
    profile: tuple[int, ...] = Field((), description="[first, last] step of a profiler trace; empty = none.")

    @model_validator(mode="after")
    def _one_end(self) -> "TrainConfig":
        given = {name: value for name, value in self.ends().items() if value}
        if len(given) > 1:
            listed = ", ".join(f"train.{name}={value:g}" for name, value in given.items())
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
    sequence: bool = Field(
        True, description="With tp: what lies between the matrices is split too, along the sequence."
    )
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

    compute: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Type of activations and products.")
    reduce: Literal["fp32", "compute"] = Field(
        "fp32", description="Type in which gradients are summed over data-parallel ranks: fp32, or that of `compute`."
    )
    scaler: ScalerConfig = Field(default_factory=ScalerConfig)


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: CountOrOff = Field(1000, description="Steps between checkpoints; 0 = only at the end.")
    keep_last: Count = Field(3, description="Newest checkpoints that are kept.")
    keep_every: CountOrOff = Field(0, description="Checkpoints at multiples of this step are kept for good; 0 = none.")
    keep_best: bool = Field(False, description="Keep the checkpoint with the lowest held-out loss as `best`.")
    portable: bool = Field(True, description="Write a Hugging Face folder with each checkpoint.")
    asynchronous: bool = Field(False, description="Train on while a copy of the state, in main memory, is written.")


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
    patience: CountOrOff = Field(0, description="Stop after this many evaluations without a new best; 0 = never.")


class RunFolderConfig(Section):
    """Where the run lives and on what it runs."""

    out: str = Field("", description="Run folder; empty = runs/NAME of the config file or preset.")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto = cuda, then mps, then cpu.")
    threads: CountOrOff = Field(0, description="CPU threads; 0 = torch's choice.")


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
