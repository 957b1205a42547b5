"""How the tensors of another system are named and laid out: one rule per tensor, read in both directions.

Ours: matrices [out, in]; fused QKV with rows ordered (head of keys and values, q|k|v, head size), q of all heads that
share it. `per_kv`: how many those are.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gptworks import architecture
from gptworks.architecture import Known
from gptworks.checkpoint import regions
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.parallel.slices import Region


class HeadsUnknownError(CheckpointError):
    """The files do not say how many heads there are."""


class OrderUnknownError(CheckpointError):
    """The files do not say in which order the rows of QKV are."""


OURS = "a3d"
_DRIFT = 1e-3


@dataclass(frozen=True)
class Rule:
    """`{i}` in a name is the number of the block."""

    ours: str
    theirs: tuple[str, ...]  # one name, or one each for q, k and v
    transposed: bool = False  # their matrix is [in, out]
    order: str = OURS  # of their QKV rows, outermost first: a head, 3 q|k|v, d inside the head(s) of each

    @property
    def cut(self) -> int | None:
        return architecture.role_of(self.ours).tp_dim

    @property
    def is_qkv(self) -> bool:
        return bool(architecture.role_of(self.ours).fused)

    def at(self, layer: int) -> "Rule":
        theirs = tuple(name.replace("{i}", str(layer)) for name in self.theirs)
        return replace(self, ours=self.ours.replace("{i}", str(layer)), theirs=theirs)

    def from_theirs(self, tensors: Sequence[Tensor], head_size: int, per_kv: int = 1) -> Tensor:
        """Whole, or the shard of a tensor-parallel rank: the number of heads is read off the shape."""
        turned = [tensor.T if self._is_transposed(tensor) else tensor for tensor in tensors]
        tensor = torch.cat(turned) if len(turned) > 1 else turned[0]
        return _reorder(tensor, self._order, OURS, head_size, per_kv) if self.is_qkv else tensor

    def region_from_theirs(
        self, tensors: Sequence[LazyTensor], region: Region, shape: torch.Size, head_size: int, per_kv: int = 1
    ) -> Tensor:
        """What lies in a region of our tensor, or shard, of this shape; where it can be, without reading the rest."""
        if any(each.read_region is None for each in tensors):
            return self.from_theirs([each.read() for each in tensors], head_size, per_kv)[region]
        rows = torch.arange(shape[0])
        rows = _reorder(rows, self._order, OURS, head_size, per_kv) if self.is_qkv else rows
        turned = self.transposed and len(shape) == 2
        return regions.rows_of(tensors, rows[region[0]], region[1:], transposed=turned)

    def to_theirs(self, tensor: Tensor, head_size: int, per_kv: int = 1) -> list[Tensor]:
        if self.is_qkv:
            tensor = _reorder(tensor, OURS, self._order, head_size, per_kv)
        pieces = tensor.split(self._rows(tensor.shape[0], per_kv))
        return [piece.T if self._is_transposed(piece) else piece for piece in pieces]

    def their_shapes(self, shape: torch.Size, per_kv: int = 1) -> list[torch.Size]:
        """The shapes they store for one of our tensors of this shape."""
        turned = self.transposed and len(shape) == 2
        shapes = [torch.Size([rows, *shape[1:]]) for rows in self._rows(shape[0], per_kv)]
        return [each[::-1] if turned else each for each in shapes]

    def _rows(self, total: int, per_kv: int) -> list[int]:
        """How many of our rows each of their tensors has."""
        if len(self.theirs) == 1:
            return [total]
        each = total // (per_kv + 2)
        return [per_kv * each, each, each]

    @property
    def _order(self) -> str:
        return "3ad" if len(self.theirs) > 1 else self.order

    def _is_transposed(self, tensor: Tensor) -> bool:
        return self.transposed and tensor.ndim == 2


def _reorder(tensor: Tensor, order: str, needed: str, head_size: int, per_kv: int = 1) -> Tensor:
    if order == needed:
        return tensor
    if per_kv > 1:
        return _regroup(tensor, order, needed, head_size, per_kv)
    sizes = {"3": 3, "d": head_size, "a": tensor.shape[0] // (3 * head_size)}
    reshaped = tensor.reshape(*(sizes[letter] for letter in order), *tensor.shape[1:])
    dims = [order.index(letter) for letter in needed]
    return reshaped.permute(*dims, *range(3, reshaped.ndim)).reshape(tensor.shape)


def _regroup(tensor: Tensor, order: str, needed: str, head_size: int, per_kv: int) -> Tensor:
    """Between our order and all q, all k, all v, where several heads of q share one of k and v."""
    if {order, needed} != {OURS, "3ad"}:
        raise CheckpointError(f"queries, keys and values in the order {order}, but {per_kv} heads share a key.")
    others = tensor.shape[1:]
    each = tensor.shape[0] // (per_kv + 2)  # rows of k, or of v
    kv_heads = each // head_size
    of_a_head = (per_kv * head_size, head_size, head_size)
    if order == OURS:
        pieces = tensor.reshape(kv_heads, -1, *others).split(of_a_head, dim=1)
        return torch.cat([piece.reshape(-1, *others) for piece in pieces])
    pieces = tensor.split((per_kv * each, each, each))
    return torch.cat([piece.reshape(kv_heads, -1, *others) for piece in pieces], dim=1).reshape(tensor.shape)


class Table:
    """All rules of a system. `at(model)` are those of a model: its blocks, its head if it has one of its own.

    `title`: of the system, for people. `known`: the variants of GPT-2 that the system computes.
    """

    def __init__(self, title: str, rules: Iterable[Rule], known: Known = architecture.GPT2) -> None:
        self.title, self.rules, self.known = title, list(rules), known

    def require(self, model: ModelConfig) -> None:
        """Stop unless the system computes such a model."""
        architecture.require_known(model, self.known, self.title, CheckpointError)

    def at(self, model: ModelConfig) -> dict[str, Rule]:
        self.require(model)
        rules: dict[str, Rule] = {}
        for rule in self.rules:
            if not architecture.role_of(rule.ours).exists(model):
                continue
            if "{i}" in rule.ours:
                rules.update((each.ours, each) for each in map(rule.at, range(model.num_layers)))
            else:
                rules[rule.ours] = rule
        if not model.tied and "head.weight" not in rules:
            raise CheckpointError(
                "model.tied is false: the model has a head of its own, for which this format has no place."
            )
        return rules


def block_rules(
    modules: Mapping[str, str | tuple[str, ...]],
    *,
    transposed: Iterable[str] = (),
    order: str = OURS,
    norm: tuple[str, str] = ("weight", "bias"),
    linear: tuple[str, str] = ("weight", "bias"),
    sep: str = ".",
) -> list[Rule]:
    """Weight and bias of each module of a block. `modules`: ours -> theirs, with `{i}`; `norm`, `linear`: how weight
    and bias of a LayerNorm and of a matrix are called; `transposed`: our modules whose matrices are [in, out] there.
    """
    turned = set(transposed)
    rules = []
    for ours, theirs in modules.items():
        names = (theirs,) if isinstance(theirs, str) else theirs
        is_norm = architecture.BLOCK[f"{ours}.weight"].kind == "gain"
        for kind, called in zip(("weight", "bias"), norm if is_norm else linear, strict=True):
            if f"{ours}.{kind}" not in architecture.BLOCK:
                continue
            rules.append(
                Rule(
                    f"blocks.{{i}}.{ours}.{kind}",
                    tuple(f"{name}{sep}{called}" for name in names),
                    transposed=ours in turned,
                    order=order,
                )
            )
    return rules


def our_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Every tensor of the model, in the order of the network; a tied head is the word embedding."""
    return {name: torch.Size(spec.shape) for name, spec in architecture.tensors(model).items()}


