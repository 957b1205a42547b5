"""A checkpoint of Megatron opened by what its args say, and what they may not say of a GPT-2."""

from collections.abc import Mapping
from typing import Any

import torch

from gptworks.checkpoint.rules import (
    Table,
    compare_copies,
    conflicts_with,
    infer_model,
    match,
    other_head,
    zero_biases,
)
from gptworks.checkpoint.systems.contract import Opened, model_config, tokenizer_folder, unknown_classes
from gptworks.checkpoint.systems.megatron_folder import PADDING, Loaded, folders_of, one_of_many
from gptworks.errors import CheckpointError
from gptworks.pickle_values import brief
from gptworks.tokenizer import bundled

_QUOTES = "'\""
_REFUSED = {
    "swiglu": "gated feed-forward layers (SwiGLU)",
    "quick_geglu": "gated feed-forward layers",
    "squared_relu": "squared ReLU",
    "num_experts": "experts",
    "use_rotary_position_embeddings": "rotary positions",
    "apply_layernorm_1p": "LayerNorm weights stored minus one",
    "apply_residual_connection_post_layernorm": "the residual taken after the LayerNorm",
    "qk_layernorm": "normalised queries and keys",
    "multi_latent_attention": "latent attention",
    "window_size": "attention within a window",
}


def require_gpt2(loaded: Loaded, table: Table) -> None:
    """Stop where args or shapes are of another network."""
    settings = loaded.settings or {}
    _require_gpt2_args(settings, str(loaded.path))
    _require_gpt2_shapes(loaded, table, biases=settings.get("add_bias_linear") is not False)


def open_with(
    loaded: Loaded,
    system: str,
    table: Table,
    kind: Mapping[str, object],
    overrides: Mapping[str, object],
    about: dict[str, Any],
) -> Opened:
    """`kind`: our keys by which the model is another than GPT-2, as the args say."""
    where = str(loaded.path)
    settings = loaded.settings or {}
    known = {**_numbers(settings), "tied": _is_tied(loaded, table, overrides), **kind}
    values = infer_model(table, loaded.tensors, known, overrides, where)
    layers = settings.get("num_layers")
    if type(layers) is int and layers != values["num_layers"]:
        raise CheckpointError(
            f"{where}: has {values['num_layers']} layers, and its args say num_layers {layers}. {one_of_many(loaded)}"
        )
    model = model_config(values, where)
    remarks = unknown_classes(loaded.unknown)
    # Their LayerNorms have biases all the same; a norm of another kind has none.
    if settings.get("add_bias_linear") is False and model.norm == "layernorm":
        for shard in loaded.tensors:
            shard.update(zero_biases(table, shard, model, ranks=loaded.tp))
        remarks.append("trained without biases (args.add_bias_linear is off): biases of zero, which compute the same")
    if (
        settings.get("tokenizer_type") == "GPT2BPETokenizer"
        and bundled.SIZE < model.vocab_size < bundled.SIZE + PADDING
    ):
        remarks.append(
            f"the vocabulary is GPT-2's of {bundled.SIZE:,}, padded to {model.vocab_size:,}; converting with "
            f"-o model.vocab_size={bundled.SIZE} leaves the padding out"
        )
    matched = match(table, loaded.tensors, model)
    remarks += compare_copies(table, loaded.tensors, model, where)
    if model.tied and (problem := other_head(table, loaded.tensors)):
        matched.misshapen.insert(0, problem)
    numbered = {"step": loaded.step} if loaded.step is not None else {}
    return Opened(
        loaded.path,
        system,
        model,
        matched,
        about={**numbered, "layout": f"tp{loaded.tp}.pp{loaded.pp}", **about},
        files=loaded.files,
        tokenizer=tokenizer_folder(*folders_of(loaded.path)),
        remarks=remarks,
        conflicts=conflicts_with(known if loaded.settings is not None else {}, overrides),
    )


