"""Tables as text: which columns fit into a width, and what may be cut. Pure; ``output`` prints them.

An id is never cut or folded: a column that does not fit is left out as a whole, by its declared rank.
Only columns that say how far they may ``shrink`` (names, messages) are cut, with an ellipsis.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.runtime.process.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Row = dict[str, Any]
GAP = "  "
_PROSE_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Column:
    """One column: ``source`` is a row's key, or a function that makes the cell of a row.

    Where the width does not do, columns with the highest ``drop`` go first; 0 stays for ever. One
    with ``shrink`` is cut to that many cells before any is dropped, ``prose`` is folded into lines.
    """

    heading: str
    source: str | Callable[[Row], str]
    drop: int = 0
    shrink: int = 0
    prose: bool = False

    def cell(self, row: Row) -> str:
        """Return the text of a row in this column, in one line without control characters."""
        if callable(self.source):
            text = self.source(row)
        else:
            value = row.get(self.source)
            text = "" if value is None else str(value)
        return printable(text)

    @property
    def least(self) -> int:
        """The width to which it may be cut; 0 for not at all."""
        return _PROSE_WIDTH if self.prose else self.shrink


@dataclass(frozen=True, slots=True)
class Table:
    """A table laid out: one list of cells per line, padded, the headings first.

    ``left_out`` are the headings of columns with content that did not fit.
    """

    lines: list[list[str]]
    left_out: tuple[str, ...]


def render(columns: Sequence[Column], rows: Iterable[Row], width: int | None) -> Table:
    """Lay rows out in ``width`` cells of a terminal; None for a pipe, where all is shown."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    filled = [any(texts) for texts in zip(*cells, strict=True)] or [True] * len(columns)
    headings = [column.heading.upper() for column in columns]
    natural = [max(map(cells_of, texts), default=0) for texts in zip(headings, *cells, strict=True)]
    if width is None:
        shown, widths = list(range(len(columns))), natural
    else:
        shown, widths = fit(columns, natural, filled, width)
    lines = [_padded([headings[i] for i in shown], widths)]
    for line in cells:
        lines += _folded([line[i] for i in shown], widths, [columns[i].prose for i in shown])
    left_out = tuple(heading for i, heading in enumerate(headings) if filled[i] and i not in shown)
    return Table(lines, left_out)


def fit(
    columns: Sequence[Column], natural: Sequence[int], filled: Sequence[bool], width: int
) -> tuple[list[int], list[int]]:
    """Choose which columns are shown in ``width`` cells, and how wide each is.

    The first column stays. Columns without any content are dropped before others. What cannot be
    dropped or cut is shown whole, even where the terminal is too narrow for it.
    """
    least = [
        min(wide, max(column.least, len(column.heading))) if column.least else wide
        for column, wide in zip(columns, natural, strict=True)
    ]
    shown = list(range(len(columns)))
    droppable = sorted(
        (i for i in shown[1:] if columns[i].drop), key=lambda i: (filled[i], -columns[i].drop, -i)
    )

    def spare() -> int:
        return width - sum(least[i] for i in shown) - len(GAP) * (len(shown) - 1)

    for i in droppable:
        if spare() >= 0:
            break
        shown.remove(i)
    left = max(spare(), 0)
    widths = list(least)
    # The columns that are dropped last are the most wanted ones, so they get room first.
    for i in sorted(shown, key=lambda i: columns[i].drop):
        more = min(natural[i] - least[i], left)
        widths[i] += more
        left -= more
    return shown, [widths[i] for i in shown]


def _folded(texts: Sequence[str], widths: Sequence[int], prose: Sequence[bool]) -> list[list[str]]:
    """Return one row as lines: more than one only if a text of a prose column is longer than its width."""
    stacks = [
        (textwrap.wrap(text, width, break_on_hyphens=False) or [""])
        if folds
        else [cut(text, width)]
        for text, width, folds in zip(texts, widths, prose, strict=True)
    ]
    height = max(map(len, stacks), default=0)
    return [
        _padded([stack[i] if i < len(stack) else "" for stack in stacks], widths)
        for i in range(height)
    ]


def _padded(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text + " " * (width - cells_of(text)) for text, width in zip(texts, widths, strict=True)
    ]


def cut(text: str, width: int) -> str:
    """Return the text in at most ``width`` cells, with an ellipsis where something is missing."""
    if cells_of(text) <= width:
        return text
    if text.isascii():
        return f"{text[: width - 1]}…"
    head = ""
    for character in text:
        if cells_of(head + character) >= width:
            break
        head += character
    return f"{head}…"


def cells_of(text: str) -> int:
    """Return the cells of a terminal that a text takes: Chinese and Japanese characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
