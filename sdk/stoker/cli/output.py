"""What commands print: JSON for programs, plain aligned text in pipes, tables on a terminal.

rich is imported only for a terminal. Nothing here talks to the cluster.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Row = dict[str, Any]

COLOURS = {
    "ALIVE": "green", "RUNNING": "green", "SUCCEEDED": "green", "FINISHED": "green",
    "LEASED": "green", "fits": "green", "SUSPECT": "yellow", "PENDING": "yellow",
    "WAITING": "yellow", "QUEUED": "yellow", "RESTARTING": "yellow", "busy": "yellow",
    "STOPPED": "yellow", "CANCELLED": "yellow", "DEAD": "red", "FAILED": "red", "never": "red",
}  # fmt: skip


def print_json(value: object) -> None:
    """Print any message or plain value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_line(value: object) -> None:
    """Print any message or plain value as one line of JSON."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(
    rows: Iterable[Row], columns: Mapping[str, str | Callable[[Row], str]], *, empty: str
) -> None:
    """Print one line per row: ``columns`` maps a heading to a key, or to what makes the cell."""
    cells = [[_cell(row, source) for source in columns.values()] for row in rows]
    if not cells:
        click.echo(empty)
    elif sys.stdout.isatty():
        _rich_table(list(columns), cells)
    else:
        _plain_table(list(columns), cells)


def _cell(row: Row, source: str | Callable[[Row], str]) -> str:
    if callable(source):
        return source(row)
    value = row.get(source)
    return "" if value is None else str(value)


def _plain_table(headings: Sequence[str], cells: list[list[str]]) -> None:
    lines = [[heading.upper() for heading in headings], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def _rich_table(headings: Sequence[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading.upper(), overflow="fold")
    for line in cells:
        table.add_row(*(Text(text, style=COLOURS.get(text, "")) for text in line))
    Console().print(table)


def state(text: str) -> str:
    """Colour a state for a terminal (click takes colours out of pipes)."""
    return click.style(text, fg=COLOURS.get(text))


def heading(text: str) -> str:
    """A heading of a block of lines."""
    return click.style(text, bold=True)


def amount(name: str, value: float) -> str:
    """A resource's amount: memory in binary units, others as short as they go."""
    return nbytes(value) if name.endswith("memory") else f"{value:g}"


def resources(found: Mapping[str, float] | None) -> str:
    """``CPU 2, GPU 1, memory 8.0 GiB``; a dash for nothing."""
    return (
        ", ".join(f"{name} {amount(name, value)}" for name, value in (found or {}).items()) or "-"
    )


def nbytes(value: float) -> str:
    """Bytes in binary units, three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """``0.42s``, ``12s``, ``3m05s``, ``2h10m``, ``5d03h``."""
    if seconds < 10:
        return f"{max(seconds, 0):.2f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def ago(at_s: float | None) -> str:
    """How long ago; empty for never."""
    return f"{duration(time.time() - at_s)} ago" if at_s else ""


def clock(at_s: float | None) -> str:
    """Local date and time to the second; empty for never."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else ""