def _require_gpt2_args(settings: Mapping[str, Any], where: str) -> None:
    refused = [(name, reason) for name, reason in _REFUSED.items() if settings.get(name) not in (None, False)]
    if settings.get("normalization", "LayerNorm") != "LayerNorm":
        refused.append(("normalization", "another norm than LayerNorm"))
    if settings.get("position_embedding_type", "learned_absolute") in ("rope", "rotary", "alibi", "relative", "none"):
        refused.append(("position_embedding_type", "positions that are not learned"))
    heads, groups = settings.get("num_attention_heads"), settings.get("num_query_groups")
    if settings.get("group_query_attention") and groups != heads:
        refused.append(("num_query_groups", f"heads in groups ({heads} heads)"))
    channels, hidden = settings.get("kv_channels"), settings.get("hidden_size")
    sizes = [each for each in (channels, heads, hidden) if type(each) is int]
    if len(sizes) == 3 and sizes[0] * sizes[1] != sizes[2]:
        refused.append(("kv_channels", f"{heads} heads of a size that does not make up hidden_size {hidden}"))
    if refused:
        name, reason = refused[0]
        raise CheckpointError(
            f"{where}: its args say {name}={brief(settings[name]).strip(_QUOTES)}: {reason}. A GPT-2 has none of "
            "that, and the weights would compute something else."
        )


def _require_gpt2_shapes(loaded: Loaded, table: Table, *, biases: bool) -> None:
    """Says what a network is instead, where a list of missing tensors would leave that to be guessed."""
    first, where = loaded.tensors[0], loaded.path
    names = {rule.ours: rule.at(0).theirs[0] for rule in table.rules}
    layer = {kind: first.get(names[f"blocks.{{i}}.{kind}"]) for kind in ("attn.qkv.weight", "attn.out.weight")}
    layer |= {kind: first.get(names[f"blocks.{{i}}.{kind}"]) for kind in ("mlp.up.weight", "mlp.down.weight")}
    if any(each is None or len(each.shape) != 2 for each in layer.values()):
        return  # the first layer is not here: what is missing will be listed
    qkv, out, up, down = (torch.Size(each.shape) for each in layer.values() if each is not None)
    hidden = out[0]
    if out[1] and hidden != out[1] * loaded.tp and hidden % out[1] == 0:
        raise CheckpointError(
            f"{where}: cut for {hidden // out[1]} tensor-parallel ranks, and {loaded.tp} of them "
            f"{'is' if loaded.tp == 1 else 'are'} here. {one_of_many(loaded)}"
        )
    if names["wte.weight"] in first and names["wpe.weight"] not in first:
        raise CheckpointError(f"{where}: no learned positions in it (they may be rotary): not a GPT-2.")
    if qkv[0] != 3 * out[1]:
        raise CheckpointError(
            f"{where}: its QKV has {qkv[0]} rows, needed {3 * out[1]}: heads in groups, which a GPT-2 has not."
        )
    if up[0] == 2 * down[1]:
        raise CheckpointError(f"{where}: its feed-forward layers are gated (SwiGLU), which those of a GPT-2 are not.")
    if biases and names["blocks.{i}.ln1.weight"] in first and names["blocks.{i}.ln1.bias"] not in first:
        raise CheckpointError(f"{where}: its norms have no bias (RMSNorm), where a GPT-2 has LayerNorm.")


def _numbers(settings: Mapping[str, Any]) -> dict[str, object]:
    """What no shape tells."""
    numbers: dict[str, object] = {}
    for ours, theirs in {
        "num_heads": ("num_attention_heads",),
        "layernorm_eps": ("norm_epsilon", "layernorm_epsilon"),
        "dropout_embed": ("hidden_dropout",),
        "dropout_hidden": ("hidden_dropout",),
        "dropout_attention": ("attention_dropout",),
    }.items():
        values = [settings[name] for name in theirs if settings.get(name) is not None]
        numbers |= {ours: values[0]} if values else {}
    return numbers | {"gelu": _gelu(settings)}


def _gelu(settings: Mapping[str, Any]) -> str:
    """Fused with the bias it is the tanh form, and that is the default; otherwise torch's exact one."""
    if settings.get("openai_gelu"):
        return "tanh"
    return "tanh" if settings.get("bias_gelu_fusion", True) and not settings.get("onnx_safe") else "erf"


def _is_tied(loaded: Loaded, table: Table, overrides: Mapping[str, object]) -> bool:
    if loaded.settings is not None:
        return not loaded.settings.get("untie_embeddings_and_output_weights")
    (head,) = next(rule.theirs for rule in table.rules if rule.ours == "head.weight")
    if head not in loaded.tensors[0] or "tied" in overrides:
        return True
    return other_head(table, loaded.tensors) is None
