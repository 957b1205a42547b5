"""The training loop. What happens every n steps is a line in it; there are no callbacks."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gptworks.config.derive import require_end
from gptworks.config.schema import RunConfig
from gptworks.counted import counted
from gptworks.errors import ConfigError
from gptworks.launch import heartbeat, reporting
from gptworks.launch.ranks import Ranks
from gptworks.train import bad_step, evaluation, memory, optim, plot, resume, run_folder, schedule, text_inputs
from gptworks.train.metrics import Observer
from gptworks.train.run import Run
from gptworks.train.run_folder import Interrupts
from gptworks.train.setup import prepare
from gptworks.train.speed import FORWARD_BACKWARD, OPTIMIZER
from gptworks.train.step import backward, update


@dataclass(frozen=True)
class Outcome:
    folder: Path
    step: int
    held_out_loss: float | None
    stopped_by: str  # "end", "early stop", or the signal, such as "SIGTERM"

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to train: no signal has stopped the run."""
        return self.stopped_by in ("end", "early stop")


def train(
    cfg: RunConfig,
    *,
    resume_from: str = "never",
    command: list[str] | None = None,
    origins: Mapping[str, str] | None = None,
    observers: Sequence[Observer] = (),
) -> Outcome:
    """Pretrain or fine-tune. `resume_from`: never, auto (go on if there is a checkpoint), or a checkpoint folder.

    `command` and `origins` (where each setting that is not a default came from) are written down for the reader of the
    run. `observers` see each line of metrics.jsonl; the loop does not know them.

    >>> config = gptworks.load_config(preset="tiny", overrides=["data.path=data/corpus", "train.steps=100",
    ...                                                         "run.out=runs/mine"])   # doctest: +SKIP
    >>> gptworks.train(config).step   # doctest: +SKIP
    100
    """
    if not cfg.run.out:
        raise ConfigError("run", ["run.out: not set. Needed: the folder of the run, such as runs/first."])
    require_end(cfg.train)
    cfg = text_inputs.prepared(cfg, resume_from)
    setup = prepare(cfg)
    ranks = Ranks.shared(setup.world)
    here = resume_from  # a machine that was started again has not seen the starts before, and says something else
    resume_from = ranks.on_main(lambda: here)
    predicted = memory.check(cfg, setup, ranks)
    folder = Path(cfg.run.out)
    with ExitStack() as opened:
        ranks.on_main(lambda: _take(folder, resume_from, opened))
        run_folder.refuse_private(folder, ranks)
        opened.enter_context(memory.explained(setup.world, lambda: memory.predict(cfg, setup), predicted))
        interrupts = opened.enter_context(Interrupts())
        provenance = {"command": command or sys.argv, "origins": dict(origins or {}), "plan": predicted}
        run = opened.enter_context(Run(cfg, setup, folder, resume_from, provenance, ranks, observers))
        was_finished = run.progress.step >= run.setup.last_step
        stopped_by = _loop(cfg, run, interrupts)
        run.finish()
        run.console.say(_nothing_left(run) if was_finished else _farewell(stopped_by, run))
        return Outcome(folder, run.progress.step, run.progress.held_out_loss, stopped_by)


def _take(folder: Path, resume_from: str, opened: ExitStack) -> None:
    run_folder.refuse_foreign(folder, resume_from)
    opened.enter_context(run_folder.locked(folder))
    reporting.forget_ended(folder)


def _loop(cfg: RunConfig, run: Run, interrupts: Interrupts) -> str:
    last_step = run.setup.last_step
    run.part.train()
    while (step := run.progress.step + 1) <= last_step:
        heartbeat.note(f"step {step}")
        lr = schedule.lr_at(step, cfg.optim, last_step)
        optim.set_lr(run.optimizer, lr)
        batches = run.next_batches()
        with run.watch.timed(FORWARD_BACKWARD):
            gradients = backward(
                run.part, batches, run.setup.world, run.scaler, seed=cfg.train.seed, step=step, interrupts=interrupts
            )
        decision = bad_step.decide(run, step, gradients)
        if decision.good is not None:
            run.roll_back(decision.good, decision.damaged)
            continue
        wanted = decision.action == bad_step.UPDATE
        with run.watch.timed(OPTIMIZER):
            report = update(run.optimizer, gradients, run.scaler, clip=cfg.optim.clip, wanted=wanted)
        run.record(step, report)

        is_last = step == last_step
        if due(step, cfg.train.log_every) or is_last or not report.updated:
            run.log(step, lr, report)
        patience_is_over = False
        if run.setup.held_out and (due(step, run.setup.evaluate_every) or is_last):
            evaluation.evaluate(run)
            patience_is_over = 0 < cfg.evaluate.patience <= run.progress.evaluations_since_best
        stop = report.signal or ("early stop" if patience_is_over and not is_last else "")
        is_due = due(step, cfg.checkpoint.every) or run.is_time_to_save()
        if stop or is_last or is_due or (cfg.checkpoint.keep_best and run.is_best()):
            run.save()
        if stop:
            return stop
    return "end"


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _nothing_left(run: Run) -> str:
    """What is said of a run that was at its end before it was resumed."""
    name, end = next((name, end) for name, end in run.cfg.train.ends().items() if end)
    more = resume.command(run.folder, f"train.{name}={2 * end:g}", "--resume", "auto")
    return (
        f"nothing to do: the run has done its {counted(run.progress.step, 'step')} (train.{name}={end:g}). Ask for "
        f"more to go on, such as: {more}"
    )


def _farewell(stopped_by: str, run: Run) -> str:
    step, last_step = run.progress.step, run.setup.last_step
    if stopped_by == "end":
        return (
            f"done: {counted(step, 'step')}. Everything is in {run.folder}; the loss curve is {run.folder / plot.NAME}"
        )
    if stopped_by == "early stop":
        best_by = run.cfg.checkpoint.best_by.replace("held_out_loss", "held-out loss")
        return f"early stop after step {step}: no better {best_by} for {run.cfg.evaluate.patience} evaluations"
    go_on = resume.command(run.folder, "--resume", "auto")
    return f"{stopped_by}: stopped after step {step} of {last_step} and saved. Go on with: {go_on}"
