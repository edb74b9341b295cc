"""Text for a terminal: without control characters, and in columns."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltafin.api import Stats

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Drop control characters except newline and tab, so that no text can steer the terminal."""
    return CONTROL.sub("", text)


def columns(rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """Align rows of cells in columns, two spaces apart; the columns in ``right`` end flush."""
    table = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = set(right)
    lines = [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def narrow(rows: Sequence[Sequence[str]], width: int, drop: int, cut: int) -> Sequence[Sequence[str]]:
    """Make the lines that ``columns`` gives fit ``width``: leave out column ``drop``, and shorten cells of ``cut``.

    ``cut`` stands before ``drop``. Rows that fit stay as they are.
    """

    def excess() -> int:
        return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2 - width

    if excess() > 0:
        rows = [(*row[:drop], *row[drop + 1 :]) for row in rows]
        room = max(1, max(len(row[cut]) for row in rows) - max(0, excess()))
        cells = (row[cut] if len(row[cut]) <= room else f"{row[cut][: room - 1]}…" for row in rows)
        rows = [(*row[:cut], cell, *row[cut + 1 :]) for row, cell in zip(rows, cells, strict=True)]
    return rows


def report(stats: "Stats") -> str:
    """Return one line about an answer: its tokens and speed, the prompt's tokens and how many were known."""
    seconds = stats.prompt_seconds + stats.generate_seconds
    return (
        f"{stats.generated_tokens} tokens, {speed(stats):.1f} tokens/s, "
        f"prompt {stats.prompt_tokens} tokens ({stats.reused_tokens} reused), {seconds:.2f} s"
    )


def speed(stats: "Stats") -> float:
    """Return tokens a second; the first token does not count, because reading the prompt made it."""
    return (stats.generated_tokens - 1) / stats.generate_seconds if stats.generated_tokens > 1 else 0.0
