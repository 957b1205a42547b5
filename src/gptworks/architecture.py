"""What a GPT is made of, as data: its tensors, their shapes, what is done with them. No torch: planning reads it too.

The model (`model/gpt.py`) is one reading of these tables and a test compares the two; fresh weights, weight decay,
tensor and pipeline parallelism, checkpoints of other systems and the plan look here. A new kind of block is a few rows
of `BLOCK`, a size in `_sizes`, and keys of `ModelConfig`, which are part of `variant` without being named here.

Queries, keys and values are rows of one matrix, ordered (head of keys and values, [queries of its heads | key | value],
head size): so tensor parallelism cuts it plainly, and where every head has its own key and value it is (head, q|k|v).
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from gptworks.config.schema import ModelConfig
from gptworks.errors import GPTWorksError

Kind = Literal["embedding", "matrix", "gain", "bias"]
Init = Literal["normal", "residual", "ones", "zeros"]  # residual: normal, narrower the deeper the model is


@dataclass(frozen=True)
class Role:
    """All that is known of a tensor before the sizes of a model are."""

    dims: tuple[str, ...]  # what is counted along each dimension, by the names in `_sizes`
    kind: Kind
    init: Init
    tp_dim: int | None = None  # the dimension that tensor parallelism cuts; None: whole on each rank
    # Pieces that alternate along dimension 0, one head of keys and values after the other; a cut goes between those.
    fused: tuple[str, ...] = ()
    exists: Callable[[ModelConfig], bool] = lambda model: True

    @property
    def sees_own_heads(self) -> bool:
        """Whole on each tensor-parallel rank, which uses it on its own heads only: gradients of ranks are summed."""
        return self.dims == ("head",)


def _matrix(outputs: str, inputs: str, *, tp_dim: int, init: Init = "normal", fused: tuple[str, ...] = ()) -> Role:
    return Role((outputs, inputs), "matrix", init, tp_dim, fused)


def _bias(size: str, *, tp_dim: int | None = None, fused: tuple[str, ...] = ()) -> Role:
    wanted = ("all", "qkv") if fused else ("all",)
    return Role((size,), "bias", "zeros", tp_dim, fused, lambda model: model.bias in wanted)


_GAIN = Role(("hidden",), "gain", "ones")
_SHIFT = replace(_bias("hidden"), exists=lambda model: model.norm == "layernorm" and model.bias == "all")
_HEAD_GAIN = Role(("head",), "gain", "ones", exists=lambda model: model.qk_norm)
_QKV = ("q", "k", "v")

# In the order of the network. Matrices are [outputs, inputs].
EMBEDDING = {
    "wte.weight": Role(("vocabulary", "hidden"), "embedding", "normal", tp_dim=0),
    "wpe.weight": Role(
        ("positions", "hidden"), "embedding", "normal", exists=lambda model: model.positions == "learned"
    ),
}
BLOCK = {  # names within block i, which stands at blocks.i
    "ln1.weight": _GAIN,
    "ln1.bias": _SHIFT,
    "attn.qkv.weight": _matrix("qkv", "hidden", tp_dim=0, fused=_QKV),
    "attn.qkv.bias": _bias("qkv", tp_dim=0, fused=_QKV),
    "attn.q_norm.weight": _HEAD_GAIN,
    "attn.k_norm.weight": _HEAD_GAIN,
    "attn.out.weight": _matrix("hidden", "heads", tp_dim=1, init="residual"),
    "attn.out.bias": _bias("hidden"),
    "ln2.weight": _GAIN,
    "ln2.bias": _SHIFT,
    "mlp.gate.weight": replace(_matrix("ffn", "hidden", tp_dim=0), exists=lambda model: model.mlp == "swiglu"),
    "mlp.gate.bias": replace(
        _bias("ffn", tp_dim=0), exists=lambda model: model.mlp == "swiglu" and model.bias == "all"
    ),
    "mlp.up.weight": _matrix("ffn", "hidden", tp_dim=0),
    "mlp.up.bias": _bias("ffn", tp_dim=0),
    "mlp.down.weight": _matrix("hidden", "ffn", tp_dim=1, init="residual"),
    "mlp.down.bias": _bias("hidden"),
}
HEAD = {
    "ln_f.weight": _GAIN,
    "ln_f.bias": _SHIFT,
    # A tied head is the word embedding; on the last of several pipeline stages it is a copy of it (`around_blocks`).
    "head.weight": replace(_matrix("vocabulary", "hidden", tp_dim=0), exists=lambda model: not model.tied),
}


def _sizes(model: ModelConfig) -> dict[str, int]:
    heads = model.num_heads * model.head_size
    return {
        "vocabulary": model.vocab_size,
        "positions": model.max_positions,
        "hidden": model.hidden_size,
        "head": model.head_size,
        "heads": heads,
        "qkv": heads + 2 * model.num_kv_heads * model.head_size,
        "ffn": model.ffn_size,
    }


def _rows_of_a_head(model: ModelConfig) -> dict[str, int]:
    """How many rows of each fused piece belong to one head of keys and values: queries of the heads that share it."""
    return {"q": model.heads_per_kv * model.head_size, "k": model.head_size, "v": model.head_size}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model, or what tensor parallelism leaves of it on a rank."""

    name: str
    shape: tuple[int, ...]
    role: Role
    pieces: tuple[int, ...] = ()  # rows of each of the fused pieces of one head of keys and values

    @property
    def size(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    def on_rank(self, tp: int, rank: int) -> "TensorSpec":
        """What tensor-parallel rank `rank` of `tp` holds."""
        dim = self.role.tp_dim
        if dim is None or tp == 1:
            return self
        kv_heads = self.shape[0] // sum(self.pieces) if self.pieces else tp
        if tp > kv_heads:  # each has the head of keys and values that it needs, several a copy of one
            queries, *others = self.pieces
            return replace(self, shape=(queries // (tp // kv_heads) + sum(others), *self.shape[1:]))
        return replace(self, shape=(*self.shape[:dim], chunk(self.shape[dim], tp, rank), *self.shape[dim + 1 :]))


def tensors(model: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model by its name, in the order of the network. A tied head is the word embedding."""
    block = block_tensors(model)
    blocks = (
        replace(spec, name=f"blocks.{layer}.{local}")
        for layer in range(model.num_layers)
        for local, spec in block.items()
    )
    every = (*_specs(EMBEDDING, model), *blocks, *_specs(HEAD, model))
    return {spec.name: spec for spec in every}


def block_tensors(model: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors of one block by their names within it; every block has the same."""
    return {spec.name: spec for spec in _specs(BLOCK, model)}


def around_blocks(model: ModelConfig, *, is_first: bool, is_last: bool) -> dict[str, TensorSpec]:
    """What a pipeline stage holds beside its blocks. Far from the embedding, a tied head is a copy."""
    specs = [*(_specs(EMBEDDING, model) if is_first else ()), *(_specs(HEAD, model) if is_last else ())]
    if model.tied and is_last and not is_first:
        specs.append(_spec("head.weight", HEAD["head.weight"], model))
    return {spec.name: spec for spec in specs}


def role_of(name: str) -> Role:
    """The role of the tensor of this name, whatever the number of its block ({i} will do)."""
    local = re.sub(r"^blocks\.(\d+|\{i\})\.", "", name)
    return BLOCK[local] if local != name else {**EMBEDDING, **HEAD}[name]


def canonical_name(name: str, *, tied: bool) -> str:
    """What a tensor is called in the whole model: on the last stage of a pipeline the head is a copy of the embedding
    that it is tied to. `name` may have a beginning of its own, as moments have."""
    is_copy = tied and (name == "head.weight" or name.endswith(".head.weight"))
    return f"{name.removesuffix('head.weight')}wte.weight" if is_copy else name


def modules_of(table: Mapping[str, Role]) -> list[str]:
    """The modules that have these tensors, such as attn.qkv, in the order of the network."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in table))


def _specs(table: Mapping[str, Role], model: ModelConfig) -> Iterator[TensorSpec]:
    return (_spec(name, role, model) for name, role in table.items() if role.exists(model))


def _spec(name: str, role: Role, model: ModelConfig) -> TensorSpec:
    sizes, rows = _sizes(model), _rows_of_a_head(model)
    return TensorSpec(name, tuple(sizes[dim] for dim in role.dims), role, tuple(rows[piece] for piece in role.fused))


def chunk(size: int, parts: int, number: int) -> int:
    """How many of `size` a part has, cut as torch.chunk cuts: all alike but the last ones."""
    each = ceil(size / parts)
    return max(0, min(each, size - number * each))


# Which GPT it is

# Numbers that every implementation takes from the config.
_NUMBERS = {
    "num_layers",
    "hidden_size",
    "num_heads",
    "ffn_size",
    "vocab_size",
    "max_positions",
    "layernorm_eps",
    "rope_theta",  # of positions: rope
}
# What changes how a model is trained or which kernel computes it, and no prediction.
_NOT_SEEN_IN_PREDICTIONS = {"attention", "dropout_embed", "dropout_hidden", "dropout_attention"}


def variant(model: ModelConfig) -> dict[str, object]:
    """The tag that every second implementation checks: the keys by which the model computes something else than GPT-2
    of its sizes, with their values. {} is GPT-2. A key that is added to ModelConfig belongs to it from then on.

    >>> variant(ModelConfig(gelu="erf", dropout_hidden=0.1))
    {'gelu': 'erf'}
    """
    differing = {
        key: value
        for key, default in _defaults(model).items()
        if key not in _NUMBERS | _NOT_SEEN_IN_PREDICTIONS and (value := getattr(model, key)) != default
    }
    if "rope_scaling" in differing:  # its other numbers belong to its type
        differing["rope_scaling"] = model.rope_scaling.type
    return differing


class _AnyValue(Collection[object]):
    """Holds every value: for a number that an implementation takes from the config, whatever it is."""

    def __contains__(self, value: object) -> bool:
        return True

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY = _AnyValue()
Known = Mapping[str, Collection[object]]  # values of keys, beside GPT-2's own, that an implementation computes
# The variations that GPT-2 has always had here.
GPT2: Known = {"tied": (False,), "gelu": ("erf", "sigmoid")}
# Those of Llama, Mistral, Qwen2 and Qwen3 as well. What the model learns beyond them gets a table of its own, so that
# nobody who names this one is taken to compute it.
LLAMA: Known = {
    **GPT2,
    "norm": ("rmsnorm",),
    "positions": ("rope", "none"),
    "rope_scaling": ("linear", "llama3", "yarn"),
    "mlp": ("swiglu",),
    "num_kv_heads": ANY,
    "head_size": ANY,
    "bias": ("qkv", "none"),
    "qk_norm": (True,),
    "sliding_window": ANY,
}


def union(tables: Iterable[Known]) -> Known:
    """What one or the other of several implementations computes."""
    every: dict[str, Collection[object]] = {}
    for known in tables:
        for key, values in known.items():
            before = every.get(key, ())
            every[key] = ANY if ANY in (before, values) else tuple(dict.fromkeys((*before, *values)))
    return every


def unknown(model: ModelConfig, known: Known) -> str:
    """What of the model an implementation does not know, in words; empty where it knows all.

    >>> unknown(ModelConfig(gelu="erf", tied=False), {"tied": (False,)})
    'model.gelu: erf (known: tanh)'
    """
    defaults = {**_defaults(model), "rope_scaling": "none"}
    return " and ".join(
        f"model.{key}: {value} (known: {', '.join(map(str, dict.fromkeys((defaults[key], *known.get(key, ())))))})"
        for key, value in variant(model).items()
        if value not in known.get(key, ())
    )


def unmet(model: ModelConfig, needs: Known, known: Known) -> str:
    """What of the model a format cannot hold whose models always have some values of keys (`needs`), GPT-2's or not."""
    of_needs = [
        f"model.{key}: {getattr(model, key)} (known: {', '.join(map(str, values))})"
        for key, values in needs.items()
        if getattr(model, key) not in values
    ]
    others = {**known, **dict.fromkeys(needs, ANY)}
    return " and ".join([*of_needs, *filter(None, [unknown(model, others)])])


def require_known(model: ModelConfig, known: Known, who: str, error: type[GPTWorksError]) -> None:
    if missing := unknown(model, known):
        raise error(f"{who} cannot compute what this model asks for: {missing}.")


def _defaults(model: ModelConfig) -> dict[str, object]:
    fields = type(model).model_fields
    values = {name: getattr(model, name) for name in fields}
    return {name: field.get_default(call_default_factory=True, validated_data=values) for name, field in fields.items()}
