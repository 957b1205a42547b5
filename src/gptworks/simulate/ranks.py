"""What each rank of a layout would hold: its part is built by the code of training, on tensors that have no memory; how
much a step on it takes is what the planner says."""

from collections.abc import Iterator
from dataclasses import dataclass

from gptworks.architecture import role_of
from gptworks.config.derive import Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, RunConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.launch import process_group
from gptworks.launch.devices import pick_device
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.parallel.build import build
from gptworks.plan.memory import RankMemory, rank_memory
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.train.precision import DTYPES


@dataclass(frozen=True)
class RankState:
    """One rank for all that are built alike. Stages and tensor-parallel ranks are those of the ranks it stands for."""

    pp_ranks: range
    tp_ranks: range
    num_ranks: int
    layers: list[range]  # of the first of pp_ranks; a range for each stage that a rank has
    heads: int
    words: int  # rows of the word embedding or head that are here
    stage_parameters: int  # of the whole model on these stages; the copy of a tied embedding is not counted
    parameters: int  # numbers on this rank, copies too
    memory: RankMemory  # of the fullest of them, at its fullest moment


@dataclass(frozen=True)
class Inspected:
    workload: Workload
    choice: LayoutChoice
    ranks: list[RankState]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, as the stages add up to it."""
        return sum(state.stage_parameters * len(state.pp_ranks) for state in self.ranks if state.tp_ranks.start == 0)


def inspect_ranks(cfg: RunConfig, world_size: int) -> Inspected:
    """Refuses what a run of so many processes would refuse, as long as it needs no data to know it."""
    choice = LayoutChoice.from_config(cfg, world_size)
    layout, parallel = choice.layout, choice.parallel
    kind = pick_device("auto").type if cfg.run.device == "auto" else cfg.run.device
    workload = Workload.from_config(cfg, "cpu" if kind == "cpu" else "cuda")
    states = []
    for pp_ranks in group_identical(cfg.model, parallel, layout.pp):
        layers = layers_of(cfg.model, parallel, layout.pp, pp_ranks.start)
        for tp_ranks in _identical_in_tp(cfg.model, layout.tp, layers):
            rank = pp_ranks.start * (world_size // layout.pp) + tp_ranks.start
            with process_group.imagined(layout, rank) as world:
                states.append(_state(world, workload, choice, pp_ranks, tp_ranks))
    return Inspected(workload, choice, states)


def layers_of(model: ModelConfig, parallel: ParallelConfig, pp: int, pp_rank: int) -> list[range]:
    """The layers of each stage of a pipeline rank."""
    if pp == 1:
        return [range(model.num_layers)]
    every = assign_layers(model.num_layers, pp * parallel.virtual_stages)
    return [every[stage] for stage in stages_of(pp_rank, pp, parallel.virtual_stages, parallel.schedule)]


def group_identical(model: ModelConfig, parallel: ParallelConfig, pp: int) -> Iterator[range]:
    """Neighbours in the pipeline that have as many layers, and neither end of the model, hold the same."""
    kinds = []
    for pp_rank in range(pp):
        layers = layers_of(model, parallel, pp, pp_rank)
        ends = (layers[0].start == 0, layers[-1].stop == model.num_layers)
        kinds.append(([len(of_stage) for of_stage in layers], ends))
    first = 0
    for pp_rank in range(1, pp + 1):
        if pp_rank == pp or kinds[pp_rank] != kinds[first]:
            yield range(first, pp_rank)
            first = pp_rank


def _identical_in_tp(model: ModelConfig, tp: int, layers: list[range]) -> list[range]:
    """Matrices are cut evenly; of the vocabulary the last rank may have fewer words than the others."""
    has_words = layers[0].start == 0 or layers[-1].stop == model.num_layers
    if model.vocab_size % tp == 0 or not has_words:
        return [range(tp)]
    return [range(tp - 1), range(tp - 1, tp)]


def _state(world: World, workload: Workload, choice: LayoutChoice, pp_ranks: range, tp_ranks: range) -> RankState:
    # What is offloaded lies in real memory. How much it is does not depend on where it lies.
    built = choice.parallel.model_copy(update={"offload": False})
    model, layout = workload.model, world.layout
    part = build(model, world, DTYPES[workload.precision.compute], None, parallel=built)
    named = list(part.named_parameters())
    places = [Layout(pp_rank, 0, 0, tp_ranks.start) for pp_rank in pp_ranks]
    tables = [parameter for name, parameter in named if role_of(name).dims[0] == "vocabulary"]
    return RankState(
        pp_ranks,
        tp_ranks,
        len(pp_ranks) * layout.data_parallel * len(tp_ranks),
        layers_of(model, choice.parallel, layout.pp, pp_ranks.start),
        model.num_heads // layout.tp,
        shard.num_gathered(tables[-1]) // model.hidden_size if tables else 0,
        sum(parameter.numel() for parameter in part.counted_parameters()),
        sum(shard.local(parameter).numel() for _, parameter in named),
        max((rank_memory(workload, choice, each) for each in places), key=lambda each: each.peak),
    )


def span(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"
