"""events.jsonl of a run, and the samples of bad steps beside it: read, described, forgotten."""

from pathlib import Path
from typing import Any, TypeGuard

from gptworks import run_paths
from gptworks.train import jsonl

NAME = run_paths.EVENTS
_WORTH_SAYING = 3.0  # deviations of a sample, in one line


def read(run: Path) -> list[dict[str, Any]]:
    return jsonl.entries(run / NAME)[0]


def read_samples(run: Path, event: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of the step, the one with the highest loss first; none where they were not written."""
    name = event.get("samples")
    if not isinstance(name, str) or Path(name).name != name:
        return []
    return [each for each in jsonl.entries(run / name, needs="sample")[0] if is_sample(each)]


def forget_after(run: Path, step: int, rollbacks: int) -> None:
    """Drop what a run that goes on from `step` will do again: a rollback is known to the checkpoint that it went back
    to, from the moment that it was saved with the samples to pass over."""
    if not (run / NAME).exists():
        return
    entries, _ = jsonl.entries(run / NAME)
    kept = [
        each for each in entries if each.get("back_to", each["step"]) <= step and each.get("rollback", 0) <= rollbacks
    ]
    for dropped in (each for each in entries if each not in kept):
        if isinstance(name := dropped.get("samples"), str) and Path(name).name == name:
            (run / name).unlink(missing_ok=True)
    jsonl.rewrite(run / NAME, kept)


def in_words(event: dict[str, Any]) -> str:
    """One line: what was found in which step, and what was done."""
    rules = {
        "nonfinite": "not finite",
        "loss": "a high loss",
        "grad_norm": "a high gradient norm",
        "sample_high": "a sample with a high loss",
        "sample_low": "a sample with a low loss",
    }
    done = {"update": "warned", "skip": "skipped", "rollback": "rolled back", "stop": "stopped"}
    decision = str(event.get("decision"))
    text = f"step {event['step']:,}: {rules.get(str(event.get('rule')), 'bad')}, {done.get(decision, decision)}"
    numbers = []
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        value, usual, z = event.get(name), event.get(f"usual_{name}"), event.get(f"{name}_z")
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        is_known = isinstance(usual, float) and isinstance(z, float)
        numbers.append(f"{title} {shown}" + (f" (usual {usual:.4g}, {z:+.1f} deviations)" if is_known else ""))
    for name, title in (("sample_high", "highest"), ("sample_low", "lowest")):
        if isinstance(z := event.get(f"{name}_z"), float) and z > _WORTH_SAYING:
            numbers.append(f"{title} sample {z:+.1f} deviations from the others")
    if (ranges := passed_over(event)) and isinstance(event.get("back_to"), int):
        listed = ", ".join(f"{first:,} to {end - 1:,}" for first, end in ranges)
        numbers.append(f"back to step {event['back_to']:,}; passed over so far: samples {listed}")
    return f"{text}; {'; '.join(numbers)}"


def passed_over(event: dict[str, Any]) -> list[tuple[int, int]]:
    """Ranges of samples, (first, end), that the run has passed over up to this event, as far as they can be read."""
    found = event.get("passed_over")
    pairs = [each for each in found if isinstance(each, list) and len(each) == 2] if isinstance(found, list) else []
    return [(first, end) for first, end in pairs if type(first) is type(end) is int]


def is_sample(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it has what `where` reads: files may have been damaged."""
    pieces = value.get("pieces") if isinstance(value, dict) else None
    known = {"document", "tokens", "characters", "text"}
    return isinstance(pieces, list) and all(isinstance(each, dict) and known <= each.keys() for each in pieces)


def where(sample: dict[str, Any]) -> str:
    """A sample's origin in words."""
    pieces = []
    for piece in sample["pieces"]:
        document = "" if piece["document"] is None else f"document {piece['document']}, "
        unit, (first, end) = ("characters", piece["characters"]) if piece["characters"] else ("tokens", piece["tokens"])
        pieces.append(f"{document}{unit} {first:,} to {end:,}")
    return f"{sample['store']}: {'; '.join(pieces)}"
