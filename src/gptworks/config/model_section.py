"""The section `model`: which decoder it is. Defaults are GPT-2's.

What contradicts itself is said all at once: each check gives its complaints, one line for each key.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gptworks.config.section import Count, CountOrOff, Probability, Rate, Section

Positive = Annotated[float, Field(gt=0.0)]


class RopeScalingConfig(Section):
    """How rotary positions are stretched to a context that is longer than the one they were trained for, with the
    numbers of Hugging Face's `rope_scaling`."""

    type: Literal["none", "linear", "llama3", "yarn"] = Field(
        "none", description="linear: all frequencies divided by `factor`; llama3, yarn: the low ones only."
    )
    factor: Annotated[float, Field(ge=1.0)] = Field(1.0, description="How many times longer the context becomes.")
    original_max_positions: CountOrOff = Field(
        0, description="llama3, yarn: the context before it; 0 = model.max_positions."
    )
    low_freq_factor: Positive = Field(
        1.0, description="llama3: wavelengths above original_max_positions / this are divided by `factor`."
    )
    high_freq_factor: Positive = Field(4.0, description="llama3: wavelengths below original_max_positions / this stay.")
    beta_fast: Positive = Field(32.0, description="yarn: what turns more often than this in the old context stays.")
    beta_slow: Positive = Field(1.0, description="yarn: what turns less often than this is divided by `factor`.")
    attention_factor: Rate = Field(
        0.0, description="yarn: what queries and keys are multiplied by; 0 = 0.1 ln(factor) + 1, or by the mscales."
    )
    mscale: Rate = Field(
        0.0, description="yarn: with mscale_all_dim, their ratio gives the attention factor; 0 = none."
    )
    mscale_all_dim: Rate = Field(0.0, description="yarn: see mscale.")
    truncate: bool = Field(True, description="yarn: the two borders are rounded to whole frequencies.")


_OF_TYPE = {  # beside `type`
    "none": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_positions", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        *("factor", "original_max_positions", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    },
}


