"""events.jsonl of a run, and the samples of bad steps beside it: read, described, forgotten."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from gptworks import run_paths
from gptworks.train import jsonl

NAME = run_paths.EVENTS
_SAMPLE_FILE = re.compile(r"bad-batch-\d+(-\d+)?\.jsonl")
_WORTH_SAYING = 3.0  # deviations of a sample, in one line
_SAID_BELOW = 0.5  # of the usual variety, there


def read(run: Path) -> list[dict[str, Any]]:
    return jsonl.entries(run / NAME)[0]


def read_samples(run: Path, event: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of the step, the one with the highest loss first; none where they were not written."""
    name = _sample_file(event)
    if name is None:
        return []
    return [each for each in jsonl.entries(run / name, needs="sample")[0] if is_sample(each)]


def _sample_file(event: dict[str, Any]) -> str | None:
    """The name of the file with its samples, and of no other file: what an event names is deleted with it."""
    name = event.get("samples")
    return name if isinstance(name, str) and _SAMPLE_FILE.fullmatch(name) else None


def forget_after(run: Path, step: int, rollbacks: int, say: Callable[[str], None]) -> None:
    """Drop what a run that goes on from `step` will do again: a rollback is known to the checkpoint that it went back
    to, from the moment that it was saved with the samples to pass over. `say` tells of lines that are no events."""

    def is_kept(event: dict[str, Any]) -> bool:
        number, back_to = event.get("rollback"), event.get("back_to")
        begins = back_to if type(back_to) is int else event["step"]
        return begins <= step and (type(number) is not int or number <= rollbacks)

    dropped, num_bad = jsonl.keep(run / NAME, is_kept)
    for name in filter(None, map(_sample_file, dropped)):
        (run / name).unlink(missing_ok=True)
    if num_bad:
        say(jsonl.about_bad(run / NAME, num_bad))


def in_words(event: dict[str, Any]) -> str:
    """One line: what was found in which step, and what was done."""
    rules = {
        "nonfinite": "not finite",
        "loss": "a high loss",
        "grad_norm": "a high gradient norm",
        "sample_high": "a sample with a high loss",
        "sample_low": "a sample with a low loss",
        "variety": "a sample that repeats itself",
    }
    done = {"update": "warned", "skip": "skipped", "rollback": "rolled back", "stop": "stopped"}
    decision = str(event.get("decision"))
    text = f"step {event['step']:,}: {rules.get(str(event.get('rule')), 'bad')}, {done.get(decision, decision)}"
    numbers = []
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        value, usual, z = event.get(name), event.get(f"usual_{name}"), event.get(f"{name}_z")
        written = f"{value:.4g}" if isinstance(value, float) else str(value)
        is_known = isinstance(usual, float) and isinstance(z, float)
        numbers.append(f"{title} {written}" + (f" (usual {usual:.4g}, {z:+.1f} deviations)" if is_known else ""))
    for name, title in (("sample_high", "highest"), ("sample_low", "lowest")):
        if isinstance(z := event.get(f"{name}_z"), float) and z > _WORTH_SAYING:
            numbers.append(f"{title} sample {z:+.1f} deviations from the others")
    if (share := share_of_variety(event)) is not None and share < _SAID_BELOW:
        numbers.append(f"variety of tokens in a sample {share:.0%} of the usual")
    if (ranges := passed_over(event)) and isinstance(event.get("back_to"), int):
        listed = ", ".join(f"{first:,} to {end - 1:,}" for first, end in ranges)
        numbers.append(f"back to step {event['back_to']:,}; passed over so far: samples {listed}")
    return f"{text}; {'; '.join(numbers)}"


def share_of_variety(event: dict[str, Any]) -> float | None:
    """That the most monotonous sample of the step has of the usual."""
    variety, usual = event.get("variety"), event.get("usual_variety")
    return variety / usual if isinstance(variety, float) and isinstance(usual, float) and usual > 0 else None


def passed_over(event: dict[str, Any]) -> list[tuple[int, int]]:
    """Ranges of samples, (first, end), that the run has passed over up to this event, as far as they can be read."""
    spans = event.get("passed_over")
    pairs = [each for each in spans if isinstance(each, list) and len(each) == 2] if isinstance(spans, list) else []
    return [(first, end) for first, end in pairs if type(first) is type(end) is int]


def is_sample(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it has what `where` reads: files may have been damaged."""
    pieces = value.get("pieces") if isinstance(value, dict) else None
    return isinstance(pieces, list) and isinstance(value.get("store"), str) and all(map(_is_piece, pieces))


def _is_piece(value: Any) -> bool:
    if not isinstance(value, dict) or not {"document", "tokens", "characters", "text"} <= value.keys():
        return False
    text, tokens, characters = value["text"], value["tokens"], value["characters"]
    return (text is None or isinstance(text, str)) and _is_pair(tokens) and (not characters or _is_pair(characters))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is type(value[1]) is int


def where(sample: dict[str, Any]) -> str:
    """A sample's origin in words."""
    pieces = []
    for piece in sample["pieces"]:
        document = "" if piece["document"] is None else f"document {piece['document']}, "
        unit, (first, end) = ("characters", piece["characters"]) if piece["characters"] else ("tokens", piece["tokens"])
        pieces.append(f"{document}{unit} {first:,} to {end:,}")
    return f"{sample['store']}: {'; '.join(pieces)}"
