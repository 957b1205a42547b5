"""All layouts of so many devices: which of them fit, which of those is fastest, and why the others are out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gptworks.config.derive import BatchPlan, Layout, layouts, usual_samples
from gptworks.config.schema import AXES, ParallelConfig
from gptworks.config.stages import STAGES_PER_RANK
from gptworks.plan.budget import amount
from gptworks.plan.changes import RECOMPUTE
from gptworks.plan.devices import Device, Link
from gptworks.plan.memory import peak_memory, state_memory
from gptworks.plan.rejections import Reason, Rejected, refusals
from gptworks.plan.time import StepTime, step_time
from gptworks.plan.workload import LayoutChoice, Workload, degrees_in_words

_MOST_MICRO = 16
_MOST_VIRTUAL = 6
_MOST_DEVICES = 1 << 14

Hardware = Callable[[int], tuple[Device, Link]]  # of so many devices


@dataclass(frozen=True)
class Fit:
    choice: LayoutChoice
    time: StepTime
    tokens_per_second: float


@dataclass
class SearchResult:
    fits: list[Fit] = field(default_factory=list)  # the fastest first
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def looked_at(self) -> int:
        return len(self.fits) + len(self.rejected)

    @property
    def nearest(self) -> Rejected | None:
        """The smallest of those that are too large. Those that are so before any activation come last."""
        too_large = [each for each in self.rejected if each.needed is not None]
        return min(too_large, key=lambda each: (each.at_least, each.needed or 0), default=None)


def usual_batch(workload: Workload, devices: int) -> int:
    """Samples of a step where nobody has said how many; a multiple of the devices, so that any layout divides it."""
    return usual_samples(workload.model, workload.seq_len, devices)


@dataclass(frozen=True)
class Search:
    """`fixed`: dotted keys of parallel, batch and train that are to stay as they are."""

    workload: Workload
    device: Device
    link: Link
    global_size: int
    fixed: dict[str, Any] = field(default_factory=dict)
    result: SearchResult = field(default_factory=SearchResult)

    def run(self, devices: int) -> SearchResult:
        for parallel in self._parallels(devices):
            tp = Layout.from_config(parallel).tp
            if tp > self.device.per_node and "parallel.tp" not in self.fixed:
                why = f"tp {tp} would reach beyond a machine of {self.device.per_node}"
                self._reject(parallel, Reason.BEYOND_MACHINE, f"{why}; parallel.tp={tp} tries it all the same")
                continue
            for choice in self._that_fit(parallel, self.batches(parallel)):
                time = step_time(self.workload, choice, self.device, self.link)
                speed = choice.batch.global_size * self.workload.seq_len / time.total
                self.result.fits.append(Fit(choice, time, speed))
        self.result.fits.sort(key=lambda fit: -fit.tokens_per_second)
        return self.result

    def _reject(self, parallel: ParallelConfig, reason: Reason, text: str, needed: int | None = None) -> None:
        """All batches of it."""
        self.result.rejected.append(Rejected(degrees_in_words(parallel), reason, text, needed=needed))

    def _parallels(self, devices: int) -> Iterator[ParallelConfig]:
        """Degrees, sharding stage and stages per rank."""
        kept = {
            key.removeprefix("parallel."): value for key, value in self.fixed.items() if key.startswith("parallel.")
        }
        for layout in layouts(devices):
            if any(kept.get(axis, size) not in (size, "auto") for axis, size in vars(layout).items()):
                continue
            # Without a sharding stage fsdp is one more dp.
            zeros = (1, 2, 3) if layout.fsdp > 1 else (0,)
            for virtual in _virtual_stages(self.workload.model.num_layers, layout.pp):
                schedule = _schedule(layout.pp, virtual, kept.get("schedule"))
                for zero in zeros:
                    values = {**vars(layout), "zero": zero, "schedule": schedule, "virtual_stages": virtual}
                    if any(kept.get(key, value) != value for key, value in values.items() if key not in AXES):
                        continue
                    yield ParallelConfig(**kept | values)

    def batches(self, parallel: ParallelConfig) -> list[BatchPlan]:
        """By micro-batch, the smallest first; what a run would refuse goes to those rejected."""
        ranks = Layout.from_config(parallel).data_parallel
        if self.global_size % ranks:
            why = f"batch.global_size {self.global_size} is not a multiple of {ranks} data-parallel ranks"
            self._reject(parallel, Reason.BATCH, why)
            return []
        of_a_rank = self.global_size // ranks
        if self._is_refused(parallel, BatchPlan(self.global_size, 1, of_a_rank, ranks)):
            return []  # with the smallest micro-batches too
        asked = self.fixed.get("batch.micro_size"), self.fixed.get("batch.accumulation")
        micro_sizes = _micro_sizes(of_a_rank, *asked)
        if not micro_sizes:
            keys = ("batch.micro_size", "batch.accumulation")
            settings = " ".join(f"{key}={self.fixed[key]}" for key in keys if key in self.fixed)
            self._reject(parallel, Reason.BATCH, f"{settings} does not make {of_a_rank} samples of a rank")
        batches = [BatchPlan(self.global_size, micro, of_a_rank // micro, ranks) for micro in micro_sizes]
        return [batch for batch in batches if batch.micro_size == 1 or not self._is_refused(parallel, batch)]

    def _is_refused(self, parallel: ParallelConfig, batch: BatchPlan) -> bool:
        problems = refusals(self.workload, parallel, batch)
        if problems:
            micro = f", micro-batch {batch.micro_size}" if batch.micro_size > 1 else ""
            text = " ".join(problem.text for problem in problems)
            rules = tuple(problem.rule for problem in problems)
            self.result.rejected.append(Rejected(f"{degrees_in_words(parallel)}{micro}", Reason.REFUSED, text, rules))
        return bool(problems)

    def _that_fit(self, parallel: ParallelConfig, batches: list[BatchPlan]) -> list[LayoutChoice]:
        """For each micro-batch, with as little recomputation as it needs."""
        if not batches:
            return []
        least = state_memory(self.workload, parallel)
        if least > self.device.capacity:
            why = f"weights, gradients and Adam's moments alone are {self._too_much(least)}"
            self._reject(parallel, Reason.STATES, why, least)
            return []
        # A micro-batch that is all of a step has no gradients of earlier ones beside it: shards may hold far less.
        several = [batch for batch in batches if batch.accumulation > 1]
        alone = [batch for batch in batches if batch.accumulation == 1]
        return [choice for some in (several, alone) for choice in self._up_to_border(parallel, some)]

    def _up_to_border(self, parallel: ParallelConfig, batches: list[BatchPlan]) -> list[LayoutChoice]:
        """More recomputation, or a smaller micro-batch, never holds more: only those at the border are computed."""
        fitting: list[LayoutChoice] = []
        reject = self.result.rejected.append
        for mode in self._modes():
            border = len(fitting)
            for number, batch in enumerate(batches):
                choice = LayoutChoice(parallel, batch, mode)
                if number < border:
                    enough = fitting[number].recompute
                    reject(Rejected(str(choice), Reason.NEEDLESS, f"fits with recompute {enough} already", (enough,)))
                elif number > len(fitting):
                    smaller = batches[len(fitting)].micro_size
                    text = f"does not fit with micro-batch {smaller} either"
                    reject(Rejected(str(choice), Reason.LARGER_BATCH, text))
                elif (needed := peak_memory(self.workload, choice)) <= self.device.capacity:
                    fitting.append(choice)
                else:
                    reject(Rejected(str(choice), Reason.MEMORY, self._too_much(needed), needed=needed))
        return fitting

    def _too_much(self, needed: int) -> str:
        return f"{amount(needed)}, {amount(needed - self.device.capacity)} more than {self.device.name} has"

    def _modes(self) -> list[str]:
        """What may be recomputed. A fused kernel keeps no attention matrix that could be computed again."""
        model = self.workload.model
        fused = model.attention == "auto" and not (self.workload.on_cpu and model.dropout_attention)
        asked = self.fixed.get("train.recompute")
        useful = [mode for mode in RECOMPUTE if not (fused and mode == "core_attn")]
        return useful if asked is None else [asked]


def search(
    workload: Workload,
    device: Device,
    link: Link,
    devices: int,
    global_size: int,
    *,
    fixed: dict[str, Any] | None = None,
) -> SearchResult:
    """`fixed`: dotted keys of parallel, batch and train that are to stay as they are."""
    return Search(workload, device, link, global_size, fixed or {}).run(devices)


def _schedule(pp: int, virtual: int, asked: str | None) -> str:
    """That which is asked for, where it has an order for so many stages."""
    if pp > 1 and asked in STAGES_PER_RANK:
        least, most = STAGES_PER_RANK[asked]
        if least <= virtual <= most:
            return asked
    return "interleaved" if virtual > 1 else "1f1b"


def _virtual_stages(layers: int, pp: int) -> Iterator[int]:
    """1, and as many as leave every stage with as many layers."""
    yield 1
    if pp > 1:
        yield from (v for v in range(2, _MOST_VIRTUAL + 1) if layers % (pp * v) == 0)


def _micro_sizes(of_a_rank: int, asked: int | None, accumulation: int | None = None) -> list[int]:
    """Powers of two, for the sake of speed, or the one that is asked for."""
    sizes = [asked] if asked else [2**n for n in range(_MOST_MICRO.bit_length())]
    if accumulation:
        sizes = [size for size in [asked or of_a_rank // accumulation] if size * accumulation == of_a_rank]
    return [size for size in sizes if 0 < size <= of_a_rank and of_a_rank % size == 0]


def best_micro_size(workload: Workload, choice: LayoutChoice, device: Device, link: Link) -> int:
    """The fastest that fits, of a step of as many samples; 1 where none does."""
    batches = Search(workload, device, link, choice.batch.global_size).batches(choice.parallel)
    choices = [LayoutChoice(choice.parallel, batch, choice.recompute) for batch in batches]
    fitting = [each for each in choices if peak_memory(workload, each) <= device.capacity]
    fastest = min(fitting, key=lambda each: step_time(workload, each, device, link).total, default=None)
    return fastest.batch.micro_size if fastest else 1


def fewest_devices(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    global_size: int | None,
    *,
    fixed: dict[str, Any] | None = None,
) -> int | None:
    """The smallest number above `devices`, in whole machines where it takes more than one, that some layout fits on;
    of those that leave `fixed` as it is. Without a batch it is the usual one of so many devices."""
    fixed = fixed or {}
    # Whatever fits at all, fits with the smallest micro-batch or with all of a step in one (see _that_fit).
    least: list[dict[str, Any]] = [{"batch.micro_size": 1}, {"batch.accumulation": 1}]
    if fixed.keys() & {"batch.micro_size", "batch.accumulation"}:
        least = [{}]

    def fits(number: int) -> bool:
        batch = global_size or usual_batch(workload, number)
        settings = ({"train.recompute": "full"} | some | fixed for some in least)
        return any(search(workload, *hardware(number), number, batch, fixed=some).fits for some in settings)

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
