"""Output of commands: JSON for programs, tables that fit a terminal, all of a table in pipes.

Nothing here talks to the cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
import msgspec

from stoker.cli.tables import GAP, Column, Row, Table, render
from stoker.runtime.process.terminal import clean, clean_output, line_of, printable, speaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stoker_wire.messages.control import LogLine

COLOURS = {
    "ALIVE": "green", "RUNNING": "green", "SUCCEEDED": "green", "FINISHED": "green",
    "LEASED": "green", "fits": "green", "SUSPECT": "yellow", "PENDING": "yellow",
    "WAITING": "yellow", "QUEUED": "yellow", "RESTARTING": "yellow", "busy": "yellow",
    "STOPPED": "yellow", "CANCELLED": "yellow", "DEAD": "red", "FAILED": "red", "never": "red",
}  # fmt: skip


def echo(text: str = "", *, err: bool = False) -> None:
    """Print prose; control sequences in names and messages, which come from users' programs, are left out.

    Colours are for terminals, and for none where ``NO_COLOR`` is set.
    """
    click.echo(clean(text), err=err, color=False if no_colour() else None)


def no_colour() -> bool:
    """Return whether the environment asks programs to write in no colours."""
    return bool(os.environ.get("NO_COLOR"))


def print_json(value: object) -> None:
    """Print any message or plain value as indented JSON."""
    _print_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_line(value: object) -> None:
    """Print any message or plain value as one line of JSON."""
    _print_json(msgspec.json.encode(value).decode())


def _print_json(text: str) -> None:
    # JSON escapes C0 but not C1, which are characters as any other to the program behind a pipe.
    click.echo(clean(text) if sys.stdout.isatty() else text)


def print_output(line: LogLine, *, named: bool = False) -> None:
    """Print a line of a process's output, with ``named`` behind its name; in a pipe its text is unchanged."""
    err = not line.worker_id
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    if named:
        text = line_of(speaker(line), line.text, is_terminal=is_terminal)
    else:
        text = clean_output(line.text) if is_terminal else line.text
    click.echo(text, err=err, color=True)


def print_table(
    rows: Iterable[Row],
    columns: Sequence[Column] | Mapping[str, str | Callable[[Row], str]],
    *,
    empty: str,
    wide: bool = False,
    indent: str = "",
) -> tuple[str, ...]:
    """Print a table as wide as the terminal, or whole (``wide``, or no terminal).

    Returns the headings of the columns left out.

    Columns are given as such, or as a mapping of headings to keys or to what makes the cell.
    """
    rows = list(rows)
    if not rows:
        echo(indent + empty)
        return ()
    if isinstance(columns, Mapping):
        columns = [Column(heading, source) for heading, source in columns.items()]
    width = None if wide else terminal_width()
    table = render(columns, rows, None if width is None else width - len(indent))
    for line in table_lines(table):
        echo(indent + line)
    return table.left_out


def table_lines(table: Table) -> list[str]:
    """Return the lines of a table, its headings bold and its states in their colours."""
    lines = []
    for number, line in enumerate(table.lines):
        last = max((i for i, cell in enumerate(line) if cell.strip()), default=0)
        shown = [*line[:last], line[last].rstrip()]
        lines.append(GAP.join(_coloured(cell, head=number == 0) for cell in shown))
    return lines


def _coloured(cell: str, *, head: bool) -> str:
    text = cell.rstrip()
    if head:
        return click.style(text, bold=True) + cell[len(text) :]
    # Conditions of a node stand behind its state.
    colour = COLOURS.get(text.partition(",")[0])
    return click.style(text, fg=colour) + cell[len(text) :] if colour else cell


def print_prose(text: str, *, label: str = "", indent: str = "  ") -> None:
    """Print a sentence: on a terminal in lines of its width, behind ``label``, with an indent."""
    import textwrap

    width = terminal_width()
    label = printable(label)
    whole = f"{label} {printable(text)}" if label else printable(text)
    lines = [whole]
    if width is not None:
        room = max(width - len(indent), 20)
        # Ids and paths stay whole, so that they can be copied.
        lines = textwrap.wrap(
            whole, room, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "
        )
    if label and lines[0].startswith(label):
        lines[0] = click.style(label, fg="cyan") + lines[0][len(label) :]
    for line in lines:
        echo(indent + line)


def terminal_width() -> int | None:
    """Return the cells of a line; None if this is no terminal. ``COLUMNS`` overrides it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plural(count: int, word: str) -> str:
    """Return ``1 node``, ``2 nodes``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def state(text: str) -> str:
    """Return a state in its colour (click takes colours out of pipes)."""
    return click.style(text, fg=COLOURS.get(text))


def heading(text: str) -> str:
    """Return the heading of a block of lines."""
    return click.style(printable(text), bold=True)


def amount(name: str, value: float) -> str:
    """Return a resource's amount: memory in binary units, others as short as they go."""
    return nbytes(value) if name.endswith("memory") else f"{value:g}"


def resources(amounts: Mapping[str, float] | None) -> str:
    """Return ``CPU 2, GPU 1, memory 8.0 GiB``; a dash for nothing."""
    return (
        ", ".join(f"{name} {amount(name, value)}" for name, value in (amounts or {}).items()) or "-"
    )


def nbytes(value: float) -> str:
    """Return bytes in binary units, with three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Return ``0.42s``, ``12s``, ``3m05s``, ``2h10m``, ``5d03h``."""
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


def hours(seconds: float) -> str:
    """Return seconds of a resource as hours with three digits, ``1.25``; ``0`` for none."""
    if 0 < seconds < 0.36:
        return "<0.0001"
    return f"{seconds / 3600:.3g}" if seconds < 3.6e6 else f"{seconds / 3600:,.0f}"


def ago(at_s: float | None) -> str:
    """Return how long ago a time was; empty for never."""
    return f"{duration(time.time() - at_s)} ago" if at_s else ""


def in_(at_s: float | None) -> str:
    """Return how long it is until a time; empty for never, ``now`` for one that has passed."""
    if not at_s:
        return ""
    left_s = at_s - time.time()
    return f"in {duration(left_s)}" if left_s > 0 else "now"


def clock(at_s: float | None) -> str:
    """Return local date and time to the second; empty for never."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else ""
