"""Kinds of models in Megatron core's args: which keys of ours they are, in both directions."""

from collections.abc import Mapping
from typing import Any

from gptworks import architecture
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.pickle_values import brief

# What changes the computation and has no key here.
_REFUSED = {
    "quick_geglu": "another gate than SiLU",
    "squared_relu": "squared ReLU",
    "num_experts": "experts",
    "apply_layernorm_1p": "norm weights stored minus one",
    "apply_residual_connection_post_layernorm": "the residual taken after the norm",
    "multi_latent_attention": "latent attention",
    "rotary_interleaved": "rotary embeddings of neighbouring pairs",
    "qk_l2_norm": "queries and keys normalised to length one",
    "attention_output_gate": "a gate after attention",
    "no_rope_freq": "layers without positions",
    "window_attn_skip_freq": "a window in some layers only",
    "glu_linear_offset": "an offset beside the gate",
    "activation_func_clamp_value": "clamped activations",
    "mtp_num_layers": "multi-token prediction layers",
    "linear_attention_freq": "linear attention",
}
# Its one kind of scaling beside the linear one has numbers that no argument changes.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}


def read(settings: Mapping[str, Any], where: str) -> dict[str, object]:
    """Our keys that are other than GPT-2's, as its args say; none for a GPT-2."""
    for name, feature in _REFUSED.items():
        if settings.get(name) not in (None, False, 0, 0.0):
            raise CheckpointError(
                f"{where}: its args say {name}={_bare_text(settings[name])}: {feature}, which is not supported."
            )
    values: dict[str, object] = {
        "norm": _one_of(settings, "normalization", _NORMS, "LayerNorm", where),
        "positions": _one_of(settings, "position_embedding_type", _POSITIONS, "learned_absolute", where),
        "mlp": "swiglu" if settings.get("swiglu") else "gelu",
        "sliding_window": _read_window(settings, where),
    }
    if settings.get("use_rotary_position_embeddings"):  # as the position type was asked for in 2023
        values["positions"] = "rope"
    heads, hidden, size = (settings.get(name) for name in ("num_attention_heads", "hidden_size", "kv_channels"))
    if settings.get("group_query_attention") and settings.get("num_query_groups") != heads:
        values["num_kv_heads"] = settings.get("num_query_groups") or 1
    if size is not None and all(type(each) is int for each in (heads, hidden, size)) and heads * size != hidden:
        values["head_size"] = size
    if settings.get("qk_layernorm"):
        if values["norm"] == "layernorm":
            raise CheckpointError(
                f"{where}: its args say qk_layernorm with normalization=LayerNorm; queries and keys have an RMSNorm "
                "here."
            )
        values["qk_norm"] = True
    if values["norm"] == "rmsnorm" and settings.get("add_bias_linear") is False:
        values["bias"] = "qkv" if settings.get("add_qkv_bias") else "none"
    if values["positions"] == "rope":
        values |= _read_rope(settings, where)
    usual = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "sliding_window": 0}
    is_gpt2 = all(usual.get(key) == value for key, value in values.items())
    if not is_gpt2 and values["positions"] != "learned":
        values["max_positions"] = settings.get("max_position_embeddings")
    if values["mlp"] == "swiglu":
        values["gelu"] = "tanh"  # the default, of a layer that has none
    return {} if is_gpt2 else values


def _one_of(settings: Mapping[str, Any], name: str, known: Mapping[str, str], usual: str, where: str) -> str:
    value = settings.get(name) or usual
    if value not in known:
        raise CheckpointError(f"{where}: its args say {name}={_bare_text(value)}; known: {', '.join(known)}.")
    return known[value]


def _bare_text(value: object) -> str:
    return brief(value).strip("'\"")


def _read_window(settings: Mapping[str, Any], where: str) -> int:
    """Theirs is how many tokens before and after itself a token sees."""
    window = settings.get("window_size")
    if window is None:
        return 0
    if isinstance(window, list | tuple) and len(window) == 2 and all(type(each) is int for each in window):
        before, after = window
        if after in (0, -1) and before >= 0:
            return int(before) + 1
        if after in (0, -1) and before == -1:
            return 0
    raise CheckpointError(f"{where}: its args say window_size={_bare_text(window)}; needed (tokens before, 0).")


