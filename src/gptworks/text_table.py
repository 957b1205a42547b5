"""Rows of text in columns."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """A line for each row, every column as wide as its widest cell. Cells stand on the right of their column; those of
    the columns `left`, counted from 0, on the left.

    >>> aligned([("", "one"), ("loss", "2")], left=[0])
    ['      one', 'loss    2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
