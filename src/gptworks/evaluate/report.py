"""A result in words: what was measured, how, with which files; others' published figures beside it."""

from typing import Any

from gptworks.evaluate.progress import paddle_stamp
from gptworks.evaluate.registry import TASKS
from gptworks.evaluate.task import PUBLISHED_STATUS, Task


def print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for line in head_lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows, metrics = result["rows"], TASKS[result["task"]].metrics
    columns = {name: each for name, each in metrics.items() if any(row.get(name) is not None for row in rows)}
    table = Table()
    table.add_column("model", overflow="fold")
    for metric in columns.values():
        table.add_column(metric.heading, justify="right", overflow="fold")  # a figure is never cut short
    for row in rows:
        cells = [_figure(columns[name].form, row[name]) if row.get(name) is not None else "" for name in columns]
        kept_in = row.get("weights_kept_in", "fp32")
        table.add_row(row["model"] if kept_in == "fp32" else f"{row['model']} ({kept_in})", *cells)
    console.print(table)
    if result.get("published"):
        console.print(f"\n{PUBLISHED_STATUS}:", highlight=False)
    for each in result.get("published", []):
        metric = metrics[each["metric"]]
        figure = f"{metric.form.format(each['value']):>8} {metric.heading}"
        line = f"  {each['model']:26} {figure} ({each['rule']}; {each['source']})"
        console.print(line, highlight=False, soft_wrap=True)


def _figure(form: str, value: float) -> str:
    """Perplexities of untrained models have dozens of digits."""
    return f"{value:.4e}" if abs(value) >= 1e9 and "," not in form else form.format(value)


def head_lines(result: dict[str, Any]) -> list[str]:
    """Above the table; hashes in full, so that a copied screen is enough to repeat the measurement."""
    data, counted = result["data"], TASKS[result["task"]].counts
    lines = [f"task {result['task']}, protocol: {result['protocol']}", f"data {data['path']}, sha256 {data['sha256']}"]
    for row in result["rows"]:
        if "weights_sha256" in row:
            counts = ", ".join(f"{row[name]:,} {name}" for name in counted if row.get(name))
            tokenizer = (row["tokenizer"] or {}).get("identity", "none")
            lines.append(f"{row['model']}: {counts}; weights sha256 {row['weights_sha256']}; tokenizer {tokenizer}")
    return lines + [f"note: {remark}" for remark in result.get("remarks", [])]


def paddle_line(result: dict[str, Any], row: dict[str, Any]) -> str:
    """The last line of PaddleNLP's and FleetX's evaluation."""
    paddle = TASKS[result["task"]].paddle
    assert paddle
    return f"{paddle_stamp()} validation results on {result['data']['path']} | {paddle.summary(row)}"


def published_beside(task: Task) -> list[dict[str, object]]:
    return [{"task": task.name, **vars(figure), "status": PUBLISHED_STATUS} for figure in task.published]
