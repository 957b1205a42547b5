"""The families of models that Hugging Face folders hold: names of tensors, and config.json in both directions.

A family is a table of names and two functions. Which one a model of ours belongs to follows from its config: the first
that computes it. (A Mistral without a window is a Llama.)
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptworks import architecture
from gptworks.architecture import ANY
from gptworks.checkpoint.rules import Rule, Table, block_rules
from gptworks.checkpoint.systems.openai_names import openai_rules
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.tokenizer import bundled

Theirs = dict[str, Any]  # config.json


@dataclass(frozen=True)
class Family:
    model_type: str
    class_name: str  # of transformers
    table: Table
    read: Callable[[Theirs, str], dict[str, object]]  # their keys and where they stand -> our model section
    write: Callable[[ModelConfig], Theirs]  # all but the class, the type of numbers and the special tokens
    prefix: str  # of all tensors but the head; files of the model without its head leave it out
    ignored: str  # a pattern of tensors that old files carry, which are no weights
    needs: Mapping[str, Collection[object]] = field(default_factory=dict)  # values of keys that such a model always has
    heads_divide: bool = False  # transformers wants so, also where head_dim is given

    def unmet(self, model: ModelConfig) -> str:
        """What of the model this family does not compute, in words; empty where it computes all."""
        unmet = architecture.unmet(model, self.needs, self.table.known)
        if self.heads_divide and model.hidden_size % model.num_heads:
            unmet += f"{' and ' if unmet else ''}model.num_heads: {model.num_heads} (known: divisors of hidden_size)"
        return unmet

    def rule(self, name: str) -> Rule:
        """For one of our tensors."""
        rules = {rule.ours: rule for rule in self.table.rules}
        if not name.startswith("blocks."):
            return rules[name]
        _, layer, rest = name.split(".", 2)
        return rules[f"blocks.{{i}}.{rest}"].at(int(layer))


# GPT-2

_GELU = {"tanh": "gelu_new", "erf": "gelu", "sigmoid": "quick_gelu"}
_GELU_READ = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "erf",
    "quick_gelu": "sigmoid",
}


def _read_gpt2(theirs: Theirs, where: str) -> dict[str, object]:
    for option in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if theirs.get(option):
            raise CheckpointError(f"{where}: {option} is set, which changes the computation and is not supported.")
    if theirs.get("scale_attn_weights") is False:
        raise CheckpointError(
            f"{where}: scale_attn_weights is off, which changes the computation and is not supported."
        )
    gelu = theirs.get("activation_function", "gelu_new")
    if gelu not in _GELU_READ:
        raise CheckpointError(f"{where}: activation_function {gelu!r}, needed one of {sorted(_GELU_READ)}.")
    return {
        "num_layers": theirs.get("n_layer", 12),
        "hidden_size": theirs.get("n_embd", 768),
        "num_heads": theirs.get("n_head", 12),
        "ffn_size": theirs.get("n_inner"),  # null = 4 x hidden_size, here as there
        "vocab_size": theirs.get("vocab_size", bundled.SIZE),
        "max_positions": theirs.get("n_positions", 1024),
        "tied": theirs.get("tie_word_embeddings", True),
        "gelu": _GELU_READ[gelu],
        "dropout_embed": theirs.get("embd_pdrop", 0.1),
        "dropout_hidden": theirs.get("resid_pdrop", 0.1),
        "dropout_attention": theirs.get("attn_pdrop", 0.1),
        "layernorm_eps": theirs.get("layer_norm_epsilon", 1e-5),
    }


def _write_gpt2(model: ModelConfig) -> Theirs:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "activation_function": _GELU[model.gelu],
        "embd_pdrop": model.dropout_embed,
        "resid_pdrop": model.dropout_hidden,
        "attn_pdrop": model.dropout_attention,
        "layer_norm_epsilon": model.layernorm_eps,
        "tie_word_embeddings": model.tied,
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    # Their matrices are [in, out].
    Table("Hugging Face GPT-2 folder", openai_rules(transposed=("attn.qkv", "attn.out", "mlp.up", "mlp.down"))),
    _read_gpt2,
    _write_gpt2,
    prefix="transformer.",
    ignored=r"\.attn\.(bias|masked_bias)$",  # causal masks
)


# Llama and its kind

_ROPE_KEYS = {  # theirs -> ours
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_ROPE_TYPES: dict[str, tuple[str, ...]] = {  # their keys that count, by type
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": tuple(key for key in _ROPE_KEYS if not key.endswith("freq_factor")),
}
# What such a config.json has where the model is another one than its model_type says.
_OTHER_MODELS = {
    "a mixture of experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    "latent attention": ("kv_lora_rank", "q_lora_rank"),
    "quantized weights": ("quantization_config",),
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def _read_llama_kind(theirs: Theirs, where: str, *, usual: Theirs) -> dict[str, object]:
    """`usual`: what transformers takes for keys that are not there."""
    for feature, keys in _OTHER_MODELS.items():
        for key in keys:
            if theirs.get(key) not in (None, 0):
                raise CheckpointError(f"{where}: {key} is {theirs[key]!r}: {feature}, which is not supported.")
    for key in _REQUIRED:
        if theirs.get(key) is None:
            raise CheckpointError(f"{where}: {key} is missing. Needed: {', '.join(_REQUIRED)}.")
    values = {**usual, **{key: value for key, value in theirs.items() if value is not None}}
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act is {values['hidden_act']!r}, needed 'silu'.")
    heads = values["num_attention_heads"]
    has_own_keys = theirs.get("num_key_value_heads", "usual") is None
    return {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": heads if has_own_keys else values.get("num_key_value_heads", heads),
        "head_size": values.get("head_dim"),  # null = hidden_size / num_heads, here as there
        "ffn_size": values["intermediate_size"],
        "vocab_size": values["vocab_size"],
        "max_positions": values["max_position_embeddings"],
        "tied": values.get("tie_word_embeddings", False),
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "positions": "rope",
        **_read_rope(values, where),
        "bias": "none",
        "layernorm_eps": values.get("rms_norm_eps", 1e-6),
        "dropout_attention": values.get("attention_dropout", 0.0),
    }


def _read_rope(theirs: Theirs, where: str) -> dict[str, object]:
    """transformers 5 has all of it in rope_parameters; before, there were rope_theta and rope_scaling, which it
    prefers where a folder has both."""
    key = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where}: {key} is {rope!r}, needed a JSON object or null.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise CheckpointError(f"{where}: {key}.rope_type is {kind!r}, needed one of {', '.join(_ROPE_TYPES)}.")
    for other in rope.keys() - _ROPE_KEYS.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
        raise CheckpointError(f"{where}: {key}.{other} is not known. Known: {', '.join(_ROPE_KEYS)}.")
    for place, settings in ((key + ".", rope), ("", theirs)):
        if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"{where}: {place}partial_rotary_factor is {settings['partial_rotary_factor']!r}: partial rotary "
                "embeddings are not supported."
            )
    scaling: dict[str, object] = {_ROPE_KEYS[each]: rope.get(each) for each in _ROPE_TYPES[kind]}
    if "original_max_positions" in scaling:  # beside the rest it wins; where nobody says it, the context is the old one
        context = "original_max_position_embeddings"
        scaling["original_max_positions"] = (
            theirs.get(context) or rope.get(context) or theirs["max_position_embeddings"]
        )
    if kind != "default" and scaling["factor"] is None:
        raise CheckpointError(f"{where}: {key}.factor is missing, which {kind} needs.")
    theta = rope.get("rope_theta", theirs.get("rope_theta"))
    return {"rope_theta": theta, "rope_scaling": {"type": "none" if kind == "default" else kind, **scaling}}


def _write_llama_kind(model: ModelConfig) -> Theirs:
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.layernorm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _write_rope(model),
        "attention_dropout": model.dropout_attention,
        "tie_word_embeddings": model.tied,
    }


def _write_rope(model: ModelConfig) -> Theirs | None:
    scaling = model.rope_scaling
    if scaling.type == "none":
        return None
    numbers = {key: getattr(scaling, _ROPE_KEYS[key]) for key in _ROPE_TYPES[scaling.type]}
    if "original_max_position_embeddings" in numbers:
        numbers["original_max_position_embeddings"] = scaling.original_max_positions or model.max_positions
    may_be_left_out = ("attention_factor", "mscale", "mscale_all_dim")
    return {"rope_type": scaling.type} | {
        key: value for key, value in numbers.items() if value or key not in may_be_left_out
    }


def _read_llama(theirs: Theirs, where: str) -> dict[str, object]:
    biases = (bool(theirs.get("attention_bias")), bool(theirs.get("mlp_bias")))
    if biases[0] != biases[1]:
        raise CheckpointError(
            f"{where}: attention_bias is {biases[0]} and mlp_bias is {biases[1]}; needed both or neither."
        )
    values = _read_llama_kind(theirs, where, usual={"max_position_embeddings": 2048})
    return {**values, "bias": "all" if biases[0] else "none"}


def _read_mistral(theirs: Theirs, where: str) -> dict[str, object]:
    values = _read_llama_kind(theirs, where, usual={"max_position_embeddings": 131072, "num_key_value_heads": 8})
    kinds = theirs.get("layer_types") or ["sliding_attention"]
    return {**values, "sliding_window": _window_of_all(theirs, kinds, where, "sliding_window")}


_QWEN_USUAL = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def _read_qwen2(theirs: Theirs, where: str) -> dict[str, object]:
    values = _read_llama_kind(theirs, where, usual=_QWEN_USUAL)
    return {**values, "bias": "qkv", "sliding_window": _qwen_window(theirs, where)}


def _read_qwen3(theirs: Theirs, where: str) -> dict[str, object]:
    if theirs.get("attention_bias"):
        raise CheckpointError(f"{where}: attention_bias is set, which is not supported with norms of queries and keys.")
    values = _read_llama_kind(theirs, where, usual={**_QWEN_USUAL, "head_dim": 128})
    return {**values, "qk_norm": True, "sliding_window": _qwen_window(theirs, where)}


def _qwen_window(theirs: Theirs, where: str) -> object:
    """Theirs may differ from layer to layer, ours not."""
    if not theirs.get("use_sliding_window") or theirs.get("sliding_window", 4096) is None:
        return 0
    layers, plain = theirs["num_hidden_layers"], theirs.get("max_window_layers", 28)
    kinds = theirs.get("layer_types")
    if kinds is None and isinstance(layers, int) and isinstance(plain, int):
        kinds = ["full_attention"] * min(plain, layers) + ["sliding_attention"] * max(0, layers - plain)
    return _window_of_all(theirs, kinds, where, f"use_sliding_window with max_window_layers {plain!r}")


def _window_of_all(theirs: Theirs, kinds: object, where: str, name: str) -> object:
    """`kinds`: of each layer whether it has the window."""
    alike = set(map(str, kinds)) if isinstance(kinds, list) else set()
    if len(alike) != 1 or not alike <= {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{where}: {name} and layer_types {theirs.get('layer_types')!r}: needed sliding_attention in all layers, "
            "or full_attention; others are not supported."
        )
    return theirs.get("sliding_window", 4096) if "sliding_attention" in alike else 0


def _write_qwen(model: ModelConfig) -> Theirs:
    window = model.sliding_window
    return _write_llama_kind(model) | {
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "max_window_layers": 0 if window else model.num_layers,
    }


_MODULES: dict[str, str | tuple[str, ...]] = {
    "attn.qkv": tuple(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
    "attn.out": "model.layers.{i}.self_attn.o_proj",
    "mlp.gate": "model.layers.{i}.mlp.gate_proj",
    "mlp.up": "model.layers.{i}.mlp.up_proj",
    "mlp.down": "model.layers.{i}.mlp.down_proj",
    "ln1": "model.layers.{i}.input_layernorm",
    "ln2": "model.layers.{i}.post_attention_layernorm",
    "attn.q_norm": "model.layers.{i}.self_attn.q_norm",
    "attn.k_norm": "model.layers.{i}.self_attn.k_norm",
}
_SHARED_NEEDS: dict[str, Collection[object]] = {"norm": ("rmsnorm",), "positions": ("rope",), "mlp": ("swiglu",)}


def _llama_kind(
    model_type: str,
    class_name: str,
    read: Callable[[Theirs, str], dict[str, object]],
    write: Callable[[ModelConfig], Theirs],
    needs: Mapping[str, Collection[object]],
) -> Family:
    every = {**_SHARED_NEEDS, "qk_norm": (False,), "bias": ("none",), **needs}
    known = {**every, "tied": (False,), "num_kv_heads": ANY, "head_size": ANY, "sliding_window": ANY}
    table = Table(
        f"Hugging Face {class_name.removesuffix('ForCausalLM')} folder",
        [
            Rule("wte.weight", ("model.embed_tokens.weight",)),
            *block_rules(_MODULES),
            Rule("ln_f.weight", ("model.norm.weight",)),
            Rule("head.weight", ("lm_head.weight",)),
        ],
        known={**known, "rope_scaling": ("linear", "llama3", "yarn")},
    )
    return Family(
        *(model_type, class_name, table, read, write),
        prefix="model.",
        ignored=r"\.rotary_emb\.inv_freq$",
        needs=every,
        heads_divide=model_type == "llama",
    )


LLAMA = _llama_kind(
    "llama",
    "LlamaForCausalLM",
    _read_llama,
    lambda model: _write_llama_kind(model) | {"attention_bias": model.bias == "all", "mlp_bias": model.bias == "all"},
    {"bias": ("none", "all"), "sliding_window": (0,)},
)
MISTRAL = _llama_kind(
    "mistral",
    "MistralForCausalLM",
    _read_mistral,
    lambda model: _write_llama_kind(model) | {"sliding_window": model.sliding_window or None},
    {},
)
QWEN2 = _llama_kind("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen, {"bias": ("qkv",)})
QWEN3 = _llama_kind("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen, {"qk_norm": (True,)})

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)}
KNOWN = architecture.union(family.table.known for family in FAMILIES.values())


def family_of(model: ModelConfig) -> Family:
    """The first that computes such a model."""
    unmet = {name: family.unmet(model) for name, family in FAMILIES.items()}
    for name, family in FAMILIES.items():
        if not unmet[name]:
            return family
    nearest = min(FAMILIES, key=lambda name: unmet[name].count(" and "))
    title = FAMILIES[nearest].table.title
    raise CheckpointError(f"{title} cannot compute what this model asks for: {unmet[nearest]}.")
