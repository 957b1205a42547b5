"""A step whose loss or gradient is not finite, or far above those before it: what is done about it and said of it."""

import json
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.checkpoint import manifest as manifests
from gptworks.config.load import flatten
from gptworks.config.schema import OptimConfig
from gptworks.errors import CheckpointError, DamagedCheckpoint, TrainingError
from gptworks.launch.ranks import Ranks
from gptworks.train import event_file, guard, resume, schedule
from gptworks.train.guard import Verdict
from gptworks.train.metrics import NONFINITE
from gptworks.train.step import Gradients

if TYPE_CHECKING:
    from gptworks.train.run import Run


UPDATE, SKIP, ROLLBACK, STOP = "update", "skip", "rollback", "stop"


@dataclass(frozen=True)
class Decision:
    """What is done about a step, and for a rollback the checkpoint it goes back to."""

    action: str
    why: str = ""  # of a stop
    good: Path | None = None
    damaged: dict[Path, str] = field(default_factory=dict)  # newer checkpoints, and what is wrong with them


def decide(run: "Run", step: int, gradients: Gradients) -> Decision:
    """Between the gradients of a step and its update, on all ranks: they have the same numbers and decide the same.

    A bad step is written down with its samples. Raises where training is to stop.
    """
    numbers = gradients.loss, gradients.grad_norm, gradients.sample_losses, gradients.sample_varieties
    verdict = run.guard.judge(*numbers)
    if not verdict.rule:
        run.guard.learn(*numbers)
        return Decision(UPDATE)
    sample_ids = sorted(set().union(*run.ranks.gather(gradients.sample_ids)))
    if verdict.rule == guard.NONFINITE and run.ranks.is_main:
        _write_down(run.folder / NONFINITE, step, gradients, sample_ids)
    is_overflow = verdict.rule == guard.NONFINITE and _is_overflow(run, gradients)
    decision = _decision(run, verdict, is_overflow=is_overflow)
    event = None
    if run.cfg.train.guard.action != "off" and not is_overflow:
        more = {"decision": decision.action, **run.guard.expected(), **_of_rollback(run, decision)}
        event = run.events.record(step, gradients, verdict, sample_ids, **more)
    if decision.action == STOP:
        raise TrainingError(_stop_text(run, step, gradients, verdict, decision.why, sample_ids))
    if decision.action == UPDATE:
        run.guard.learn(*numbers)
    run.console.say(f"step {step}: {verdict}, {_in_words(run, decision)}; {_samples_in(run, event)}")
    return decision


def _is_overflow(run: "Run", gradients: Gradients) -> bool:
    """With fp16 a gradient that overflows is part of the method: the scale shrinks and the step is skipped. A loss that
    is not finite does not come from the scale; only the guard looks so closely."""
    is_scaled = run.scaler.enabled and gradients.loss_scale > run.cfg.precision.scaler.floor
    return is_scaled and (run.cfg.train.guard.action == "off" or math.isfinite(gradients.loss))


def _decision(run: "Run", verdict: Verdict, *, is_overflow: bool) -> Decision:
    """`train.nonfinite` is the first rule: `skip` skips; `stop` leaves it to a guard that does something."""
    cfg, action = run.cfg.train, run.cfg.train.guard.action
    if verdict.rule == guard.NONFINITE:
        if is_overflow or cfg.nonfinite == "skip":
            action = "skip"
        elif action in ("off", "warn"):
            return Decision(STOP, "train.nonfinite: stop")
    if action == "warn":
        return Decision(UPDATE)
    if action == "rollback":
        if run.progress.rollbacks >= cfg.guard.max_rollbacks:
            return Decision(STOP, f"train.guard.max_rollbacks: {cfg.guard.max_rollbacks}")
        good, damaged = _newest_sound_and_whole(run, scheduled=True)
        if good is not None:
            return Decision(ROLLBACK, good=good, damaged=damaged)
    if run.progress.skipped_in_a_row + 1 >= cfg.max_skips:
        return Decision(STOP, f"train.max_skips: {cfg.max_skips} in a row")
    return Decision(SKIP)


def _newest_sound_and_whole(run: "Run", *, scheduled: bool = False) -> tuple[Path | None, dict[Path, str]]:
    """A checkpoint that training went on well after, whose files are as they were written; and damaged newer ones."""
    damaged: dict[Path, str] = {}
    ranks = run.ranks
    while (good := run.saving.newest_sound(run.losses, scheduled=scheduled, without=damaged)) is not None:
        try:
            ranks.on_all(partial(_require_whole, good, ranks))
            return good, damaged
        except DamagedCheckpoint as error:
            damaged[good] = str(error)
    return None, damaged


def _require_whole(checkpoint: Path, ranks: Ranks) -> None:
    """Each rank looks at a share of the files."""
    manifests.verify(checkpoint, manifests.read(checkpoint), share=ranks.rank, shares=ranks.size)


