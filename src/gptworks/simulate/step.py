"""One training step of one rank of any layout: the code of training itself, on tensors that have no memory, in a world
where nobody else exists. What it allocates, sends and computes is counted operator by operator.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import DataConfig, RunConfig
from gptworks.data.loader import Batch
from gptworks.errors import UsageError
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.parallel.parts import Part
from gptworks.plan import communication
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.simulate.flops import Flops
from gptworks.simulate.ranks import group_identical, layers_of, span
from gptworks.simulate.tracker import Group, Tracker
from gptworks.text_table import aligned
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.run import build_part
from gptworks.train.step import train_step


@dataclass(frozen=True)
class Simulated:
    """A step of one rank, after the first: the moments of Adam exist. Bytes are those at the peak."""

    layout: Layout
    pp_ranks: range  # of the ranks that it stands for
    rank: int
    layers: list[range]  # of each stage of the first of pp_ranks
    micro_batches: int  # that were run
    accumulation: int  # that a step of training has
    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # parameters that FSDP has put together
    rest: int  # activations, temporaries, buffers
    left_out: int  # what the micro-batches that were not run would add
    moment: str  # forward, loss, backward or update
    communication: dict[tuple[str, str], int]  # bytes by axis and kind, as plan.communication.totals
    messages: dict[tuple[str, str], int]
    flops: int
    seconds: float  # that the simulation took
    largest: list[Group]  # what was alive at the peak

    @property
    def peak(self) -> int:
        return sum(getattr(self, name) for name in _COLUMNS)

    @property
    def flops_per_step(self) -> int:
        """With all micro-batches."""
        return self.flops * self.accumulation // self.micro_batches

    def as_json(self) -> dict[str, Any]:
        of_kind = {f"{axis}.{kind}": size for (axis, kind), size in sorted(self.communication.items())}
        return {
            "layout": str(self.layout),
            "pp_ranks": list(self.pp_ranks),
            "rank": self.rank,
            "layers": sum(len(layers) for layers in self.layers),
            "micro_batches": self.micro_batches,
            "accumulation": self.accumulation,
            "bytes": {name: getattr(self, name) for name in _COLUMNS} | {"peak": self.peak},
            "moment": self.moment,
            "communication": of_kind,
            "flops": self.flops,
            "flops_per_step": self.flops_per_step,
            "seconds": round(self.seconds, 2),
        }


_COLUMNS = ("parameters", "gradients", "optimizer", "gathered", "rest", "left_out")


def simulate(cfg: RunConfig, world_size: int, rank: int, micro_batches: int | None = None) -> Simulated:
    """`micro_batches`: of the step; None = as few as show the peak of all that a step of training would have."""
    choice = LayoutChoice.from_config(cfg, world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of a world of {world_size}. Needed: 0 to {world_size - 1}.")
    # What is offloaded lies in another memory. How much it is does not depend on where it lies.
    choice = replace(choice, parallel=choice.parallel.model_copy(update={"offload": False}))
    layout, parallel, batch = choice.layout, choice.parallel, choice.batch
    number = enough_micro_batches(choice) if micro_batches is None else micro_batches
    # Whole graphs, as compiled ones are, do not show what they allocate: blocks are run as they are written.
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"compile": False})})
    began = time.perf_counter()
    with process_group.imagined(layout, rank, FakeTensorMode(allow_non_fake_inputs=True)) as world:
        part = build_part(cfg, world, parallel, None)
        with world.memory, _Answers(), ExitStack() as imagining:
            if layout.pp > 1:
                from gptworks.parallel import pipeline

                assert isinstance(part, pipeline.Pipeline)
                imagining.enter_context(pipeline.messages_hold_tensors())
                # The other stages cannot be asked what they send.
                part.hidden_len = cfg.data.seq_len // (layout.tp if parallel.sequence else 1)
            seen = watch_step(part, cfg, world, [_any_batch(cfg.data, batch) for _ in range(number)])
        place = world.coords
    kinds = seen.tracker.at_peak()
    return Simulated(
        layout,
        range(place.pp, place.pp + 1),
        rank,
        layers_of(cfg.model, parallel, layout.pp, place.pp),
        number,
        batch.accumulation,
        kinds["parameter"],
        kinds["gradient"],
        kinds["optimizer"],
        kinds["gathered"],
        kinds["other"],
        (batch.accumulation - number) * _each_adds(cfg, choice, place) if micro_batches is None else 0,
        seen.tracker.moment,
        seen.communication,
        seen.messages,
        seen.flops.total,
        time.perf_counter() - began,
        seen.tracker.groups_at_peak(),
    )


def simulate_all(cfg: RunConfig, world_size: int, micro_batches: int | None = None) -> list[Simulated]:
    """One rank of each pipeline rank, the fullest; those that are alike once."""
    return list(simulate_each(cfg, world_size, micro_batches))


def simulate_each(cfg: RunConfig, world_size: int, micro_batches: int | None = None) -> Iterator[Simulated]:
    """What `simulate_all` gives, one by one, as each is ready."""
    choice = LayoutChoice.from_config(cfg, world_size)
    parallel, pp = choice.parallel, choice.layout.pp
    every = [range(pp_rank, pp_rank + 1) for pp_rank in range(pp)]
    # In the other schedules an early rank has more micro-batches under way than a late one.
    for pp_ranks in group_identical(cfg.model, parallel, pp) if parallel.schedule == "gpipe" else every:
        first = simulate(cfg, world_size, pp_ranks.start * (world_size // pp), micro_batches)
        yield Simulated(**vars(first) | {"pp_ranks": pp_ranks})


def enough_micro_batches(choice: LayoutChoice) -> int:
    """As few as show the peak: all states of a step occur, and what each further one adds is known.

    One process: with gradients of an earlier micro-batch, and the last one. Pipeline: as many under way as ever.
    """
    pp, schedule, accumulation = choice.layout.pp, choice.parallel.schedule, choice.batch.accumulation
    if pp == 1:
        return min(accumulation, 2)
    if schedule == "gpipe":
        return accumulation
    return min(accumulation, pp + 2 if schedule == "1f1b" else 2 * pp)


def _each_adds(cfg: RunConfig, choice: LayoutChoice, place: Layout) -> int:
    """To the peak, by each micro-batch beyond enough_micro_batches."""
    if choice.layout.pp == 1:
        return 0  # its loss: 4 bytes
    given = 2 + cfg.data.reset_positions + cfg.data.reset_attention  # tokens, labels ..., joined for the schedule
    integers = given * choice.batch.micro_size * cfg.data.seq_len * torch.long.itemsize
    if choice.parallel.schedule in {"gpipe", "1f1b"}:
        return integers
    # The other schedules wait for what they have sent when all is done, and keep it until then.
    one = replace(choice, batch=replace(choice.batch, accumulation=1))
    terms = communication.per_step(Workload.from_config(cfg, "cpu"), one, place)
    return integers + sum(term.bytes for term in terms if term.is_hidden)


@dataclass(frozen=True)
class Seen:
    tracker: Tracker
    flops: Flops
    communication: dict[tuple[str, str], int]
    messages: dict[tuple[str, str], int]


def watch_step(part: Part, cfg: RunConfig, world: World, batches: list[Batch]) -> Seen:
    """Train for one step, which is watched, on real tensors as on fake ones. The moments of Adam exist before it."""
    part.train()
    optimizer = optim.build(part, cfg.optim)
    optim.set_moments(part, optimizer, optim.moments(part, optimizer), updates=1)
    scaler = LossScaler(cfg.precision.scaler, enabled=cfg.precision.compute == "fp16")
    tracker, flops = Tracker(), Flops()
    with ExitStack() as watching:
        watching.enter_context(tracker)
        traffic: Any = None
        if world.mesh is not None:
            from gptworks.parallel.comm_counter import CommCounter, around_shape_finding

            watching.enter_context(around_shape_finding(tracker.paused()))
            traffic = watching.enter_context(CommCounter(world))
        watching.enter_context(flops)
        watching.enter_context(_telling(tracker, part, optimizer))
        train_step(part, optimizer, batches, world, scaler, clip=cfg.optim.clip, seed=cfg.train.seed, step=2)
    sent = (dict(traffic.bytes), dict(traffic.calls)) if traffic is not None else ({}, {})
    return Seen(tracker, flops, *sent)


@contextmanager
def _telling(tracker: Tracker, part: Part, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The tracker sees storages; here it is told what they are, whenever there may be new ones."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def tell(*_: Any) -> None:
        tracker.tell("parameter", parameters)  # FSDP may give a shard new memory when it is first used
        tracker.tell("gradient", [parameter.grad for parameter in parameters])
        for piece in part.parts:
            gathered, whole = shard.beside_shards(piece, part.sharding)
            tracker.tell("gathered", gathered)
            tracker.tell("gradient", whole)

    def within(moment: str) -> Any:
        def enter(*_: Any) -> None:
            tracker.within = moment

        return enter

    tell()
    for state in optimizer.state.values():
        tracker.tell("optimizer", state.values())
    handles: list[Any] = [optimizer.register_step_pre_hook(tell)]
    handles.append(optimizer.register_step_pre_hook(within("update")))
    handles.append(optimizer.register_step_post_hook(within("")))
    for piece in part.parts:
        handles.append(piece.register_forward_pre_hook(tell))
        handles.append(piece.loss_sum.register_forward_pre_hook(within("loss")))
        handles.append(piece.loss_sum.register_forward_hook(within("")))
    try:
        yield
        tell()  # what FSDP has put together is still known, though it is given back
    finally:
        for handle in handles:
            handle.remove()


def _any_batch(data: DataConfig, plan: BatchPlan) -> Batch:
    shape = (plan.micro_size, data.seq_len)

    def integers() -> Tensor:
        return torch.zeros(shape, dtype=torch.long)

    positions = integers() if data.reset_positions else None
    segments = integers() if data.reset_attention else None
    return Batch(integers(), integers(), positions, segments, torch.zeros(plan.micro_size, dtype=torch.long))


class _Answers(TorchDispatchMode):
    """A fake tensor has no numbers. Where the step asks for one (scored tokens, loss, norm), it is told any: whole ones
    are 1; others 2, which is finite, and more than gradients are usually clipped at."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return 2.0 if dtype.is_floating_point else True if dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