@dataclass(frozen=True)
class Matched:
    """Their tensors under our names and in our order, read when asked for; and what did not fit."""

    tensors: dict[str, LazyTensor]
    missing: list[str]  # their names
    unexpected: list[str]
    misshapen: list[str]  # of a wrong shape or type; one sentence each


_TYPES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def match(
    table: Table, shards: Sequence[LazyTensors], model: ModelConfig, *, ignored: str = "$^", where: str = "weights"
) -> Matched:
    """`shards`: the tensors of each tensor-parallel rank, all pipeline stages together; one for a whole model.

    `ignored`: a pattern (searched) of names that are known and not needed, such as causal masks.
    """
    require_layers(model.num_layers, shards, where)
    rules, shapes = table.at(model), our_shapes(model)
    tensors, missing, misshapen = {}, [], []
    for name, shape in shapes.items():
        rule = rules[name]
        absent = [theirs for theirs in rule.theirs if any(theirs not in shard for shard in shards)]
        missing += absent
        if absent:
            continue
        local = _local_shape(shape, rule.cut, len(shards))
        for theirs, needed in zip(rule.theirs, rule.their_shapes(local, model.heads_per_kv), strict=True):
            for number, shard in enumerate(shards):
                if shard[theirs].shape != needed:
                    rank = f" (tensor-parallel rank {number})" if len(shards) > 1 else ""
                    misshapen.append(f"'{theirs}'{rank} has shape {list(shard[theirs].shape)}, needed {list(needed)}")
        misshapen += _wrong_types(rule, shards)
        tensors[name] = _joined(rule, shards, shape, model)
    known = {theirs for rule in rules.values() for theirs in rule.theirs}
    if model.tied:
        known |= {theirs for rule in table.rules if rule.ours == "head.weight" for theirs in rule.theirs}
    present = dict.fromkeys(name for shard in shards for name in shard)
    unexpected = [name for name in present if name not in known and not re.search(ignored, name)]
    return Matched(tensors, missing, unexpected, misshapen)


