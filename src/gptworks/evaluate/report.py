"""A result in words: what was measured, how, with which files; others' published figures beside it."""

from typing import Any

from gptworks.evaluate.progress import paddle_stamp
from gptworks.evaluate.published import STATUS, figures

# metric -> (heading, form)
_METRICS = {
    "loss": ("loss", "{:.4f}"),
    "perplexity": ("perplexity", "{:.4f}"),
    "adjusted_perplexity": ("adjusted (word) perplexity", "{:.4f}"),
    "token_ratio": ("token ratio", "{:.5f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "correct": ("correct", "{:,}"),
    "total": ("total", "{:,}"),
    "accuracy": ("accuracy", "{:.3%}"),
    "target_perplexity": ("target perplexity", "{:.4f}"),
}
_COUNTS = ("documents", "samples", "windows", "tokens", "bytes", "shortened")


def print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for line in head_lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows = result["rows"]
    shown = [name for name in _METRICS if any(row.get(name) is not None for row in rows)]
    table = Table()
    table.add_column("model", overflow="fold")
    for name in shown:
        table.add_column(_METRICS[name][0], justify="right", overflow="fold")  # a figure is never cut short
    for row in rows:
        cells = [_figure(_METRICS[name][1], row[name]) if row.get(name) is not None else "" for name in shown]
        kept_in = row.get("weights_kept_in", "fp32")
        table.add_row(row["model"] if kept_in == "fp32" else f"{row['model']} ({kept_in})", *cells)
    console.print(table)
    if result.get("published"):
        console.print(f"\n{STATUS}:", highlight=False)
    for each in result.get("published", []):
        heading, form = _METRICS[each["metric"]]
        how = f"{each['rule']}; {each['source']}"
        console.print(
            f"  {each['model']:26} {form.format(each['value']):>8} {heading} ({how})", highlight=False, soft_wrap=True
        )


def _figure(form: str, value: float) -> str:
    """Perplexities of untrained models have dozens of digits."""
    return f"{value:.4e}" if abs(value) >= 1e9 and "," not in form else form.format(value)


def head_lines(result: dict[str, Any]) -> list[str]:
    """Above the table; hashes in full, so that a copied screen is enough to repeat the measurement."""
    data = result["data"]
    lines = [f"task {result['task']}, protocol: {result['protocol']}", f"data {data['path']}, sha256 {data['sha256']}"]
    for row in result["rows"]:
        if "weights_sha256" in row:
            counts = ", ".join(f"{row[name]:,} {name}" for name in _COUNTS if row.get(name))
            tokenizer = (row["tokenizer"] or {}).get("identity", "none")
            lines.append(f"{row['model']}: {counts}; weights sha256 {row['weights_sha256']}; tokenizer {tokenizer}")
    return lines + [f"note: {remark}" for remark in result.get("remarks", [])]


def paddle_line(result: dict[str, Any], row: dict[str, Any]) -> str:
    """The last line of PaddleNLP's and FleetX's evaluation."""
    line = f" validation results on {result['data']['path']} | "
    if result["task"] == "lambada":
        line += (
            f"number correct: {row['correct']:.4E} | total examples: {row['total']:.4E} | "
            f"avg accuracy: {row['accuracy']:.4E}"
        )
    else:
        line += (
            f"avg loss: {row['loss']:.4E} | ppl: {row['perplexity']:.4E} | "
            f"adjusted ppl: {row['adjusted_perplexity']:.4E} | token ratio: {row['token_ratio']} |"
        )
    return paddle_stamp() + line


def published_beside(task: str) -> list[dict[str, object]]:
    return [figure.as_dict() for figure in figures(task)]
