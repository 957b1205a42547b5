"""The configuration of a run: one frozen pydantic model per section.

Checks that need one section live in that section; checks that need several live in `contradictions.py`.
An empty value (`key:` or null) always means "the default".
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from gptworks.errors import ConfigError

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0, description="0 = off")]
Rate = Annotated[float, Field(ge=0.0)]


def _whole_or_auto(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("needs a whole number of 1 or more, or auto")
    return value


def _count_or_auto(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError("needs a whole number of 0 or more, or auto")
    return value


CountOrAuto = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_count_or_auto)]
Degree = Annotated[Count | Literal["auto"], BeforeValidator(_whole_or_auto)]
AXES = ("pp", "dp", "fsdp", "tp")  # outermost first


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _SectionType
else:

    class _SectionType(type(BaseModel)):
        def __call__(cls, *args: Any, **values: Any) -> Any:
            """A section that a Python program makes by hand is refused in the same words as one in a file."""
            if args:
                shown = ", ".join(repr(value) for value in args)
                first = next(iter(cls.model_fields))
                raise ConfigError(
                    cls.__name__, [f"got {shown} without a name; needs keywords, such as {cls.__name__}({first}=...)."]
                )
            try:
                return super().__call__(**values)
            except ValidationError as error:
                from gptworks.config.load import explain

                raise ConfigError(cls.__name__, [problem for _, problem in explain(cls.section(), error)]) from None


class Section(BaseModel, metaclass=_SectionType):
    # strict: "12" is not a number and 1 is not true; YAML has already told them apart.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    @classmethod
    def section(cls) -> str:
        """Its name in a file."""
        sections = {field.annotation: name for name, field in RunConfig.model_fields.items()}
        return sections.get(cls, cls.__name__.removesuffix("Config").lower())

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            type(self).__name__,
            [
                f"{self.section()}.{name}: cannot be set to {value!r}: a configuration does not change. Make another "
                f"one, such as {type(self).__name__}(**{{**dict(config), {name!r}: {value!r}}})."
            ],
        )

    def __delattr__(self, name: str) -> None:
        raise ConfigError(
            type(self).__name__, [f"{self.section()}.{name}: cannot be deleted: a configuration does not change."]
        )

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, values: Any) -> Any:
        """YAML has lists where we keep tuples, and people write whole numbers as 3e11."""
        if not isinstance(values, dict):
            return values
        converted = {}
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if isinstance(value, list):
                value = tuple(value)
            elif isinstance(value, float) and field is not None and field.annotation is int and value.is_integer():
                value = int(value)
            converted[name] = value
        return converted


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


class GenerateConfig(Section):
    """How text is drawn from the model."""

    strategy: Literal["greedy", "sampling", "beam"] = Field(
        "sampling", description="greedy: the likeliest token each time; beam: search for the likeliest text."
    )
    max_new_tokens: Count = Field(
        64, description="Tokens to generate; with `rules: mindformers` those of the prompt are counted too."
    )
    min_new_tokens: CountOrOff = Field(0, description="No end of document before this many; 0 = it may come at once.")
    ignore_eod: bool = Field(False, description="Go on after an end of document, which is then text like any other.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Texts that end a generation; neither they nor what follows is given out."
    )
    window: Literal["refuse", "slide"] = Field(
        "refuse",
        description="Text longer than model.max_positions: an error, or each token is predicted from the last "
        "max_positions tokens, read anew.",
    )
    rules: Literal["huggingface", "paddle", "mindformers"] = Field(
        "huggingface", description="Whose order of operations, penalties and scores."
    )
    temperature: Annotated[float, Field(ge=1e-5)] = Field(1.0, description="sampling: logits are divided by this.")
    top_k: CountOrOff = Field(0, description="sampling: keep the k likeliest tokens; 0 = all.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="sampling: keep the likeliest tokens up to this mass."
    )
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="sampling: keep tokens at least this many times as likely as the likeliest; 0 = off."
    )
    typical_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="sampling: keep the tokens nearest to the expected surprise up to this mass; 1 = off."
    )
    repetition_penalty: Annotated[float, Field(ge=1e-5)] = Field(
        1.0, description="Logits of tokens already in prompt or text: positive ones divided, negative ones multiplied."
    )
    presence_penalty: float = Field(0.0, description="Subtracted from the logit of every generated token.")
    frequency_penalty: float = Field(0.0, description="The same, times how often it was generated.")
    no_repeat_ngram: CountOrOff = Field(0, description="No sequence of this many tokens twice; 0 = off.")
    logit_bias: tuple[str, ...] = Field(
        (), description="ID:BIAS, such as 198:-2.5, added to the logit of that token; -inf forbids it."
    )
    num_return_sequences: Count = Field(1, description="sampling, beam: texts per prompt.")
    best_of: CountOrOff = Field(
        0, description="sampling: draw this many, give out those with the highest mean log-probability; 0 = off."
    )
    num_beams: Count = Field(1, description="beam: texts followed at the same time; 2 or more.")
    length_penalty: float = Field(1.0, description="beam: scores are divided by length to this power.")
    early_stopping: Literal[True, False, "never"] = Field(
        False,
        description="beam: true ends with num_beams finished texts; false when none is likely to get better; "
        "never when none can.",
    )
    num_beam_groups: Count = Field(1, description="beam: groups that avoid each other's tokens; divides num_beams.")
    diversity_penalty: Rate = Field(
        0.0, description="beam: subtracted for each time an earlier group took the same token in this step."
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        1234, description="Of the random draws; a command or call that gives none (or this default) draws anew."
    )

    @field_validator("stop", "logit_bias", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("temperature", mode="before")
    @classmethod
    def _above_zero(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError("needs a number above 0; for the likeliest token each time use strategy: greedy")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _ids_and_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ids = [_bias(text)[0] for text in value]
        twice = next((number for number in ids if ids.count(number) > 1), None)
        if twice is not None:
            raise ValueError(f"token {twice} has two biases; give one")
        return value

    @property
    def biases(self) -> dict[int, float]:
        return dict(_bias(text) for text in self.logit_bias)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "GenerateConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: {self.min_new_tokens} is above generate.max_new_tokens ({self.max_new_tokens})."
            )
        problem = self._beam_problem() or self._count_problem() or self._rules_problem()
        if problem:
            raise ValueError(problem)
        return self

    def _beam_problem(self) -> str:
        if self.strategy == "beam":
            if self.num_beams < 2:
                return f"num_beams: {self.num_beams}, but generate.strategy is beam. Set num_beams to 2 or more."
            if self.num_beams % self.num_beam_groups:
                return f"num_beam_groups: {self.num_beam_groups} does not divide generate.num_beams ({self.num_beams})."
            if (self.num_beam_groups > 1) != (self.diversity_penalty > 0):
                return (
                    f"diversity_penalty: {self.diversity_penalty:g} with generate.num_beam_groups: "
                    f"{self.num_beam_groups}. Groups need a penalty above 0, and a penalty needs 2 groups or more."
                )
            return ""
        for name, off in (("num_beams", 1), ("num_beam_groups", 1), ("diversity_penalty", 0)):
            if getattr(self, name) != off:
                return (
                    f"{name}: {getattr(self, name):g} needs strategy: beam, got {self.strategy}. "
                    f"Set strategy: beam, or {name}: {off}."
                )
        return ""

    def _count_problem(self) -> str:
        """Several texts of one prompt."""
        if self.best_of and self.strategy != "sampling":
            return f"best_of: {self.best_of} needs strategy: sampling, got {self.strategy}. Set best_of: 0."
        most = {"greedy": 1, "sampling": self.best_of, "beam": self.num_beams}[self.strategy]
        if most and self.num_return_sequences > most:
            why = {"greedy": "greedy has one", "sampling": f"best_of draws {most}", "beam": f"there are {most} beams"}
            return (
                f"num_return_sequences: {self.num_return_sequences}, but {why[self.strategy]}. Ask for at most {most}."
            )
        return ""

    def _rules_problem(self) -> str:
        """A setting that the system whose rules are asked for does not have."""
        if self.rules == "huggingface":
            return ""
        missing = ["min_p", "typical_p", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "logit_bias"]
        missing += ["num_beam_groups"]
        if self.rules == "mindformers":
            missing += ["temperature", "min_new_tokens"]
            if self.strategy == "beam":
                return "strategy: beam, but generate.rules: mindformers has none. Use greedy or sampling."
        for name in missing:
            if getattr(self, name) != GenerateConfig.model_fields[name].default:
                return f"{name}: is set, but generate.rules: {self.rules} has no such setting. Leave one of them out."
        if self.early_stopping == "never":
            return f"early_stopping: never, but generate.rules: {self.rules} knows only true and false."
        return ""


def _bias(text: str) -> tuple[int, float]:
    """'198:-2.5' as (198, -2.5)."""
    number, _, bias = text.partition(":")
    try:
        token, value = int(number), float(bias)
    except ValueError:
        token, value = -1, 0.0
    if token < 0 or not value < 1e30:
        raise ValueError(f"{text!r} is not ID:BIAS, a token id and a number such as '198:-2.5'")
    return token, value


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