def require_layers(num_layers: object, shards: Sequence[Mapping[str, object]], where: str) -> None:
    """Before a list of all their tensors is made: the number may be anything a file says."""
    most = max(map(len, shards), default=0)
    if isinstance(num_layers, int) and num_layers > most:
        raise CheckpointError(f"{where}: {num_layers} blocks are announced, and it holds {most} tensors.")


def _wrong_types(rule: Rule, shards: Sequence[LazyTensors]) -> list[str]:
    dtypes_of = {name: dict.fromkeys(shard[name].dtype for shard in shards) for name in rule.theirs}
    wrong = [(name, dtype) for name, dtypes in dtypes_of.items() for dtype in dtypes if dtype not in _TYPES]
    if wrong:
        name, dtype = wrong[0]
        return [f"'{name}' is of type {str(dtype).removeprefix('torch.')}, needed {', '.join(_TYPES.values())}"]
    kinds = dict.fromkeys(_TYPES[dtype] for dtypes in dtypes_of.values() for dtype in dtypes)
    if len(kinds) > 1:
        return [f"the pieces of '{rule.theirs[0]}' are of different types ({', '.join(kinds)})"]
    return []


def zero_biases(table: Table, shard: LazyTensors, model: ModelConfig, *, ranks: int = 1) -> dict[str, LazyTensor]:
    """For a model that was trained without biases: those its shard of `ranks` lacks, under their names."""
    shapes, zeros = our_shapes(model), {}
    for name, rule in table.at(model).items():
        if name.endswith(".bias"):
            local = _local_shape(shapes[name], rule.cut, ranks)
            dtype = next(iter(shard.values())).dtype
            for theirs, shape in zip(rule.theirs, rule.their_shapes(local, model.heads_per_kv), strict=True):
                if theirs not in shard:
                    zeros[theirs] = LazyTensor(shape, dtype, partial(torch.zeros, shape, dtype=dtype))
    return zeros


