"""One process and a layout side by side: the same weights, losses and gradients, or the first tensor that differs."""

import json
import math
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks.config import checks
from gptworks.config.derive import BatchPlan, Layout, plan_batch, with_layout
from gptworks.config.schema import BatchConfig, DataConfig, ParallelConfig, RunConfig
from gptworks.data.store import locate_stores
from gptworks.errors import ConfigError, DataError, UsageError, VerificationError
from gptworks.launch import devices, supervise
from gptworks.launch.world import World
from gptworks.plan import machine, sizes
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.text_table import aligned
from gptworks.train.setup import prepare
from gptworks.verify import measure, rank, reference, scaled_model
from gptworks.verify.measure import LayoutResults, Numbers


@dataclass(frozen=True)
class Tolerance:
    loss: float  # absolute
    norm: float  # relative
    gradient: float  # of the largest number of the same tensor


# fp32: rounding stays below 2e-6 of a loss, the mildest mistake ever seen was 1e-5. In the short types every product
# is rounded, and a layout adds up in another order: only gross mistakes can be told from that.
TOLERANCES = {
    "fp32": Tolerance(5e-6, 5e-5, 1e-4),
    "bf16": Tolerance(5e-3, 2e-2, 1e-1),
    "fp16": Tolerance(1e-3, 1e-2, 5e-2),
}
PRELOAD = ("gptworks.verify.measure",)  # as in cli/train.py
# A gradient so much smaller than the largest of the model is rounding itself, such as that of a bias of the keys.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """What is run both ways, and what of the user's configuration had to be another."""

    layout: Layout
    one: RunConfig
    many: RunConfig
    batch: BatchPlan
    steps: int
    synthetic: bool
    notes: list[str]


@dataclass(frozen=True)
class Row:
    what: str
    one: str
    many: str
    difference: float
    allowed: float

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Result:
    comparison: Comparison
    rows: list[Row]
    first_divergence: str = ""  # name of the tensor
    verdict: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return all(row.is_equal for row in self.rows)

    def text(self) -> str:
        name = str(self.comparison.layout)
        lines = [("", "one process", name, "difference", "allowed")]
        lines += [(r.what, r.one, r.many, f"{r.difference:.1e}", f"{r.allowed:.0e}") for r in self.rows]
        return "\n".join([*self.comparison.notes, *self.notes, "", *aligned(lines, left=[0]), "", self.verdict])

    def as_dict(self) -> dict[str, Any]:
        rows = [{**vars(row), "equal": row.is_equal} for row in self.rows]
        return {
            "layout": str(self.comparison.layout),
            "equal": self.is_equal,
            "first_divergence": self.first_divergence or None,
            "verdict": self.verdict,
            "notes": [*self.comparison.notes, *self.notes],
            "compared": rows,
        }

    def require_equal(self) -> None:
        if not self.is_equal:
            raise VerificationError(self.verdict)


def verify_layout(cfg: RunConfig, layout: Layout, *, steps: int = 3, shrink: str = "auto") -> Result | int:
    """`shrink`: auto (if the model would not fit here), always, never. A number is the exit code of ranks that failed,
    which have said why."""
    comparison = plan(cfg, layout, steps=steps, shrink=shrink)
    folder = Path(tempfile.mkdtemp(prefix="gptworks-verify-"))
    logs = folder / "logs"
    code = 0
    try:
        numbers = record(comparison, folder)
        asked = {"config": comparison.many.model_dump(mode="json"), "steps": steps, "synthetic": comparison.synthetic}
        spec = folder / "spec.json"
        spec.write_text(json.dumps(asked), encoding="utf-8")
        command = ("-m", "gptworks.verify.rank", str(spec))
        job = supervise.Job(command, layout.world_size, logs, quiet=True, preload=PRELOAD)
        code = supervise.run(job)
        return code or judge(comparison, folder, numbers, LayoutResults.read(folder / rank.RESULT))
    finally:
        for path in folder.iterdir():
            if path != logs or not code:  # what the ranks said stays when they failed: the message speaks of it
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not code:
            folder.rmdir()


def record(comparison: Comparison, folder: Path) -> Numbers:
    """The side of one process, here."""
    one = comparison.one
    world = World(devices.pick_device(one.run.device))
    numbers = measure.record(one, world, comparison.steps, folder, synthetic=comparison.synthetic)
    if not reference.describe(folder, measure.GRADIENTS):
        advice = (
            "lower precision.scaler.init or raise --steps" if one.precision.compute == "fp16" else "see the weights"
        )
        raise VerificationError(
            f"no finite step in {comparison.steps} on one process: nothing to compare the gradients with; {advice}."
        )
    return numbers