def _read_rope(settings: Mapping[str, Any], where: str) -> dict[str, object]:
    if settings.get("rotary_percent") not in (None, 1, 1.0):
        raise CheckpointError(
            f"{where}: its args say rotary_percent={_bare_text(settings['rotary_percent'])}: partial rotary embeddings "
            "are not supported."
        )
    values: dict[str, object] = {"rope_theta": settings.get("rotary_base") or 10000}
    stretched, is_llama3 = settings.get("rotary_seq_len_interpolation_factor"), settings.get("use_rope_scaling")
    if stretched and is_llama3:
        raise CheckpointError(
            f"{where}: its args say use_rope_scaling and rotary_seq_len_interpolation_factor={_bare_text(stretched)}; "
            "needed one of them."
        )
    if stretched:
        values["rope_scaling"] = {"type": "linear", "factor": stretched}
    if is_llama3:
        values["rope_scaling"] = {"type": "llama3", "factor": settings.get("rope_scaling_factor") or 8.0, **_LLAMA3}
    return values


def write(model: ModelConfig, tp: int) -> dict[str, object]:
    """The args by which such a model is other than a GPT-2."""
    if not set(architecture.variant(model)) - set(architecture.GPT2):
        return {}
    _require_args_for(model, tp)
    is_shared = model.num_kv_heads != model.num_heads
    scaling = model.rope_scaling
    return {
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position_embedding_type": next(theirs for theirs, ours in _POSITIONS.items() if ours == model.positions),
        "add_position_embedding": model.positions == "learned",
        "rotary_base": int(model.rope_theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling.type == "linear" else None,
        "use_rope_scaling": scaling.type == "llama3",
        "rope_scaling_factor": scaling.factor if scaling.type == "llama3" else 8.0,
        "swiglu": model.mlp == "swiglu",
        "bias_swiglu_fusion": model.mlp == "swiglu",
        "bias_gelu_fusion": model.mlp == "gelu" and model.gelu == "tanh",
        "group_query_attention": is_shared,
        "num_query_groups": model.num_kv_heads if is_shared else 1,
        "qk_layernorm": model.qk_norm,
        "add_bias_linear": model.bias == "all",
        "add_qkv_bias": model.bias == "qkv",
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "tokenizer_type": "HuggingFaceTokenizer",
    }


def _require_args_for(model: ModelConfig, tp: int) -> None:
    scaling, unknown = model.rope_scaling, ""
    if model.norm == "layernorm" and model.bias != "all":
        unknown = f"model.bias: {model.bias} with model.norm: layernorm, whose LayerNorms always have one"
    elif model.norm == "layernorm" and model.qk_norm:
        unknown = "model.qk_norm with model.norm: layernorm, of which queries and keys would have one too"
    elif model.rope_theta != int(model.rope_theta):
        unknown = f"model.rope_theta: {model.rope_theta:g}, which is a whole number there"
    elif scaling.type == "llama3":
        ours = {key: getattr(scaling, key) for key in _LLAMA3}
        ours["original_max_positions"] = ours["original_max_positions"] or model.max_positions
        for key, value in _LLAMA3.items():
            if ours[key] != value:
                unknown = f"model.rope_scaling.{key}: {ours[key]:g}, which is always {value:g} there"
    if unknown:
        raise CheckpointError(f"Megatron core has no args for {unknown}. Nothing was written.")
    # With more ranks than heads of keys and values, rows of QKV are cut wherever that comes out.
    rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    if (model.num_kv_heads % tp and tp % model.num_kv_heads) or rows % tp:
        raise CheckpointError(
            f"--tp {tp}: {model.num_kv_heads} heads of keys and values, {rows} rows of QKV; Megatron core needs a "
            "divisor or a multiple of the former, and a divisor of the latter."
        )
