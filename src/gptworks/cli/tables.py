"""Tables for people: with colours on a terminal, plain text elsewhere; stacked where the terminal is narrow."""

import os
import shutil
import sys
from collections.abc import Sequence

from gptworks.text_table import aligned

BAR = 20
_LEAST_BAR = 8


def show(titles: Sequence[str], rows: Sequence[Sequence[str]], bars: Sequence[float] = ()) -> None:
    """Columns of numbers are aligned on the right. `bars`: one share for each row, drawn behind it; above 1 is too
    much."""
    if not sys.stdout.isatty():
        asked = os.environ.get("COLUMNS", "")  # a pipe has no width of its own
        print("\n".join(plain(titles, rows, bars, width=int(asked) if asked.isdecimal() and int(asked) else None)))
        return
    width = shutil.get_terminal_size((80, 24)).columns
    wide = max(map(len, plain(titles, rows, bars)))
    if wide + len(titles) + 2 > width:  # rich puts a space more between columns
        print("\n".join(plain(titles, rows, bars, width=width)))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for at, title in enumerate(titles):
        table.add_column(title, justify="right" if _is_right(rows, at) else "left", no_wrap=True)
    if bars:
        table.add_column("", no_wrap=True)
    for number, row in enumerate(rows):
        cells = [Text(cell) for cell in row]
        if bars:
            share = bars[number]
            colour = "red" if share > 1 else "yellow" if share > 0.9 else "green"
            cells.append(Text(_bar(share, BAR, "█", "░"), style=colour))
        table.add_row(*cells)
    Console(width=width, highlight=False).print(table)


def plain(
    titles: Sequence[str], rows: Sequence[Sequence[str]], bars: Sequence[float] = (), width: int | None = None
) -> list[str]:
    """Lines of at most `width`, as far as words allow: bars get shorter, then each row takes several lines."""
    widths = [max(len(row[at]) for row in [titles, *rows]) for at in range(len(titles))]
    taken = sum(widths) + 2 * (len(widths) - 1)
    bar = BAR
    if width is not None and bars and taken + 2 + bar > width:
        bar = max(_LEAST_BAR, width - taken - 2)
    if width is not None and taken + (2 + bar if bars else 0) > width:
        return _stacked(titles, rows, bars, width)
    head, *lines = aligned([titles, *rows], left=[at for at in range(len(titles)) if not _is_right(rows, at)])
    if bars:
        lines = [f"{line}  {_bar(share, bar)}" for line, share in zip(lines, bars, strict=True)]
    return [line.rstrip() for line in (head, *lines)]


def _stacked(titles: Sequence[str], rows: Sequence[Sequence[str]], bars: Sequence[float], width: int) -> list[str]:
    lines = []
    for number, row in enumerate(rows):
        bar = f"  {_bar(bars[number], _LEAST_BAR)}" if bars else ""
        line = f"{titles[0]} {row[0]}{bar}"
        for title, cell in zip(titles[1:], row[1:], strict=True):
            words = f"{title} {cell}" if title else cell
            if len(line) + 2 + len(words) > width:
                lines.append(line)
                line = f"  {words}"
            else:
                line += f"  {words}" if line.strip() else words
        lines.append(line)
    return lines


def _is_right(rows: Sequence[Sequence[str]], at: int) -> bool:
    return all(row[at][:1].isdigit() or row[at] in {"", "-"} for row in rows)


def _bar(share: float, size: int, full: str = "#", empty: str = "-") -> str:
    filled = min(size, round(share * size))
    return full * filled + empty * (size - filled) + ("!" if share > 1 else "")
