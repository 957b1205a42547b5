"""The page: charts first, then tables. Nothing in it comes from elsewhere, and it can be read without JavaScript."""

import base64
import hashlib
import json
import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources

from gptworks.report import chart, tables
from gptworks.report.chart import Curve, Flag
from gptworks.report.run_data import RunData
from gptworks.report.thinning import thinned
from gptworks.report.words import both, english
from gptworks.train import event_file, plot

# Distinguishable for most people, also those who see fewer colours, on light and on dark ground.
COLOURS = ("#2f7ed8", "#d9762b", "#2a9d6f", "#b8448f", "#8a6fd1", "#a07c1d", "#c8453b", "#4a8fa3")
SINGLE = ("lr", "grad_norm", "tokens_per_sec", "mfu", "memory", "loss_scale")  # charts of one curve for each run
_COUNTED = ("_total", "_ratio", "_correct")  # of tasks: what says no more than a chart beside it
_MOST_FLAGS = 100  # of a run
_FEWEST_TO_SMOOTH = 30  # points; fewer show their course themselves
_MOST_POINTS = 4000  # of a kind of curve, over all runs


def written(runs: list[RunData], every: float = 0, troubles: Sequence[str] = ()) -> str:
    """The whole page as HTML. `every`: after so many seconds it asks the server that it came from for a new one.
    `troubles`: why what is shown may be old."""
    charts = charts_of(runs)
    style, script = _file("page.css") + _colours(len(runs)), _file("page.js")
    series = {name: [_series(curve) for curve in curves] for name, curves in charts.items()}
    title = f"{english('report')}: {', '.join(run.name for run in runs)}"
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    policy += "; connect-src 'self'" if every else ""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head>",
            f'<body data-every="{every:g}">' if every else "<body>",
            *_choices(runs, is_live=bool(every)),
            f"<main><h1>{both('report')}</h1>",
            *[f'<p class="bad">{escape(trouble)}</p>' for trouble in troubles],
            tables.contents(runs),
            *tables.summary(runs),
            f'<h2 id="curves">{both("curves")}</h2><div class="charts">',
            *[_figure(name, curves, runs) for name, curves in charts.items()],
            "</div>",
            *tables.all_of(runs),
            f'<p class="soft">{both("made")}</p></main>',
            f'<script type="application/json" id="series">{_json(series)}</script>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def charts_of(runs: list[RunData]) -> dict[str, list[Curve]]:
    """The curves of each chart that has any."""
    most = max(100, min(600, _MOST_POINTS // len(runs)))
    curves_of: dict[str, list[Curve]] = {"loss": []}
    for number, run in enumerate(runs):
        curves_of["loss"] += _losses(run, number, most, is_alone=len(runs) == 1)
    tasks = {f"{each['task']}_{name}" for run in runs for each in run.evaluations for name in each["values"]}
    for name in [*SINGLE, *sorted(name for name in tasks if not name.endswith(_COUNTED))]:
        curves_of[name] = [
            Curve(run.name, number, thinned(run.curves[name], most))
            for number, run in enumerate(runs)
            if run.curves.get(name)
        ]
    return {name: curves for name, curves in curves_of.items() if curves}


def _losses(run: RunData, number: int, most: int, *, is_alone: bool) -> list[Curve]:
    prefix = "" if is_alone else f"{run.name}: "
    raw, held_out = run.curves.get("loss", []), run.curves.get("held_out_loss", [])
    curves = []
    if raw:
        is_long = len(raw) >= _FEWEST_TO_SMOOTH
        curves.append(Curve(prefix + english("each step"), number, thinned(raw, most), "raw" if is_long else "smooth"))
        if is_long:
            curves.append(Curve(prefix + english("smoothed"), number, plot.smoothed(raw, most)))
    if held_out:
        curves.append(Curve(prefix + english("held out"), number, thinned(held_out, most), "mark"))
    return curves


def _figure(name: str, curves: list[Curve], runs: list[RunData]) -> str:
    has_log = chart.can_be_log(curves)
    flags = [flag for number, run in enumerate(runs) for flag in _flags(run, number)] if name == "loss" else []
    # The numbers of a task have no words of ours: lambada_target_perplexity is "lambada: target perplexity".
    title = name if name in ("loss", *SINGLE) else name.replace("_", ": ", 1).replace("_", " ")
    drawn = [
        chart.svg(curves, title=english(title), is_log=is_log, flags=flags)
        for is_log in ([False, True] if has_log else [False])
    ]
    legend = _legend(curves, has_flags=bool(flags)) if name == "loss" else ""
    kinds = " ".join(kind for kind, is_it in (("has-log", has_log), ("first", name == "loss")) if is_it)
    return (
        f'<figure data-chart="{name}" class="{kinds}"><h3>{both(title)}</h3>{"".join(drawn)}'
        f'<figcaption class="legend">{legend}{_extremes(name, runs)}</figcaption></figure>'
    )


def _flags(run: RunData, number: int) -> list[Flag]:
    """The bad steps of a run, and those that were not finite."""
    texts = {int(each["step"]): f"{run.name}: not finite, step {each['step']:,}" for each in run.nonfinite}
    texts |= {int(event["step"]): f"{run.name}: {event_file.in_words(event)}" for event in run.events}
    return [Flag(number, step, text) for step, text in list(texts.items())[:_MOST_FLAGS]]


def _legend(curves: list[Curve], *, has_flags: bool) -> str:
    """What the kinds of lines mean; colours are those of the runs, and stand above."""
    flag = f'<span><i class="bad">▼</i> {both("event")}</span>' if has_flags else ""
    kinds = [kind for kind in ("raw", "smooth", "mark") if any(curve.kind == kind for curve in curves)]
    words = {"raw": "each step", "smooth": "smoothed" if "raw" in kinds else "each step", "mark": "held out"}
    return (
        "".join(
            f'<span><svg viewBox="0 0 26 10" aria-hidden="true"><path class="curve {kind} any" d="M0 5H26"/></svg>'
            f"{both(words[kind])}</span>"
            for kind in kinds
        )
        + flag
    )


def _extremes(name: str, runs: list[RunData]) -> str:
    """For those who do not see the picture, and for print: the median and the range of each run."""
    parts = []
    for run in runs:
        values = [value for _, value in run.curves.get(name, [])]
        if values:
            middle = chart.written(float(f"{statistics.median(values):.4g}"))
            ends = f"{chart.written(float(f'{min(values):.4g}'))} – {chart.written(float(f'{max(values):.4g}'))}"
            label = f"{escape(run.name)}: " if len(runs) > 1 else ""
            parts.append(f"<span>{label}{ends}, {both('median')} {middle}</span>")
    return "".join(parts)


def _choices(runs: list[RunData], *, is_live: bool) -> list[str]:
    """What the reader can choose; the style looks at these, so they stand before all that they change."""
    inputs = [
        '<input class="choice" type="radio" name="language" id="lang-en" checked>',
        '<input class="choice" type="radio" name="language" id="lang-zh">',
        '<input class="choice" type="checkbox" id="scale">',
        *[f'<input class="choice" type="checkbox" id="run-{number}" checked>' for number in range(len(runs))],
    ]
    labels = ['<label for="lang-en">English</label><label for="lang-zh">中文</label>']
    labels.append(f'<label for="scale">{both("log scale")}</label>')
    if len(runs) > 1:
        labels += [
            f'<label for="run-{number}"><span class="swatch run-{number}"></span>{escape(run.name)}</label>'
            for number, run in enumerate(runs)
        ]
    if is_live:
        labels.append(f'<span id="status" role="status">{both("live")}</span>')
    return [*inputs, f'<div class="bar">{"".join(labels)}</div>']


def _colours(num_runs: int) -> str:
    rules = []
    for number in range(num_runs):
        colour = COLOURS[number % len(COLOURS)]
        rules += [
            f":root {{ --run-{number}: {colour}; }} .run-{number} {{ --run: {colour}; }}",
            f".swatch.run-{number} {{ background: {colour}; }}",
            f"#run-{number}:not(:checked) ~ main .curve.run-{number} {{ display: none; }}",
            f"#run-{number}:not(:checked) ~ main .of-run.run-{number} {{ display: none; }}",
            f'#run-{number}:not(:checked) ~ .bar label[for="run-{number}"] {{ opacity: .45; }}',
            f'#run-{number}:focus-visible ~ .bar label[for="run-{number}"] {{ outline: 2px solid #4c9aff; }}',
        ]
    return "\n".join(rules)


def _series(curve: Curve) -> dict[str, object]:
    points = [[int(x), float(f"{y:.6g}")] for x, y in curve.points]
    return {"label": curve.label, "run": curve.run, "points": points}


def _json(value: object) -> str:
    """A name that has </script> in it must not end the element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (resources.files("gptworks.report") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