class ModelConfig(Section):
    """The shape of the network: GPT-2 as Hugging Face computes it, with the variations that other systems need, or with
    other keys a Llama, Mistral, Qwen or SmolLM.

    >>> ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512, max_positions=128).ffn_size
    256
    """

    num_layers: Count = Field(12, description="Transformer blocks.")
    hidden_size: Count = Field(768, description="Width of the residual stream.")
    num_heads: Count = Field(12, description="Attention heads; must divide hidden_size, unless head_size is given.")
    num_kv_heads: Count = Field(
        default_factory=lambda data: data["num_heads"],
        description="Heads of keys and values, which groups of attention heads share; empty = num_heads.",
    )
    head_size: Count = Field(
        default_factory=lambda data: max(1, data["hidden_size"] // data["num_heads"]),
        description="Width of a head; empty = hidden_size / num_heads.",
    )
    mlp: Literal["gelu", "swiglu"] = Field(
        "gelu", description="gelu: down(gelu(up(x))); swiglu: down(silu(gate(x)) * up(x))."
    )
    ffn_size: Count = Field(
        default_factory=lambda data: usual_ffn_size(data["hidden_size"], data["mlp"]),
        description="Width inside the feed-forward layer; empty = 4 x hidden_size, with swiglu 8/3 of it, rounded up "
        "to a multiple of 64.",
    )
    vocab_size: Count = Field(50257, description="Rows of the word embedding; at least the tokenizer's vocabulary.")
    max_positions: Count = Field(1024, description="Longest context; rows of the position embedding if it is learned.")
    positions: Literal["learned", "rope", "none"] = Field(
        "learned", description="learned: an embedding that is added; rope: queries and keys are rotated; none: neither."
    )
    rope_theta: Annotated[float, Field(gt=1.0)] = Field(10000.0, description="rope: base of the wavelengths.")
    rope_scaling: RopeScalingConfig = Field(
        default_factory=RopeScalingConfig,
        description="rope: how positions are stretched to a longer context, such as {type: linear, factor: 4.0}.",
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="The norm before each layer.")
    bias: Literal["all", "qkv", "none"] = Field(
        "all", description="all: every matrix of a block and every LayerNorm has one; qkv: only queries, keys, values."
    )
    qk_norm: bool = Field(False, description="RMSNorm over each head of queries and keys, before they are rotated.")
    sliding_window: CountOrOff = Field(
        0, description="How many tokens a token sees, itself and those before it; 0 = all."
    )
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
    layernorm_eps: Positive = Field(1e-5, description="Epsilon of every LayerNorm and RMSNorm.")

    @model_validator(mode="after")
    def _holds_together(self) -> "ModelConfig":
        if complaints := [*_about_heads(self), *_about_positions(self), *_about_gates(self)]:
            raise ValueError("\n".join(complaints))
        return self

    @property
    def heads_per_kv(self) -> int:
        """How many attention heads share a head of keys and values."""
        return self.num_heads // self.num_kv_heads


def usual_ffn_size(hidden_size: int, mlp: str) -> int:
    """Three matrices of a gated layer have as many numbers as two of 4 x hidden_size."""
    return 4 * hidden_size if mlp == "gelu" else -(-8 * hidden_size // (3 * 64)) * 64


def _about_heads(model: ModelConfig) -> Iterator[str]:
    if "head_size" not in model.model_fields_set and model.hidden_size % model.num_heads:
        fits = " or ".join(str(n) for n in _nearest_divisors(model.hidden_size, model.num_heads))
        yield (
            f"num_heads: {model.num_heads} does not divide model.hidden_size ({model.hidden_size}). "
            f"Nearest that do: {fits}."
        )
    if model.num_heads % model.num_kv_heads:
        fits = " or ".join(str(n) for n in _nearest_divisors(model.num_heads, model.num_kv_heads))
        yield (
            f"num_kv_heads: {model.num_kv_heads} does not divide model.num_heads ({model.num_heads}), which share "
            f"them in equal groups. Nearest that do: {fits}."
        )


def _about_positions(model: ModelConfig) -> Iterator[str]:
    scaling = model.rope_scaling
    if model.positions == "rope":
        if model.head_size % 2:
            yield (
                f"head_size: {model.head_size} is odd, and model.positions: rope turns pairs of numbers. Needed: an "
                "even one."
            )
    else:
        for key, value, usual in (
            ("rope_theta", model.rope_theta, _default("rope_theta")),
            ("rope_scaling.type", scaling.type, "none"),
        ):
            if value != usual:
                yield (
                    f"{key}: {value}, but model.positions is {model.positions}. Set model.positions: rope, or leave "
                    "it out."
                )
    for key, field in RopeScalingConfig.model_fields.items():
        value = getattr(scaling, key)
        if key != "type" and key not in _OF_TYPE[scaling.type] and value != field.default:
            kinds = " or ".join(kind for kind, keys in _OF_TYPE.items() if key in keys)
            yield f"rope_scaling.{key}: {value}, but model.rope_scaling.type is {scaling.type}. It belongs to {kinds}."
    if scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            f"rope_scaling.low_freq_factor: {scaling.low_freq_factor:g} is not below high_freq_factor "
            f"({scaling.high_freq_factor:g})."
        )
    if scaling.type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        yield f"rope_scaling.beta_slow: {scaling.beta_slow:g} is not below beta_fast ({scaling.beta_fast:g})."


def _about_gates(model: ModelConfig) -> Iterator[str]:
    if model.mlp != "gelu" and model.gelu != _default("gelu"):
        yield f"gelu: {model.gelu}, but model.mlp is {model.mlp}, which has none. Set model.mlp: gelu, or leave it out."


def _default(key: str) -> Any:
    return ModelConfig.model_fields[key].default


def _nearest_divisors(whole: int, number: int) -> list[int]:
    around = range(max(1, number - 1000), number + 1000)
    divisors = {n for n in [*around, whole] if whole % n == 0}
    return sorted(sorted(divisors, key=lambda n: (abs(n - number), n))[:2])
