"""The progress bars of a program and of all its tasks, at the driver: of a terminal, a pipe or a notebook.

A worker reports a bar by a line of its output that terminals do not show (:func:`report`); the driver's
printer of output hands it here, by whatever way it came.
"""

from __future__ import annotations

import contextlib
import functools
import html
import shutil
import sys
import threading
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stoker.runtime.driver.notebook_output import notebook_output
from stoker.runtime.process.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from stoker.runtime.driver.notebook_output import NotebookOutput

_MARK, _END = "\x1b]7717;stoker-bar;", "\x07"
_DRAW_S = 0.1
_LINE_S = 5.0
"""In a pipe a bar is a line no more often than this."""
_MAX_BARS = 20
_MAX_OF_CELL = 100
"""A cell shows no more bars than this, those that have ended among them."""
_MAX_TEXT = 40
_WIDTH = 24


class Bar(msgspec.Struct):
    """The state of one bar. ``total`` 0 is unknown; ``took_s`` are the seconds since it began."""

    number: int
    done: float
    total: float = 0.0
    text: str = ""
    unit: str = "it"
    took_s: float = 0.0
    closed: bool = False
    leave: bool = True
    """Whether it stays when it is closed."""

    def line(self, width: int = _WIDTH) -> str:
        """Return the bar as text."""
        if self.total <= 0:
            return f"{self._title}{self._pace}"
        full = int(self._part * width)
        bar = f"|{'#' * full}{'.' * (width - full)}|"
        return f"{self._title}{self._part:4.0%} {bar} {self._pace}"

    def as_html(self) -> str:
        """Return the bar as HTML; one of unknown length moves until it is closed."""
        title, pace = html.escape(self._title), html.escape(self._pace)
        value = f" value='{self._part:.4f}'" if self.total > 0 else ""
        bar = f"<progress{value}></progress> " if value or not self.closed else ""
        return f"<div><code>{title}{bar}{pace}</code></div>"

    @property
    def _title(self) -> str:
        text = printable(self.text[:_MAX_TEXT])
        return f"{text}: " if text else ""

    @property
    def _part(self) -> float:
        return min(1.0, max(0.0, self.done / self.total))

    @property
    def _pace(self) -> str:
        unit = printable(self.unit[:_MAX_TEXT])
        pace = f"{self.done / self.took_s:.3g} {unit}/s" if self.took_s > 0 else f"? {unit}/s"
        if self.total <= 0:
            return f"{self.done:g} {unit} [{self.took_s:.0f} s, {pace}]"
        left = (self.total - self.done) * self.took_s / self.done if self.done > 0 else 0.0
        times = f"{self.took_s:.0f} s < {max(0.0, left):.0f} s"
        return f"{self.done:g}/{self.total:g} [{times}, {pace}]"


def report(bar: Bar) -> str:
    """Return a line of output that says how far a bar is."""
    return f"{_MARK}{msgspec.json.encode(bar).decode()}{_END}"


def reported(text: str) -> Bar | None:
    """Return the bar that a line of output reports, if it does."""
    if not (text.startswith(_MARK) and text.endswith(_END)):
        return None
    try:
        return msgspec.json.decode(text[len(_MARK) : -len(_END)], type=Bar)
    except msgspec.MsgspecError:
        return None


class Bars:
    """All bars that are shown on this process's stderr."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[Hashable, Bar] = {}
        self._said_s: dict[Hashable, float] = {}
        self._drawn_s = 0.0
        self._is_drawn = False

    def update(self, key: Hashable, bar: Bar, cell: str = "") -> None:
        """Show a bar as it is now (any thread), whichever notebook's ``cell`` it is of."""
        with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
            terminal = sys.stderr.isatty()
            if bar.closed:
                self._close(key, bar, terminal=terminal)
                return
            if key not in self._open and len(self._open) >= _MAX_BARS:
                return
            self._open[key] = bar
            now_s = time.monotonic()
            if terminal and now_s - self._drawn_s >= _DRAW_S:
                self._drawn_s = now_s
                self._draw()
            elif not terminal and now_s - self._said_s.setdefault(key, now_s) >= _LINE_S:
                self._said_s[key] = now_s
                self._write(f"{bar.line()}\n")

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bars away while others print."""
        with self._lock:
            self._erase()
            try:
                yield
            finally:
                if self._open and self._drawn_s:
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        self._draw()

    def _close(self, key: Hashable, bar: Bar, *, terminal: bool) -> None:
        was_open = self._open.pop(key, None) is not None
        self._said_s.pop(key, None)
        self._erase()
        if bar.leave and (was_open or bar.done):
            self._write(f"{bar.line()}\n")
        if terminal and self._open:
            self._draw()

    def _draw(self) -> None:
        columns = shutil.get_terminal_size().columns
        lines = [bar.line()[: max(1, columns - 1)] for bar in self._open.values()]
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        body = "\n".join(lines)
        self._write(f"\r\x1b[J{body}{up}\r")
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._write("\r\x1b[J")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class NotebookBars:
    """All bars that are shown in this process's notebook, each as a widget below its cell."""

    def __init__(self, notebook: NotebookOutput) -> None:
        self._notebook = notebook
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Shown] = {}
        self._counts: Counter[str] = Counter()
        """How many bars were begun in each cell."""

    def update(self, key: Hashable, bar: Bar, cell: str = "") -> None:
        """Show a bar as it is now (any thread), below its cell or else the one that runs."""
        with self._lock:
            shown, now_s = self._open.get(key) or self._begin(bar, cell), time.monotonic()
            if shown is None or (not bar.closed and now_s - shown.drawn_s < _DRAW_S):
                return
            if bar.closed:
                self._open.pop(key, None)
            else:
                self._open[key] = shown
            is_gone = bar.closed and not bar.leave
            data = ("", "") if is_gone else (bar.as_html(), bar.line())
            self._notebook.show(shown.cell, shown.display, *data, again=shown.drawn_s > 0)
            shown.drawn_s = now_s

    def _begin(self, bar: Bar, cell: str) -> _Shown | None:
        """Return a place for a new bar; None if it need not be shown, or there are too many."""
        if bar.closed and not (bar.leave and bar.done):
            return None
        cell = cell or self._notebook.cell()
        if len(self._open) >= _MAX_BARS or self._counts[cell] >= _MAX_OF_CELL:
            return None
        if len(self._counts) > _MAX_OF_CELL:
            self._counts.clear()
        self._counts[cell] += 1
        return _Shown(cell)

    def hidden(self) -> contextlib.AbstractContextManager[None]:
        """Return an empty context: what others print is in no bar's way."""
        return contextlib.nullcontext()


class _Shown:
    """A bar in a notebook: its cell, the id of what is shown there, and when that was drawn."""

    def __init__(self, cell: str) -> None:
        self.cell = cell
        self.display = uuid.uuid4().hex
        self.drawn_s = 0.0


def shown_bars() -> Bars | NotebookBars:
    """Return the bars of this process."""
    return _bars_of(notebook_output())


@functools.lru_cache(maxsize=1)
def _bars_of(notebook: NotebookOutput | None) -> Bars | NotebookBars:
    return Bars() if notebook is None else NotebookBars(notebook)
