"""Tables of plain text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line for each row, its cells two spaces apart and as wide as the widest of their column.

    Args:
        rows: cells, alike in number.
        left: number of columns that are aligned on the left; those after them are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