def plan(cfg: RunConfig, layout: Layout, *, steps: int, shrink: str) -> Comparison:
    """Refuses what training with this layout would refuse."""
    if layout.world_size == 1:
        raise UsageError(
            "--layout: 1 is one process, and there is nothing to compare it with. Needed: such as tp2.pp2."
        )
    if steps < 1:
        raise UsageError(f"--steps: {steps}. Needed: 1 or more.")
    parallel = with_layout(cfg.parallel, layout)
    problems = checks.find({**dict(cfg), "parallel": parallel})
    if problems:
        raise ConfigError(f"layout {layout}", problems)
    batch = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel)
    choice = LayoutChoice(parallel, batch, cfg.train.recompute)
    own, notes = cfg, []
    fits_memory, reason = _fits(own, choice, steps)
    if shrink == "never" and not fits_memory:
        raise UsageError(
            f"--full: {reason}. Leave out --full, and a smaller model that is cut in the same way takes its place."
        )
    if shrink == "always" or (shrink == "auto" and reason):
        samples = batch.global_size
        cfg, choice = scaled_model.scale_down(cfg, choice)
        batch = choice.batch
        fits_memory, still = _fits(cfg, choice, steps)
        if not fits_memory:
            raise UsageError(f"--layout {layout}: {still}, even with a small model. Try a smaller layout.")
        why = f": {reason}" if reason and shrink == "auto" else ""
        changed = scaled_model.changes(own, cfg, ("model", "data", "init"))
        changed += [f"batch.global_size {samples} -> {batch.global_size}"] if samples != batch.global_size else []
        notes.append(f"a smaller model is compared, cut in the same way{why}\n  {'; '.join(changed)}")
    cfg, more = _comparable(cfg)
    synthetic, data_note = _find_data(cfg.data)
    m = cfg.model
    notes = [
        f"{layout}, {layout.world_size} processes on {cfg.run.device}: {m.num_layers} layers x {m.hidden_size}, "
        f"{m.num_heads} heads, vocabulary {m.vocab_size:,}; {sizes.num_parameters(m):,} parameters, "
        f"{cfg.precision.compute}",
        f"batch {batch.global_size} x {cfg.data.seq_len} tokens = {batch.micro_size} micro-batch "
        f"x {batch.accumulation} accumulation x {batch.data_parallel} data-parallel; {data_note}",
        *notes,
        *more,
    ]
    if cfg.precision.compute != "fp32":
        notes.append(
            f"in {cfg.precision.compute} rounding hides small mistakes: losses within "
            f"{TOLERANCES[cfg.precision.compute].loss:g} count as equal. precision.compute=fp32 compares to 5e-06"
        )
    # Both sides take the same micro-batches; one process takes those of all ranks.
    sizes_of_batch = BatchConfig(global_size=batch.global_size, micro_size=batch.micro_size)
    changed_sections: dict[str, Any] = {
        "batch": sizes_of_batch,
        "evaluate": cfg.evaluate.model_copy(update={"every": 1, "batches": 2, "patience": 0}),
        "checkpoint": cfg.checkpoint.model_copy(update={"keep_best": False}),
    }
    if not (cfg.train.steps or cfg.train.epochs or cfg.train.tokens):
        changed_sections["train"] = cfg.train.model_copy(update={"steps": steps})
    one = cfg.model_copy(update={**changed_sections, "parallel": ParallelConfig()})
    if not synthetic:
        one, held_out_note = _with_held_out(one)
        notes += held_out_note
    return Comparison(layout, one, one.model_copy(update={"parallel": parallel}), batch, steps, synthetic, notes)


def _fits(cfg: RunConfig, choice: LayoutChoice, steps: int) -> tuple[bool, str]:
    """Whether memory is enough, and why the whole would not be wise; "" = nothing against it."""
    workload = Workload.from_config(cfg, "cpu" if cfg.run.device in ("auto", "cpu") else "cuda")
    needed, available = scaled_model.memory_needed(workload, choice), machine.memory_available()
    if needed > available:
        return (
            False,
            f"{choice.layout} needs about {needed / 1e9:,.1f} GB on this machine, {available / 1e9:,.1f} GB are free",
        )
    flop = scaled_model.work(workload, steps * choice.batch.global_size)
    if flop > scaled_model.MOST_WORK and cfg.run.device == "cpu":
        return (
            True,
            f"{steps} steps are {flop:.1e} FLOP, more than {scaled_model.MOST_WORK:.0e}, which take ten minutes or so",
        )
    return True, ""