def _of_rollback(run: "Run", decision: Decision) -> dict[str, Any]:
    """What an event says of a rollback besides."""
    if decision.good is None:
        return {}
    good = decision.good
    manifest = run.ranks.on_main(lambda: manifests.read(good))
    passed_over = run.batches.passed_over.adding(manifest.consumed, run.batches.consumed)
    return {
        "rollback": run.progress.rollbacks + 1,
        "back_to": manifest.step,
        "passed_over": passed_over.as_json(),
    }


def _in_words(run: "Run", decision: Decision) -> str:
    if decision.action == UPDATE:
        return "only warned of (train.guard.action: warn)"
    if decision.action == ROLLBACK:
        most = run.cfg.train.guard.max_rollbacks
        return f"back to {decision.good} (rollback {run.progress.rollbacks + 1} of at most {most})"
    missing = ", for want of a good checkpoint to go back to" if run.cfg.train.guard.action == "rollback" else ""
    return f"skipped ({run.progress.skipped_in_a_row + 1} in a row{missing})"


def _samples_in(run: "Run", event: dict[str, Any] | None) -> str:
    if event is None:
        return f"samples in {run.folder / NONFINITE}"
    if "culprit" not in event:
        return f"see {run.folder / event_file.NAME}"
    return f"samples in {run.folder / event['samples']}, the worst of {event_file.where(event['culprit'])}"


def _stop_text(run: "Run", step: int, gradients: Gradients, verdict: Verdict, why: str, sample_ids: list[int]) -> str:
    """Why training stops, and how to go on."""
    ids = ", ".join(str(i) for i in sample_ids[:8]) + (", ..." if len(sample_ids) > 8 else "")
    details = run.folder / (NONFINITE if verdict.rule == guard.NONFINITE else event_file.NAME)
    good, _ = _newest_sound_and_whole(run)
    return (
        f"step {step}: loss {gradients.loss:g}, gradient norm {gradients.grad_norm:g} in samples {ids}: {verdict}, "
        f"so training stopped ({why}). The samples are written down in {details}.\n"
        f"{_kept_apart(run, good)}{_advice(run, good)}"
    )


def _write_down(details: Path, step: int, gradients: Gradients, sample_ids: list[int]) -> None:
    entry = {
        "step": step,
        "loss": str(gradients.loss),
        "grad_norm": str(gradients.grad_norm),
        "loss_scale": gradients.loss_scale,
        "sample_ids": sample_ids,
    }
    with details.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _kept_apart(run: "Run", good: Path | None) -> str:
    """Save the state before the bad step, which may have gone wrong already; the samples of the step come again.

    Where it was saved under the name of a checkpoint before this was known, it loses that name to the good one.
    """
    step, checkpoints = run.progress.step, run.saving.checkpoints
    run.saving.wait()
    kept: Path | None = None
    if step and not run.ranks.on_main(lambda: step in checkpoints.steps()):  # which can be had again, as a fresh start
        run.batches.consumed -= run.setup.batch.global_size
        try:
            kept = run.save_apart()
        except CheckpointError as error:
            return f"The state before this step could not be kept: {error}\n"
    apart = run.ranks.on_main(lambda: checkpoints.put_apart(good)) if good else []
    if not (kept or apart):
        return ""
    return f"The state before this step is kept apart, where --resume auto does not find it: {kept or apart[-1]}\n"


def _advice(run: "Run", good: Path | None) -> str:
    if good is None:
        begin = resume.command(run.folder, "--out", _another(run.folder), *_lower_rate(run.cfg.optim, run.cfg.optim.lr))
        return f"No checkpoint is known to be good. Begin again with a lower rate:\n  {begin}"
    manifest = run.ranks.on_main(lambda: manifests.read(good))
    highest = schedule.highest_until(manifest.step, run.cfg.optim, run.setup.last_step)
    tried = min(flatten(manifest.config).get("optim.lr", highest), highest)
    go_on = resume.command(run.folder, "--resume", str(good), *_lower_rate(run.cfg.optim, tried))
    return (
        f"The last good checkpoint is {good}. Go on from it with a lower rate:\n  {go_on}\n"
        "A longer optim.warmup_steps or train.nonfinite=skip may help, too."
    )


def _lower_rate(optim: OptimConfig, tried: float) -> list[str]:
    """Half of what it was, or the highest rate that the good checkpoint was trained with if that is lower."""
    rate = float(f"{min(optim.lr / 2, tried or optim.lr):.2g}")
    lowest = [f"optim.min_lr={rate / 10:.2g}"] if optim.min_lr > rate else []
    return [f"optim.lr={rate:g}", *lowest]


def _another(folder: Path) -> str:
    return next(str(path) for n in range(2, 10**6) if not (path := folder.with_name(f"{folder.name}-{n}")).exists())
