"""All layouts of so many devices: which of them fit, which of those is fastest, and why the others are out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gptworks.config.derive import BatchPlan, Layout, layouts, usual_samples
from gptworks.config.schema import AXES, ParallelConfig
from gptworks.config.stages import STAGES_PER_RANK
from gptworks.plan.changes import RECOMPUTE, refused
from gptworks.plan.devices import Device, Link
from gptworks.plan.job import Choice, Job, amount
from gptworks.plan.memory import states
from gptworks.plan.time import StepTime, step_time

_MOST_MICRO = 16
_MOST_VIRTUAL = 6
_MOST_DEVICES = 1 << 14


@dataclass(frozen=True)
class Fit:
    choice: Choice
    time: StepTime
    tokens_per_second: float


@dataclass(frozen=True)
class Rejected:
    what: str
    reason: str
    needed: int | None = None  # bytes; None: it is not for its memory
    at_least: bool = False  # of needed: activations come on top


@dataclass
class Found:
    fits: list[Fit] = field(default_factory=list)  # the fastest first
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def looked_at(self) -> int:
        return len(self.fits) + len(self.rejected)

    @property
    def nearest(self) -> Rejected | None:
        """Of those that are too large, the smallest. Those that are so before any activation come last."""
        too_large = [each for each in self.rejected if each.needed is not None]
        return min(too_large, key=lambda each: (each.at_least, each.needed or 0), default=None)


def usual_batch(job: Job, devices: int) -> int:
    """Samples of a step where nobody has said how many; a multiple of the devices, so that any layout divides it."""
    return usual_samples(job.model, job.seq_len, devices)


def search(
    job: Job, device: Device, link: Link, devices: int, global_size: int, *, fixed: dict[str, Any] | None = None
) -> Found:
    """`fixed`: dotted keys of parallel, batch and train that are to stay as they are."""
    found, fixed = Found(), fixed or {}
    modes = [mode for mode in _useful_modes(job) if fixed.get("train.recompute", mode) == mode]
    modes = modes or [fixed["train.recompute"]]
    for parallel in _parallels(job, devices, fixed):
        tp = Layout.known(parallel).tp
        if tp > device.per_node and "parallel.tp" not in fixed:
            why = f"tp {tp} would reach beyond a machine of {device.per_node}; parallel.tp={tp} tries it all the same"
            found.rejected.append(Rejected(_named(parallel), why))
            continue
        batches = _batches(job, parallel, global_size, fixed, found)
        for choice in _that_fit(job, parallel, batches, modes, device, found):
            time = timed(job, choice, device, link)
            found.fits.append(Fit(choice, time, choice.batch.global_size * job.seq_len / time.total))
    found.fits.sort(key=lambda fit: -fit.tokens_per_second)
    return found


def _that_fit(
    job: Job, parallel: ParallelConfig, batches: list[BatchPlan], modes: list[str], device: Device, found: Found
) -> list[Choice]:
    """For each micro-batch, with as little recomputation as it needs."""
    if not batches:
        return []
    least = states(job.model, parallel, cuda=job.kernels != "cpu")
    if least > device.capacity:
        over = f"{amount(least)}, {amount(least - device.capacity)} more than {device.name} has"
        why = f"weights, gradients and Adam's moments alone are {over}"
        found.rejected.append(Rejected(_named(parallel), why, least, at_least=True))
        return []
    # A micro-batch that is all of a step has no gradients of earlier ones beside it: shards may then hold much less.
    several = [batch for batch in batches if batch.accumulation > 1]
    alone = [batch for batch in batches if batch.accumulation == 1]
    return [choice for some in (several, alone) for choice in _up_to_border(job, parallel, some, modes, device, found)]


def _up_to_border(
    job: Job, parallel: ParallelConfig, batches: list[BatchPlan], modes: list[str], device: Device, found: Found
) -> list[Choice]:
    """More recomputation, or a smaller micro-batch, never holds more: only those at the border are computed."""
    fitting: list[Choice] = []
    for mode in modes:
        border = len(fitting)
        for number, batch in enumerate(batches):
            choice = Choice(parallel, batch, mode)
            if number < border:
                found.rejected.append(Rejected(str(choice), f"fits with recompute {fitting[number].recompute} already"))
            elif number == len(fitting) and (needed := choice.peak(job)) <= device.capacity:
                fitting.append(choice)
            elif number == len(fitting):
                over = f"{amount(needed)}, {amount(needed - device.capacity)} more than {device.name} has"
                found.rejected.append(Rejected(str(choice), over, needed))
            else:
                smaller = batches[len(fitting)].micro_size
                found.rejected.append(Rejected(str(choice), f"does not fit with micro-batch {smaller} either"))
    return fitting


def _useful_modes(job: Job) -> list[str]:
    """A fused kernel keeps no attention matrix that could be computed again."""
    fused = job.model.attention == "auto" and not (job.kernels == "cpu" and job.model.dropout_attention)
    return [mode for mode in RECOMPUTE if not (fused and mode == "core_attn")]


def timed(job: Job, choice: Choice, device: Device, link: Link) -> StepTime:
    return step_time(
        job.model,
        choice.parallel,
        choice.batch,
        job.seq_len,
        precision=job.precision,
        recompute=choice.recompute,
        device=device,
        link=link,
        compiled=job.compiled,
    )


def _parallels(job: Job, devices: int, fixed: dict[str, Any]) -> Iterator[ParallelConfig]:
    """Degrees, sharding stage and stages per rank."""
    kept = {key.removeprefix("parallel."): value for key, value in fixed.items() if key.startswith("parallel.")}
    for layout in layouts(devices):
        if any(kept.get(axis, size) not in (size, "auto") for axis, size in vars(layout).items()):
            continue
        # Without a sharding stage fsdp is one more dp.
        zeros = (1, 2, 3) if layout.fsdp > 1 else (0,)
        for virtual in _virtual_stages(job, layout.pp):
            schedule = _schedule(layout.pp, virtual, kept.get("schedule"))
            for zero in zeros:
                given = {**vars(layout), "zero": zero, "schedule": schedule, "virtual_stages": virtual}
                if any(kept.get(key, value) != value for key, value in given.items() if key not in AXES):
                    continue
                yield ParallelConfig(**kept | given)


def _schedule(pp: int, virtual: int, asked: str | None) -> str:
    """That which is asked for, where it has an order for so many stages."""
    if pp > 1 and asked in STAGES_PER_RANK:
        least, most = STAGES_PER_RANK[asked]
        if least <= virtual <= most:
            return asked
    return "interleaved" if virtual > 1 else "1f1b"


def _virtual_stages(job: Job, pp: int) -> Iterator[int]:
    """1, and as many as leave every stage with as many layers."""
    yield 1
    if pp > 1:
        layers = job.model.num_layers
        yield from (v for v in range(2, _MOST_VIRTUAL + 1) if layers % (pp * v) == 0)


def _batches(
    job: Job, parallel: ParallelConfig, global_size: int, fixed: dict[str, Any], found: Found
) -> list[BatchPlan]:
    """By micro-batch, the smallest first; what a run would refuse goes to those rejected."""
    ranks = Layout.known(parallel).data_parallel
    if global_size % ranks:
        why = f"batch.global_size {global_size} is not a multiple of {ranks} data-parallel ranks"
        found.rejected.append(Rejected(_named(parallel), why))
        return []
    of_a_rank = global_size // ranks
    problems = refused(job, parallel, BatchPlan(global_size, 1, of_a_rank, ranks))
    if problems:  # with the smallest micro-batches too
        found.rejected.append(Rejected(_named(parallel), " ".join(problems)))
        return []
    batches = []
    asked = fixed.get("batch.micro_size"), fixed.get("batch.accumulation")
    micro_sizes = _micro_sizes(of_a_rank, *asked)
    if not micro_sizes:
        said = " ".join(f"{key}={fixed[key]}" for key in ("batch.micro_size", "batch.accumulation") if key in fixed)
        found.rejected.append(Rejected(_named(parallel), f"{said} does not make {of_a_rank} samples of a rank"))
    for micro in micro_sizes:
        batch = BatchPlan(global_size, micro, of_a_rank // micro, ranks)
        problems = refused(job, parallel, batch) if micro > 1 else []
        if problems:
            found.rejected.append(Rejected(f"{_named(parallel)}, micro-batch {micro}", " ".join(problems)))
        else:
            batches.append(batch)
    return batches


def best_micro_size(
    job: Job, parallel: ParallelConfig, global_size: int, recompute: str, device: Device, link: Link
) -> int:
    """The fastest that fits; 1 where none does."""
    choices = [Choice(parallel, batch, recompute) for batch in _batches(job, parallel, global_size, {}, Found())]
    fitting = [choice for choice in choices if choice.peak(job) <= device.capacity]
    fastest = min(fitting, key=lambda choice: timed(job, choice, device, link).total, default=None)
    return fastest.batch.micro_size if fastest else 1


def _micro_sizes(of_a_rank: int, asked: int | None, accumulation: int | None = None) -> list[int]:
    """Powers of two, for the sake of speed, or the one that is asked for."""
    sizes = [asked] if asked else [2**n for n in range(_MOST_MICRO.bit_length())]
    if accumulation:
        sizes = [size for size in [asked or of_a_rank // accumulation] if size * accumulation == of_a_rank]
    return [size for size in sizes if 0 < size <= of_a_rank and of_a_rank % size == 0]


def _named(parallel: ParallelConfig) -> str:
    return str(Choice(parallel, BatchPlan(1, 1, 1, 1), "none")).replace(", micro-batch 1", "")


Hardware = Callable[[int], tuple[Device, Link]]  # of so many devices


def fewest_devices(
    job: Job, hardware: Hardware, devices: int, global_size: int | None, *, fixed: dict[str, Any] | None = None
) -> int | None:
    """The smallest number above `devices`, in whole machines where it takes more than one, that some layout fits on;
    of those that leave `fixed` as it is. Without a batch it is the usual one of so many devices."""
    fixed = fixed or {}
    # Whatever fits at all, fits with the smallest micro-batch or with all of a step in one (see _that_fit).
    least: list[dict[str, Any]] = [{"batch.micro_size": 1}, {"batch.accumulation": 1}]
    if fixed.keys() & {"batch.micro_size", "batch.accumulation"}:
        least = [{}]

    def fits(number: int) -> bool:
        batch = global_size or usual_batch(job, number)
        settings = ({"train.recompute": "full"} | some | fixed for some in least)
        return any(search(job, *hardware(number), number, batch, fixed=some).fits for some in settings)

    number = devices
    while number < _MOST_DEVICES:
        number *= 2
        if fits(number):
            break
    else:
        return None
    per_node = hardware(number)[0].per_node
    step = per_node if number > per_node else 1
    first = devices // step * step + step
    return next((some for some in range(max(first, number // 2 + step), number, step) if fits(some)), number)