def compare_copies(table: Table, shards: Sequence[LazyTensors], model: ModelConfig, where: str) -> list[str]:
    """What every tensor-parallel rank has whole: that of the first is used, so the others must have the same. Looked at
    are vectors, which are small. Rounding may drive copies of one run apart a little, which is a remark; ranks of
    different runs differ by much more, and are refused."""
    largest, slight = 0.0, ""
    for rule in table.at(model).values():
        for name in rule.theirs:
            copies = [shard[name] for shard in shards if name in shard]
            if rule.cut is not None or len(copies) < 2 or {len(each.shape) for each in copies} != {1}:
                continue
            first = copies[0].read().float()
            for rank, copy in enumerate(copies[1:], start=1):
                if copy.shape != first.shape:
                    continue  # listed among the shapes
                difference = float((copy.read().float() - first).abs().max()) if first.numel() else 0.0
                if not difference <= _DRIFT * max(1.0, float(first.abs().max())):
                    raise CheckpointError(
                        f"{where}: '{name}' of tensor-parallel rank {rank} differs by {difference:.3g} from that of "
                        "rank 0, though all ranks hold the same one. They are of different runs or steps: copy the "
                        "folder again."
                    )
                if difference > largest:
                    largest, slight = difference, name
    if not slight:
        return []
    return [f"'{slight}' and others differ by up to {largest:.2g} between ranks that save the same: rank 0's are used"]


def other_head(table: Table, shards: Sequence[LazyTensors]) -> str | None:
    """Files may carry a tied head as a copy of the word embedding: what is wrong with it. Reads both."""
    words, head = (next(rule for rule in table.rules if rule.ours == name) for name in ("wte.weight", "head.weight"))
    for shard in shards:
        mine, copy = shard.get(words.theirs[0]), shard.get(head.theirs[0])
        if mine is None or copy is None:
            continue
        if mine.shape != copy.shape or not torch.equal(mine.read(), copy.read()):
            return (
                f"'{head.theirs[0]}' is to be equal to '{words.theirs[0]}' (the head is tied), and differs. "
                "If the model has a head of its own, say so with -o model.tied=false"
            )
    return None


