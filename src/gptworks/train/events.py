"""What the guard found and did: a line in events.jsonl for each, and the samples of the step in a file beside it."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.data.provenance import Origin
from gptworks.launch.ranks import Ranks
from gptworks.model import NOT_SCORED
from gptworks.train import jsonl
from gptworks.train.event_file import NAME
from gptworks.train.guard import GRAD_NORM, SAMPLE_LOW, VARIETY, Verdict
from gptworks.train.step import Gradients

_MOST_BATCHES = 100  # files of samples; a run that goes wrong all the time says nothing new
_SHOWN = 400  # characters of a text in a line of events.jsonl; all of it is in the file of the samples


@dataclass(frozen=True)
class EventLog:
    """The events of a run, written by its main process."""

    folder: Path
    ranks: Ranks
    origins: Callable[[list[int]], list[Origin]]  # of samples

    def record(
        self, step: int, gradients: Gradients, verdict: Verdict, sample_ids: list[int], **more: Any
    ) -> dict[str, Any] | None:
        """On all ranks, which know the same; the main process gets what it wrote."""
        entry = {
            "step": step,
            "rule": verdict.rule,
            "loss": _number(gradients.loss),
            "grad_norm": _number(gradients.grad_norm),
            **{f"{rule}_z": z for rule, z in verdict.deviations.items()},
            "sample_ids": sample_ids,
            **more,
        }
        if judged := [each for each in gradients.sample_varieties if each != NOT_SCORED]:
            entry["variety"] = min(judged)
        # All are in the order of samples, which is that of their numbers.
        losses = dict(zip(sample_ids, gradients.sample_losses, strict=True))
        varieties = dict(zip(sample_ids, gradients.sample_varieties, strict=True))
        return self.ranks.on_main(lambda: self._write(entry, losses, varieties))

    def _write(self, entry: dict[str, Any], losses: dict[int, float], varieties: dict[int, float]) -> dict[str, Any]:
        if len(list(self.folder.glob("bad-batch-*.jsonl"))) < _MOST_BATCHES:
            worst_first = _worst_first(entry["rule"], losses, varieties)
            samples = [
                {"sample": number, "loss": _number(losses[number]), "variety": varieties[number], **origin.as_json()}
                for number, origin in zip(worst_first, self.origins(worst_first), strict=True)
            ]
            name = _free_name(self.folder, entry["step"])
            jsonl.rewrite(self.folder / name, samples)
            entry = {**entry, "samples": name, "culprit": _shortened(samples[0])}
        jsonl.append(self.folder / NAME, entry)
        return entry


def _worst_first(rule: str, losses: dict[int, float], varieties: dict[int, float]) -> list[int]:
    """The least varied or the lowest loss first where that is what is wrong, that farthest from the middle where the
    loss does not tell, and else the highest; samples of which nothing is scored come last."""
    scored = [loss for loss in losses.values() if loss != NOT_SCORED and math.isfinite(loss)]
    middle = statistics.median(scored) if scored else 0.0

    def how_bad(number: int) -> float:
        loss = losses[number]
        if rule == VARIETY:
            return -math.inf if varieties[number] == NOT_SCORED else -varieties[number]
        if loss == NOT_SCORED:
            return -math.inf
        if not math.isfinite(loss):
            return math.inf
        return {SAMPLE_LOW: -loss, GRAD_NORM: abs(loss - middle)}.get(rule, loss)

    return sorted(losses, key=how_bad, reverse=True)


def _shortened(sample: dict[str, Any]) -> dict[str, Any]:
    pieces = [{**piece, "text": piece["text"][:_SHOWN] if piece["text"] else None} for piece in sample["pieces"]]
    return {**sample, "pieces": pieces}


def _free_name(run: Path, step: int) -> str:
    """A step may go wrong more than once when it is done again."""
    names = (f"bad-batch-{step}{f'-{number}' if number > 1 else ''}.jsonl" for number in range(1, 10**6))
    return next(name for name in names if not (run / name).exists())


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