def describe(simulated: list[Simulated]) -> str:
    """As a table: a line for each kind of rank."""
    first = simulated[0]
    lines = [f"simulated        {first.layout}: {first.layout.world_size:,} processes; one rank of each line was run"]
    if first.micro_batches < first.accumulation:
        lines.append(
            f"micro-batches    {first.micro_batches} of {first.accumulation} were run; what the others add to the peak "
            "(tokens, messages) is left_out; bytes sent and FLOP are of those run"
        )
    else:
        lines.append(f"micro-batches    {first.micro_batches}")
    rows: list[tuple[str, ...]] = [("stage", "layers", *_COLUMNS, "peak", "at", "TFLOP", "took")]
    for one in simulated:
        sizes = (*(getattr(one, name) for name in _COLUMNS), one.peak)
        layers = str(sum(len(layers) for layers in one.layers))
        shown = [f"{size / 2**30:.2f}" for size in sizes]
        rows.append((span(one.pp_ranks), layers, *shown, one.moment, f"{one.flops / 1e12:.4g}", f"{one.seconds:.1f} s"))
    lines += ["", "memory of one rank at its peak (GiB):", *aligned(rows)]
    keys = sorted({key for one in simulated for key in one.communication})
    if keys:
        sent: list[tuple[str, ...]] = [("stage", *(f"{axis} {kind}" for axis, kind in keys))]
        for one in simulated:
            amounts = (f"{one.communication.get(key, 0) / 1e9:.4g}" for key in keys)
            sent.append((span(one.pp_ranks), *amounts))
        lines += ["", "what one rank contributes to messages (GB):", *aligned(sent)]
    lines += [
        "",
        "Counted on tensors without memory, as a CPU runs the step: kernels' own workspaces, buffers of NCCL, what an",
        "allocator loses between blocks, and other attention kernels than the CPU's are not in it.",
    ]
    return "\n".join(lines)
