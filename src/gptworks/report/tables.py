"""The tables of the page: what came out, what differs, and what each run was made of."""

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from gptworks.report.run_data import RunData
from gptworks.report.words import both

_MOST_ROWS = 200  # of steps that were not finite; a run that has more is shown by its first


def summary(runs: list[RunData]) -> list[str]:
    heads = ["run", "steps", "final loss", "held-out loss", "perplexity", "lowest at", "median speed"]
    rows = []
    for number, run in enumerate(runs):
        best, speeds = run.lowest("held_out_loss"), [value for _, value in run.curves.get("tokens_per_sec", [])]
        last = run.curves.get("loss", [])
        rows.append(
            [
                f'<span class="swatch run-{number}"></span>{escape(run.name)}',
                f"{last[-1][0]:,.0f}" if last else "",
                _number(run.last("loss")),
                _number(best[1] if best else None),
                _number(math.exp(best[1]) if best and best[1] < 700 else None),
                f"{best[0]:,.0f}" if best else "",
                f"{statistics.median(speeds):,.0f}" if speeds else "",
            ]
        )
    return [f"<h2>{both('summary')}</h2>", _table([both(head) for head in heads], rows, numbers=range(1, 7))]


def all_of(runs: list[RunData]) -> list[str]:
    parts = _differences(runs) if len(runs) > 1 else []
    for title, of_run in (
        ("configuration", _configuration),
        ("data", _data),
        ("checkpoints", _checkpoints),
        ("events", _events),
        ("environment", _environment),
    ):
        parts.append(f"<h2>{both(title)}</h2>")
        for run in runs:
            parts += [f"<h3>{escape(run.name)}</h3>"] if len(runs) > 1 else []
            parts += of_run(run)
    notes = [note for run in runs for note in _notes(run)]
    if notes:
        parts.append(f"<h2>{both('notes')}</h2><ul>{''.join(f'<li>{note}</li>' for note in notes)}</ul>")
    return parts


def _differences(runs: list[RunData]) -> list[str]:
    keys = [key for key in _keys(runs) if len({_json(run.config.get(key)) for run in runs}) > 1]
    if not keys:
        return [f"<h2>{both('differences')}</h2><p>{both('same')}</p>"]
    rows = [[f"<code>{escape(key)}</code>", *[_value(run.config.get(key)) for run in runs]] for key in keys]
    return [f"<h2>{both('differences')}</h2>", _table([both("key"), *[escape(run.name) for run in runs]], rows)]


def _keys(runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.config))


def _configuration(run: RunData) -> list[str]:
    if not run.config:
        return [f"<p>{both('nothing')}</p>"]
    return [
        f"<p>{both('changed')}</p>",
        _settings(run.changed),
        f"<details><summary>{both('all settings')}</summary>{_settings(run.config)}</details>",
    ]


def _settings(settings: dict[str, Any]) -> str:
    rows = [[f"<code>{escape(key)}</code>", _value(value)] for key, value in settings.items()]
    return _table([both("key"), both("value")], rows)


def _data(run: RunData) -> list[str]:
    read, rows = run.last("tokens"), []
    total = sum(store.tokens or 0 for store in run.stores)
    for store in run.stores:
        if store.tokens is None:
            rows.append([f"<code>{escape(store.path)}</code>", f'<span class="bad">{escape(store.missing)}</span>', ""])
            continue
        documents = f"{store.documents:,}" if store.documents is not None else ""
        rows.append([f"<code>{escape(store.path)}</code>", f"{store.tokens:,}", documents])
    parts = [_table([both("store"), both("tokens"), both("documents")], rows, numbers=(1, 2))] if rows else []
    if read is not None and total:
        # Of all that the stores have, held-out documents included: how far the run has come through its text.
        parts.append(f"<p>{both('epochs')}: {read / total:.3g} ({read:,.0f} / {total:,})</p>")
    return parts or [f"<p>{both('nothing')}</p>"]


def _checkpoints(run: RunData) -> list[str]:
    rows = []
    for each in run.checkpoints:
        marks = [both(mark) for mark, is_it in (("latest", each.is_latest), ("best", each.is_best)) if is_it]
        rows.append(
            [f"{each.step:,}", _number(each.held_out_loss), f"{each.bytes / 1e6:,.1f} MB", escape(each.layout or "1"),
             ", ".join(marks)]
        )  # fmt: skip
    heads = [both(head) for head in ("step", "held-out loss", "size", "layout")]
    return [_table([*heads, ""], rows, numbers=(0, 1, 2))] if rows else [f"<p>{both('nothing')}</p>"]


def _events(run: RunData) -> list[str]:
    if not run.nonfinite:
        return [f"<p>{both('no events')}</p>"]
    rows = [[f"{each['step']:,}", _value({k: v for k, v in each.items() if k != "step"})] for each in run.nonfinite]
    left = f"<p>... {len(rows) - _MOST_ROWS:,}</p>" if len(rows) > _MOST_ROWS else ""
    return [_table([both("step"), ""], rows[:_MOST_ROWS], numbers=(0,)) + left]


def _environment(run: RunData) -> list[str]:
    if not run.environment:
        return [f"<p>{both('nothing')}</p>"]
    found = dict(run.environment)
    command = found.pop("command", None)
    if isinstance(command, list):
        found = {"command": shlex.join(str(word) for word in command), **found}
    rows = [[f"<code>{escape(str(key))}</code>", _value(value)] for key, value in found.items()]
    return [_table([both("key"), both("value")], rows)]


def _notes(run: RunData) -> Iterable[str]:
    if run.num_unreadable:
        yield f"{escape(run.name)}: {run.num_unreadable:,} {both('unreadable')}"
    for note in run.notes:
        yield escape(note)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else _json(value)
    return f"<code>{escape(text)}</code>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """`numbers`: the columns that are set to the right."""
    right = set(numbers)

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=number' if column in right else ''}>{text}</{kind}>" for column, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'
