"""Evaluation in the middle of training: the held-out loss, tasks, and texts that the model writes."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks.checkpoint import portable
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.counted import counted
from gptworks.errors import GPTWorksError, TrainingError
from gptworks.evaluate import registry
from gptworks.evaluate import run as evaluating
from gptworks.evaluate.heldout import HeldOut, held_out_loss
from gptworks.generate import engine
from gptworks.train import jsonl, resume, what_is_measured
from gptworks.train.metrics import EVALUATIONS, TEXTS
from gptworks.train.what_is_measured import HELD_OUT_LOSS, is_higher_better

if TYPE_CHECKING:
    from gptworks.train.run import Run

_WEIGHTS = ".evaluating"  # in the run folder, while the main process reads them


def evaluate(run: "Run") -> None:
    """On all ranks, which know the same afterwards: what follows from it must be the same everywhere."""
    run.console.doing("evaluating")
    try:
        with run.watch.paused():
            held_out = _held_out(run)
            measured = {HELD_OUT_LOSS: held_out.loss, **_of_whole_model(run)}
    except GPTWorksError as error:  # the data of a task have gone or have changed since the run began
        run.save()
        run.saving.wait()
        raise _not_measured(run, error) from error
    run.console.doing("")
    progress = run.progress
    before = progress.held_out_samples
    if not progress.measured_on(held_out.samples):
        run.console.say(
            f"step {progress.step}: evaluated on {counted(held_out.samples, 'sample')}, before on "
            f"{before or 'an unknown number'}: the best so far is chosen anew"
        )
    progress.held_out_loss = held_out.loss if math.isfinite(held_out.loss) else None
    best_by = run.cfg.checkpoint.best_by
    is_best = progress.see(best_by, measured, higher_is_better=is_higher_better(best_by))
    run.metrics.log(progress.step, {**measured, "held_out_tokens": held_out.tokens})
    listed = "".join(f", {name} {_short(value)}" for name, value in measured.items() if _is_result(name))
    run.console.say(
        f"step {progress.step}: held-out loss {held_out.loss:.4f} over {held_out.tokens:,} tokens{listed}"
        + (", the best so far" if is_best else "")
    )


def _of_whole_model(run: "Run") -> dict[str, float]:
    """Tasks and texts: what a single process does with all weights."""
    if not (run.cfg.evaluate.tasks or run.cfg.train.sample_prompts):
        return {}
    with _whole_weights(run) as folder:
        measured = run.ranks.on_main(lambda: _measure_tasks(run, folder))
        run.ranks.on_main(lambda: _write_texts(run, folder))
    return measured


def _not_measured(run: "Run", error: GPTWorksError) -> TrainingError:
    go_on = resume.command(run.folder, "--resume", "auto")
    return TrainingError(
        f"step {run.progress.step}: the evaluation failed, so training stopped and saved: {error}\n"
        f"Mend that, or leave it out of evaluate.tasks, and go on with: {go_on}"
    )


def _is_result(name: str) -> bool:
    """Not what was counted or is the same each time; metrics.jsonl has all of it."""
    return name != HELD_OUT_LOSS and not name.endswith(("_total", "_ratio"))


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def _held_out(run: "Run") -> HeldOut:
    assert run.setup.held_out is not None
    mine = held_out_loss(
        run.part,
        run.setup.held_out,
        run.setup.dataset.eod_policy,
        micro_size=run.setup.batch.micro_size,
        num_samples=run.cfg.evaluate.batches * run.setup.batch.global_size,
        device=run.setup.world.device,
        world=run.setup.world,
    )
    return run.ranks.on_main(lambda: mine)  # the same everywhere, to the last bit


@contextmanager
def _whole_weights(run: "Run") -> Iterator[Path]:
    """The present weights as a folder that `gptworks eval` and `generate` read, from whatever ranks hold them."""
    folder, tokenizer = run.folder / _WEIGHTS, run.setup.dataset.tokenizer
    assert tokenizer is not None  # `check` has looked
    weights = {name.removeprefix("model."): tensor for name, tensor in run.state().items() if name.startswith("model.")}
    run.ranks.on_main(lambda: shutil.rmtree(folder, ignore_errors=True))
    portable.write(folder, run.cfg.model, weights, run.ranks, eod_id=tokenizer.eod_id, bos_id=tokenizer.bos_id)
    run.ranks.on_main(lambda: tokenizer.save(folder))
    try:
        yield folder
    finally:
        if run.ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _measure_tasks(run: "Run", folder: Path) -> dict[str, float]:
    measured: dict[str, float] = {}
    for request in what_is_measured.requests(run.cfg.evaluate, run.setup.world.device.type):
        name = request.task
        result = evaluating.evaluate([str(folder)], request)
        row = result["rows"][0]
        values = {metric: row[metric] for metric in registry.find(name).metrics if row.get(metric) is not None}
        entry = {"step": run.progress.step, **{key: result[key] for key in ("task", "protocol", "data", "limit")}}
        jsonl.append(run.folder / EVALUATIONS, {**entry, "values": values})
        measured |= {f"{name}_{metric}": float(value) for metric, value in values.items()}
    return measured


def _write_texts(run: "Run", folder: Path) -> None:
    """Greedy: the same weights write the same text."""
    cfg = run.cfg.train
    if not cfg.sample_prompts:
        return
    model = PretrainedGPT.from_pretrained(folder, device=run.setup.world.device.type)
    settings = {"strategy": "greedy", "max_new_tokens": cfg.sample_tokens, "window": "slide", "seed": 0}
    for written in engine.generations(model, list(cfg.sample_prompts), **settings):
        jsonl.append(run.folder / TEXTS, {"step": run.progress.step, "prompt": written.prompt, "text": written.text})
