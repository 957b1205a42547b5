"""What a rank holds of the parameters of a model: its pipeline stages, cut by tensor parallelism, before FSDP shards
them."""

from dataclasses import dataclass
from math import ceil, prod

from gptworks.config.derive import Layout
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.plan.workload import LayoutChoice


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or what tensor parallelism leaves of it on a rank."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None  # the dim that tensor parallelism cuts; None = whole on each rank

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Stage:
    """What a rank holds of one pipeline stage, before it is sharded: one group for each block, and one around them."""

    number: int
    blocks: list[list[Parameter]]
    around: list[Parameter]
    is_first: bool
    is_last: bool

    @property
    def groups(self) -> list[list[Parameter]]:
        return [group for group in [self.around, *self.blocks] if group]

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.groups for parameter in group]


def stages_here(model: ModelConfig, parallel: ParallelConfig, coords: Layout) -> list[Stage]:
    """The stages of the rank with these coordinates, counted from 0."""
    layout = Layout.known(parallel)
    num_stages = layout.pp * parallel.virtual_stages
    numbers = stages_of(coords.pp, layout.pp, parallel.virtual_stages, parallel.schedule) if layout.pp > 1 else [0]
    layers = assign_layers(model.num_layers, num_stages)
    block = [_here(p, layout.tp, coords.tp) for p in _block(model)]  # all of them are alike
    return [
        Stage(
            number,
            [block for _ in layers[number]],
            [_here(p, layout.tp, coords.tp) for p in _around(model, number == 0, number == num_stages - 1)],
            number == 0,
            number == num_stages - 1,
        )
        for number in numbers
    ]


def _block(model: ModelConfig) -> list[Parameter]:
    h, f = model.hidden_size, model.ffn_size
    norms = [Parameter(f"{norm}.{kind}", (h,)) for norm in ("ln1", "ln2") for kind in ("weight", "bias")]
    return norms + [
        Parameter("attn.qkv.weight", (3 * h, h), cut=0),
        Parameter("attn.qkv.bias", (3 * h,), cut=0),
        Parameter("attn.out.weight", (h, h), cut=1),
        Parameter("attn.out.bias", (h,)),
        Parameter("mlp.up.weight", (f, h), cut=0),
        Parameter("mlp.up.bias", (f,), cut=0),
        Parameter("mlp.down.weight", (h, f), cut=1),
        Parameter("mlp.down.bias", (h,)),
    ]


def _around(model: ModelConfig, is_first: bool, is_last: bool) -> list[Parameter]:
    h, found = model.hidden_size, []
    if is_first:
        found += [Parameter("wte.weight", (model.vocab_size, h), cut=0)]
        found += [Parameter("wpe.weight", (model.max_positions, h))]
    if is_last:
        found += [Parameter("ln_f.weight", (h,)), Parameter("ln_f.bias", (h,))]
        if not (model.tied and is_first):
            found += [Parameter("head.weight", (model.vocab_size, h), cut=0)]
    return found


def _here(parameter: Parameter, tp: int, rank: int) -> Parameter:
    if parameter.cut is None or tp == 1:
        return parameter
    shape = list(parameter.shape)
    shape[parameter.cut] = _chunk(shape[parameter.cut], tp, rank)
    return Parameter(parameter.name, tuple(shape), parameter.cut)


def _chunk(size: int, parts: int, number: int) -> int:
    """How many of `size` the part has, cut as torch.chunk cuts: all alike but the last ones."""
    each = ceil(size / parts)
    return max(0, min(each, size - number * each))


def padded(parameter: Parameter, shards: int) -> int:
    """Numbers in all shards together."""
    rows, *rest = parameter.shape
    return ceil(rows / shards) * shards * prod(rest)


def shard_size(parameter: Parameter, choice: LayoutChoice, coords: Layout) -> int:
    """Numbers of it that this rank updates."""
    if not choice.zero:
        return parameter.size
    rows, *rest = parameter.shape
    return _chunk(rows, choice.shards, coords.fsdp) * prod(rest)
