"""A step whose loss or gradient is not finite: it is skipped, or the run stops and says how to go on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks.checkpoint import manifest as manifests
from gptworks.config.load import flatten
from gptworks.config.schema import OptimConfig
from gptworks.errors import CheckpointError, TrainingError
from gptworks.train import resume, schedule
from gptworks.train.metrics import NONFINITE
from gptworks.train.step import StepReport

if TYPE_CHECKING:
    from gptworks.train.run import Run


def handle_nonfinite(run: "Run", step: int, report: StepReport) -> None:
    """Write down its samples; stop unless it may be skipped."""
    sample_ids = report.sample_ids
    if run.ranks.size > 1:
        sample_ids = sorted(set().union(*run.ranks.gather(sample_ids)))
    details = run.folder / NONFINITE
    if run.ranks.is_main:
        _write_down(details, step, report, sample_ids)
    cfg = run.cfg.train
    # With fp16 an overflow is part of the method: the scale shrinks and the step is skipped.
    is_overflow = run.scaler.enabled and report.loss_scale > run.cfg.precision.scaler.floor
    skips = run.progress.skipped_in_a_row + 1
    if (cfg.nonfinite == "skip" or is_overflow) and skips < cfg.max_skips:
        run.console.say(f"step {step}: not finite, skipped ({skips} in a row); samples in {details}")
        return
    why = "train.nonfinite: stop" if skips < cfg.max_skips else f"train.max_skips: {cfg.max_skips} in a row"
    ids = ", ".join(str(i) for i in sample_ids[:8]) + (", ..." if len(sample_ids) > 8 else "")
    raise TrainingError(
        f"step {step}: loss {report.loss:g}, gradient norm {report.grad_norm:g} in samples {ids}: not finite, "
        f"so training stopped ({why}). The samples are written down in {details}.\n{_kept_apart(run)}{_advice(run)}"
    )


def _write_down(details: Path, step: int, report: StepReport, sample_ids: list[int]) -> None:
    entry = {
        "step": step,
        "loss": str(report.loss),
        "grad_norm": str(report.grad_norm),
        "loss_scale": report.loss_scale,
        "sample_ids": sample_ids,
    }
    with details.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _kept_apart(run: "Run") -> str:
    """Save the state before the bad step, which may have gone wrong already; the samples of the step come again."""
    step, checkpoints = run.progress.step, run.saving.checkpoints
    run.saving.wait()
    if step == 0 or run.ranks.main_does(lambda: step in checkpoints.steps()):
        return ""  # a fresh start and a checkpoint can be had again
    run.batches.consumed -= run.setup.batch.global_size
    try:
        path = run.save_apart()
    except CheckpointError as error:
        return f"The state before this step could not be kept: {error}\n"
    return f"The state before this step is kept apart, where --resume auto does not find it: {path}\n"


def _advice(run: "Run") -> str:
    good = run.saving.newest_sound(run.losses)
    if good is None:
        begin = resume.command(run.folder, "--out", _another(run.folder), *_lower_rate(run.cfg.optim, run.cfg.optim.lr))
        return f"No checkpoint is known to be good. Begin again with a lower rate:\n  {begin}"
    manifest = run.ranks.main_does(lambda: manifests.read(good))
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
