"""The tables of the page: what came out, what differs, and what each run was made of."""

import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from gptworks.report.run_data import RunData
from gptworks.report.words import both
from gptworks.train import event_file

_MOST_ROWS = 200  # of bad steps; a run that has more is shown by its first
_MOST_TEXTS, _MOST_CHARACTERS = 60, 600  # of texts, and of each


def summary(runs: list[RunData]) -> list[str]:
    heads = ["run", "steps", "tokens", "final loss", "lowest held-out", "perplexity", "lowest at", "median speed"]
    rows = []
    for number, run in enumerate(runs):
        best, speeds = run.lowest("held_out_loss"), [value for _, value in run.curves.get("tokens_per_sec", [])]
        last = run.curves.get("loss", [])
        rows.append(
            [
                f'<span class="swatch run-{number}"></span>{escape(run.name)}',
                f"{last[-1][0]:,.0f}" if last else "",
                f"{read:,.0f}" if (read := run.last("tokens")) is not None else "",
                _number(run.last("loss")),
                _number(best[1] if best else None),
                _number(math.exp(best[1]) if best and best[1] < 700 else None),
                f"{best[0]:,.0f}" if best else "",
                f"{statistics.median(speeds):,.0f}" if speeds else "",
            ]
        )
    return [_title("summary"), _table([both(head) for head in heads], rows, numbers=range(1, 8))]


def contents(runs: list[RunData]) -> str:
    """Links to the parts of the page."""
    titles = ["summary", "curves", *(["differences"] if len(runs) > 1 else []), *_SECTIONS]
    return f"<nav>{''.join(f'<a href=#{title}>{both(title)}</a>' for title in titles)}</nav>"


def all_of(runs: list[RunData]) -> list[str]:
    """What happened comes before what the runs were made of. Runs of which there is nothing to say are left out."""
    parts = _differences(runs) if len(runs) > 1 else []
    for title, of_run in _SECTIONS.items():
        filled = [(number, run.name, rows) for number, run in enumerate(runs) if (rows := of_run(run))]
        parts.append(_title(title))
        parts += [] if filled else [f"<p>{both('nothing' if title in _ALWAYS else 'no events')}</p>"]
        for number, name, rows in filled:
            head = f'<h3><span class="swatch run-{number}"></span>{escape(name)}</h3>' if len(runs) > 1 else ""
            parts.append(f'<section class="of-run run-{number}">{head}{"".join(rows)}</section>')
    notes = [note for run in runs for note in _notes(run)]
    if notes:
        parts.append(f"{_title('notes')}<ul>{''.join(f'<li>{note}</li>' for note in notes)}</ul>")
    return parts


def _title(key: str) -> str:
    return f'<h2 id="{key}">{both(key)}</h2>'


def _differences(runs: list[RunData]) -> list[str]:
    keys = [key for key in _keys(runs) if len({_json(run.config.get(key)) for run in runs}) > 1 and key != "run.out"]
    if not keys:
        return [_title("differences"), f"<p>{both('same')}</p>"]
    rows = [[f'<code class="key">{escape(key)}</code>', *[_value(run.config.get(key)) for run in runs]] for key in keys]
    return [_title("differences"), _table([both("key"), *[escape(run.name) for run in runs]], rows)]


def _keys(runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.config))


def _configuration(run: RunData) -> list[str]:
    if not run.config:
        return []
    return [
        f"<p>{both('changed')}</p>",
        _settings(run.changed, run.origins),
        f"<details><summary>{both('all settings')}</summary>{_settings(run.config, run.origins)}</details>",
    ]


def _settings(settings: dict[str, Any], origins: dict[str, str]) -> str:
    """With where each came from, where that was written down."""
    rows = [
        [f'<code class="key">{escape(key)}</code>', _value(value), *([escape(origins.get(key, ""))] if origins else [])]
        for key, value in settings.items()
    ]
    return _table([both("key"), both("value"), *([both("origin")] if origins else [])], rows)


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
    if stages := run.config.get("data.stages"):
        parts.append(_stages(stages))
    if read is not None and total:
        # Of all that the stores have, held-out documents included: how far the run has come through its text.
        parts.append(f"<p>{both('epochs')}: {read / total:.3g} ({read:,.0f} / {total:,})</p>")
    return parts