def _local_shape(shape: torch.Size, cut: int | None, num_shards: int) -> torch.Size:
    if cut is None:
        return shape
    return torch.Size(n // num_shards if dim == cut else n for dim, n in enumerate(shape))


def _joined(rule: Rule, shards: Sequence[LazyTensors], shape: torch.Size, model: ModelConfig) -> LazyTensor:
    heads = (model.head_size, model.heads_per_kv)

    def read() -> Tensor:
        if rule.cut is None:  # every rank has it whole
            return rule.from_theirs([shards[0][name].read() for name in rule.theirs], *heads)
        pieces = [rule.from_theirs([shard[name].read() for name in rule.theirs], *heads) for shard in shards]
        return torch.cat(pieces, dim=rule.cut) if len(pieces) > 1 else pieces[0]

    def of_shard(shard: LazyTensors, region: Region) -> Tensor:
        return rule.region_from_theirs([shard[name] for name in rule.theirs], region, local, *heads)

    def read_region(region: Region) -> Tensor:
        if rule.cut is None:
            return of_shard(shards[0], region)
        return regions.beside([partial(of_shard, shard) for shard in shards], local[rule.cut], rule.cut, region)

    local = _local_shape(shape, rule.cut, len(shards))
    return LazyTensor(shape, shards[0][rule.theirs[0]].dtype, read, read_region)


def split(
    table: Table, tensors: LazyTensors, model: ModelConfig, *, rank: int = 0, ranks: int = 1
) -> dict[str, LazyTensor]:
    """Our tensors under their names: whole, or what tensor-parallel rank `rank` of `ranks` has. Read when asked for."""
    renamed: dict[str, LazyTensor] = {}
    for name, rule in table.at(model).items():
        stored = tensors[name]
        local = _local_shape(stored.shape, rule.cut, ranks)
        for number, (theirs, shape) in enumerate(
            zip(rule.theirs, rule.their_shapes(local, model.heads_per_kv), strict=True)
        ):
            renamed[theirs] = LazyTensor(shape, stored.dtype, _reader(rule, stored, number, rank, ranks, model))
    return renamed


def _reader(
    rule: Rule, stored: LazyTensor, number: int, rank: int, ranks: int, model: ModelConfig
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor = stored.read()
        if rule.cut is not None and ranks > 1:
            tensor = tensor.chunk(ranks, dim=rule.cut)[rank]
        return rule.to_theirs(tensor, model.head_size, model.heads_per_kv)[number].contiguous()

    return read


def settle(known: Mapping[str, object], overrides: Mapping[str, object], where: str) -> dict[str, object]:
    """What the files say and what the user states, who wins: but not about heads, of which the files know better."""
    heads, stated = known.get("num_heads"), overrides.get("num_heads")
    if heads is not None and stated is not None and heads != stated:
        raise CheckpointError(
            f"{where}: says that there are {heads} heads, and -o model.num_heads={stated} says otherwise. With a wrong "
            "number it computes nonsense. Leave the option out, or correct the file that says it."
        )
    return {**known, **overrides}


def conflicts_with(stored: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """What the files say where the user states something else; `stored` leaves out what a system takes for granted."""
    return {key: stored[key] for key, value in overrides.items() if stored.get(key) not in (None, value)}


# By width. Others are anybody's guess, and a guess that is copied computes nonsense.
_HEADS = {
    768: "12",
    1024: "16",
    1280: "20",
    1600: "25",
    2048: "16",
    2560: "32",
    4096: "32",
    5120: "40 or 128",
    12288: "96",
}


def infer_model(
    table: Table,
    shards: Sequence[LazyTensors],
    known: Mapping[str, object],
    overrides: Mapping[str, object],
    where: str,
) -> dict[str, object]:
    """The numbers of the `model` section: from `known` (what the files say), shapes, and `overrides`, which win.

    Heads cannot be seen in any shape: whoever does not know them asks for -o model.num_heads=N.
    """
    first, num_shards = shards[0], len(shards)
    by_name = {rule.ours: rule for rule in table.rules}

    def shape(ours: str, layer: int = 0) -> torch.Size:
        rule = by_name[ours].at(layer)
        if rule.theirs[0] not in first:
            some = ", ".join(f"'{name}'" for name in list(first)[:3]) or "no tensors"
            raise CheckpointError(f"{where}: tensor '{rule.theirs[0]}' is missing; it holds {some} ...")
        size = first[rule.theirs[0]].shape
        if len(size) != 2:  # all that are asked for are matrices
            raise CheckpointError(f"{where}: tensor '{rule.theirs[0]}' has shape {list(size)}, needed a matrix.")
        return torch.Size(reversed(size)) if rule.transposed else size

    marker = by_name["blocks.{i}.ln1.weight"]
    layers = 0
    while marker.at(layers).theirs[0] in first:
        layers += 1
    if not layers:
        raise CheckpointError(f"{where}: tensor '{marker.at(0).theirs[0]}' is missing: no block of a GPT is in it.")
    hidden = shape("wte.weight")[1]
    values: dict[str, object] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": shape("wte.weight")[0] * num_shards,
        "ffn_size": shape("blocks.{i}.mlp.up.weight")[0] * num_shards,
    }
    stated = settle(known, overrides, where)
    if stated.get("positions", "learned") == "learned":
        values["max_positions"] = shape("wpe.weight")[0]
    values |= stated
    require_layers(values["num_layers"], shards, where)
    if "num_heads" not in values:
        usual = f" (published GPTs of this width have {_HEADS[hidden]})" if hidden in _HEADS else ""
        raise HeadsUnknownError(
            f"{where}: the format does not carry the number of heads, and no shape tells it. "
            f"Give it with -o model.num_heads=N{usual}; a wrong number loads and computes nonsense."
        )
    return values
