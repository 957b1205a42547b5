"""What a rank holds of the parameters of a model: its pipeline stages, cut by tensor parallelism, before FSDP shards
them."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from gptworks.architecture import TensorSpec, around_blocks, block_tensors, chunk
from gptworks.config.derive import Layout
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.plan.workload import LayoutChoice


@dataclass(frozen=True)
class Stage:
    """What a rank holds of one pipeline stage, before it is sharded: one group for each block, and one around them."""

    number: int
    blocks: list[list[TensorSpec]]
    around: list[TensorSpec]
    is_first: bool
    is_last: bool

    @property
    def parameters(self) -> list[TensorSpec]:
        return [parameter for group in [self.around, *self.blocks] for parameter in group]

    def of(self, rows: str) -> list[TensorSpec]:
        """The parameters around the blocks that have a row for each of these: "vocabulary" or "positions"."""
        return [parameter for parameter in self.around if parameter.role.dims[0] == rows]


def stages_here(model: ModelConfig, parallel: ParallelConfig, coords: Layout) -> list[Stage]:
    """The stages of the rank with these coordinates, counted from 0."""
    layout = Layout.from_config(parallel)
    num_stages = layout.pp * parallel.virtual_stages
    numbers = stages_of(coords.pp, layout.pp, parallel.virtual_stages, parallel.schedule) if layout.pp > 1 else [0]
    layers = assign_layers(model.num_layers, num_stages)
    block = _block(model, layout.tp, coords.tp)  # all of them are alike
    stages = []
    for number in numbers:
        is_first, is_last = number == 0, number == num_stages - 1
        around = around_blocks(model, is_first=is_first, is_last=is_last).values()
        here = [spec.on_rank(layout.tp, coords.tp) for spec in around]
        stages.append(Stage(number, [block for _ in layers[number]], here, is_first, is_last))
    return stages


@lru_cache(maxsize=1 << 10)
def _block(model: ModelConfig, tp: int, rank: int) -> list[TensorSpec]:
    return [spec.on_rank(tp, rank) for spec in block_tensors(model).values()]


def padded(parameter: TensorSpec, shards: int) -> int:
    """Numbers in all shards together."""
    rows, *rest = parameter.shape
    return ceil(rows / shards) * shards * prod(rest)


def shard_size(parameter: TensorSpec, choice: LayoutChoice, coords: Layout) -> int:
    """Numbers of it that this rank updates."""
    if not choice.zero:
        return parameter.size
    rows, *rest = parameter.shape
    return chunk(rows, choice.shards, coords.fsdp) * prod(rest)