def _stages(stages: Any) -> str:
    """The shares of the stores over time."""
    rows = [
        [f"{each.get('from_tokens', 0):,.0f}", f"{each.get('to_tokens') or math.inf:,.0f}".replace("inf", "…"),
         " : ".join(f"{weight:g}" for weight in each.get("weights", ()))]
        for each in stages
    ]  # fmt: skip
    return _table([both("from tokens"), both("to tokens"), both("weights")], rows, numbers=(0, 1))


def _checkpoints(run: RunData) -> list[str]:
    rows = []
    for each in run.checkpoints:
        marks = [both(mark) for mark, is_it in (("latest", each.is_latest), ("best", each.is_best)) if is_it]
        rows.append(
            [f"{each.step:,}", _number(each.held_out_loss), f"{each.bytes / 1e6:,.1f} MB", escape(each.layout or "1"),
             ", ".join(marks)]
        )  # fmt: skip
    heads = [both(head) for head in ("step", "held-out loss", "size", "layout")]
    return [_table([*heads, ""], rows, numbers=(0, 1, 2))] if rows else []


def _plan(run: RunData) -> list[str]:
    """Where the time of a step goes, and memory as the plan had it and as it was."""
    written = run.environment.get("plan")
    plan = written if isinstance(written, dict) else {}
    values = {
        name: [value for _, value in run.curves.get(name, [])]
        for name in ("data_seconds", "forward_backward_seconds", "optimizer_seconds", "saving_seconds")
    }
    saving = values.pop("saving_seconds")
    medians = {name: statistics.median(each) for name, each in values.items() if each}
    rows = [[both(name), f"{seconds:,.4g}", ""] for name, seconds in medians.items()]
    if medians:
        step, predicted = sum(medians.values()), plan.get("step_seconds")
        rows.append([both("step_seconds"), f"{step:,.4g}", f"{predicted:,.4g}" if type(predicted) is float else ""])
    if saving:
        rows.append([both("saving_seconds"), f"{sum(saving):,.4g}", ""])
    tensors = plan.get("tensor_bytes_of_a_rank")
    peak = max((value for _, value in run.curves.get("memory", [])), default=None)
    if peak is not None:
        rows.append([both("peak memory"), f"{peak / 1e6:,.1f} MB", ""])
    if isinstance(tensors, int):
        rows.append([both("tensors"), "", f"{tensors / 1e6:,.1f} MB"])
    heads = ["", both("measured"), both("predicted")]
    return [_table(heads, rows, numbers=(1, 2))] if rows else []


def _evaluations(run: RunData) -> list[str]:
    rows = []
    for each in run.evaluations[-_MOST_ROWS:]:
        numbers = {name: value for name, value in each["values"].items() if isinstance(value, int | float)}
        values = ", ".join(f"{name} {_number(value)}" for name, value in numbers.items())
        data = each.get("data")
        path = data.get("path", "") if isinstance(data, dict) else ""
        limit = f" (limit {each['limit']:,})" if isinstance(each.get("limit"), int) else ""
        where = f"<code>{escape(str(path))}</code>{escape(limit)}"
        cells = [escape(text) for text in (str(each.get("task")), values, str(each.get("protocol", "")))]
        rows.append([f"{each['step']:,}", *cells, where])
    heads = [both(head) for head in ("step", "task", "result", "protocol", "data")]
    return [_table(heads, rows, numbers=(0,))] if rows else []


def _texts(run: RunData) -> list[str]:
    """The texts of the last evaluations, so that the page stays small."""
    rows = [
        [f"{each['step']:,}", _value(_short(str(each.get("prompt", "")))), _value(_short(each["text"]))]
        for each in run.texts[-_MOST_TEXTS:]
    ]
    heads = [both(head) for head in ("step", "prompt", "text")]
    return [_table(heads, rows, numbers=(0,))] if rows else []


def _events(run: RunData) -> list[str]:
    rows = []
    for event in run.events[:_MOST_ROWS]:
        culprit = event.get("culprit")
        culprit_cell = ""
        if event_file.is_sample(culprit):
            text = "".join(str(piece.get("text") or "") for piece in culprit["pieces"])
            culprit_cell = f"{escape(event_file.where(culprit))}<br>{_value(_short(text))}"
        rows.append([f"{event['step']:,}", _finding(event), _done(event), culprit_cell])
    heads = [both(head) for head in ("step", "found", "done", "culprit")]
    left = f"<p>... {len(run.events) - _MOST_ROWS:,}</p>" if len(run.events) > _MOST_ROWS else ""
    return [_table(heads, rows, numbers=(0,)) + left] if rows else []