def _comparable(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Without what no two layouts have in common, or what only costs time."""
    no_dropout = dict.fromkeys(("dropout_embed", "dropout_hidden", "dropout_attention"), 0.0)
    changed = cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update=no_dropout),
            "train": cfg.train.model_copy(update={"compile": False}),
        }
    )
    notes = []
    if changed.model != cfg.model:
        notes.append("dropout is off: what is dropped depends on the layout")
    if changed.train != cfg.train:
        notes.append("train.compile is off")
    return changed, notes


def _find_data(data: DataConfig) -> tuple[bool, str]:
    """Whether tokens are to be made up, and what is read."""
    if not data.path:
        return True, "random tokens (data.path is not set)"
    try:
        for path in (*data.path, *data.held_out_path):
            locate_stores(path)
    except DataError as error:
        return True, f"random tokens ({str(error).splitlines()[0]})"
    return False, f"data of {', '.join(data.path)}"


def _with_held_out(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with evaluation, if the data has something to evaluate on."""
    if cfg.data.held_out_path or (len(cfg.data.split) > 1 and cfg.data.split[1]):
        try:
            prepare(cfg, World(devices.pick_device("cpu")))
            return cfg, []
        except DataError as error:
            reason = str(error).splitlines()[0]
    else:
        reason = "data.split leaves nothing"
    without = cfg.model_copy(update={"evaluate": cfg.evaluate.model_copy(update={"every": 0})})
    return without, [f"no held-out loss: {reason}"]


def judge(comparison: Comparison, folder: Path, one: Numbers, results: LayoutResults) -> Result:
    allowed = TOLERANCES[comparison.one.precision.compute]
    rows, notes, first = [], [], ""
    for kind, what, limit in (
        (measure.WEIGHTS, "weights at step 0", 0.0),
        (measure.GRADIENTS, "gradients of the first update", allowed.gradient),
    ):
        wanted = reference.describe(folder, kind)
        differences = _relative(wanted, results.tensors[kind])
        worst = max(differences, key=lambda name: differences[name])
        rows.append(
            Row(what, f"{len(wanted)} tensors", worst if differences[worst] else "equal", differences[worst], limit)
        )
        wrong = [name for name, difference in differences.items() if difference > limit]
        if wrong and not first:
            first = f"{wrong[0]} ({what}), by {differences[wrong[0]]:.2g} of its largest number; allowed {limit:.0e}"
            rest = f" {len(wrong) - 1} of the other {len(differences) - 1} tensors diverge too." if wrong[1:] else ""
            first_name, first = wrong[0], first + "." + rest
    for name, limit, is_relative in (("losses", allowed.loss, False), ("grad_norms", allowed.norm, True)):
        for step, value in enumerate(getattr(one, name)):
            what = f"{'loss' if name == 'losses' else 'gradient norm'}, step {step + 1}"
            theirs = [getattr(n, name)[step] for n in results.numbers]
            if any(math.isfinite(number) for number in (value, *theirs)):
                rows.append(_row(what, value, theirs, limit, is_relative))
            else:  # an overflow of fp16, which both sides skip
                notes.append(f"{what}: not finite on either side, so it is not compared")
    if one.held_out is not None:
        theirs = [math.nan if n.held_out is None else n.held_out for n in results.numbers]
        rows.append(_row("held-out loss", one.held_out, theirs, allowed.loss, False))
    result = Result(comparison, rows, first_name if first else "")
    return Result(comparison, rows, result.first_divergence, _verdict(result, first), notes)


def _verdict(result: Result, first: str) -> str:
    layout = result.comparison.layout
    if result.is_equal:
        return f"{layout} equals one process."
    wrong = [row for row in result.rows if not row.is_equal]
    lines = [f"{layout} is not equal to one process. Different: {', '.join(row.what for row in wrong)}."]
    if first:
        lines.append(f"First tensor that diverges, in the order of the model: {first}")
    if result.first_divergence and not any(row.what.startswith("weights") for row in wrong):
        forward = any(row.what == "loss, step 1" for row in wrong)
        agrees = "differs too: look at the forward pass" if forward else "agrees: it is the backward pass that differs"
        lines.append(f"The loss of step 1 {agrees}.")
    return "\n".join(lines)


def _relative(wanted: dict[str, reference.Described], compared: dict[str, reference.Compared]) -> dict[str, float]:
    """The difference of each tensor, in the order of the model, as a part of its largest number."""
    floor = _NEGLIGIBLE * max(tensor.largest for tensor in wanted.values())
    differences = {}
    for name in [*wanted, *(name for name in compared if name not in wanted)]:
        if name not in wanted or name not in compared or compared[name].num_seen < wanted[name].size:
            differences[name] = math.inf  # nobody has it, or a piece of it
        else:
            differences[name] = measure.relative(compared[name].difference, max(wanted[name].largest, floor))
    return differences


def _row(what: str, one: float, ranks: list[float], limit: float, is_relative: bool) -> Row:
    """The rank that is farthest away speaks for all."""

    def difference(value: float) -> float:
        error = abs(value - one) / (abs(one) if is_relative and one else 1.0)
        return error if math.isfinite(error) else math.inf

    farthest = max(ranks, key=difference)
    return Row(what, f"{one:.7f}", f"{farthest:.7f}", difference(farthest), limit)