def _finding(event: dict[str, Any]) -> str:
    """The rule, and by how much each number was beyond the usual."""
    parts = [f"<b>{both(_known(event.get('rule'), 'rule'))}</b>"]
    for name in ("loss", "grad_norm"):
        value, usual = event.get(name), event.get(f"usual_{name}")
        beside = f" ({both('usual')} {_number(usual)})" if isinstance(usual, float) else ""
        figure = _number(value) if isinstance(value, float) else escape(str(value))
        parts.append(f"{both(f'event {name}')} {figure}{beside}{_deviations(event, name)}")
    parts += [
        f"{both(f'event {name}')}{z}" for name in ("sample_high", "sample_low") if (z := _deviations(event, name))
    ]
    if event.get("rule") == "variety" and (share := event_file.share_of_variety(event)) is not None:
        parts.append(f"{both('event variety')} {share:.0%} ({both('usual')} 100 %)")
    return f'<div class="found">{"<br>".join(parts)}</div>'


def _deviations(event: dict[str, Any], name: str) -> str:
    z = event.get(f"{name}_z")
    return f" {z:+.1f} {both('deviations')}" if isinstance(z, float) else ""


def _done(event: dict[str, Any]) -> str:
    parts = [both(_known(event.get("decision"), "decision"))]
    if isinstance(event.get("back_to"), int):
        parts.append(f"{both('back to step')} {event['back_to']:,}")
    if ranges := event_file.passed_over(event):
        listed = ", ".join(f"{first:,} – {end - 1:,}" for first, end in ranges)
        parts.append(f"{both('passed over')} {listed}")
    return "<br>".join(parts)


def _known(value: object, kind: str) -> str:
    """The key of its words; files may have been damaged."""
    return f"{kind} {value}" if isinstance(value, str) else ""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _nonfinite(run: RunData) -> list[str]:
    if not run.nonfinite:
        return []
    rows = [[f"{each['step']:,}", _value({k: v for k, v in each.items() if k != "step"})] for each in run.nonfinite]
    left = f"<p>... {len(rows) - _MOST_ROWS:,}</p>" if len(rows) > _MOST_ROWS else ""
    return [_table([both("step"), ""], rows[:_MOST_ROWS], numbers=(0,)) + left]


def _environment(run: RunData) -> list[str]:
    if not run.environment:
        return []
    facts = {key: value for key, value in run.environment.items() if key not in ("origins", "plan", "data")}
    command = facts.pop("command", None)
    if isinstance(command, list):
        facts = {"command": shlex.join(str(word) for word in command), **facts}
    rows = [
        [f'<code class="key">{escape(str(key))}</code>', _value(_listed(value))]
        for key, value in facts.items()
        if value not in (None, "", {}, [])
    ]
    return [_table([both("key"), both("value")], rows)]


def _listed(value: Any) -> Any:
    """`torch 2.13.0, numpy 2.4.6` rather than JSON, where nothing is nested."""
    if isinstance(value, dict) and not any(isinstance(each, dict | list) for each in value.values()):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    return value


def _notes(run: RunData) -> Iterable[str]:
    if run.num_unreadable:
        yield f"{escape(run.name)}: {run.num_unreadable:,} {both('unreadable')}"
    for note in run.notes:
        yield escape(note)


def _number(value: float | None) -> str:
    return (
        ""
        if value is None
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:,.4f}"
        if abs(value) < 1000
        else f"{value:,.1f}"
    )


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else _json(value)
    return f"<code>{escape(text)}</code>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """`numbers`: the columns that are set to the right."""
    right = set(numbers)

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=number' if column in right else ''}>{text}</{kind}>" for column, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'


_SECTIONS: dict[str, Callable[[RunData], list[str]]] = {
    "events": _events,
    "nonfinite": _nonfinite,
    "evaluations": _evaluations,
    "texts": _texts,
    "plan": _plan,
    "data": _data,
    "checkpoints": _checkpoints,
    "configuration": _configuration,
    "environment": _environment,
}
_ALWAYS = ("plan", "data", "checkpoints", "configuration", "environment")  # every run has these, told or not
