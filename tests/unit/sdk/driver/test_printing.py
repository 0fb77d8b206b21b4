"""The driver's printer: stdout to stdout, stderr to stderr, in whatever cell of a notebook runs."""

from __future__ import annotations

import contextvars
import io
import sys
from typing import TYPE_CHECKING

from stoker.runtime.driver.printing import Printer
from stoker_wire.messages.control import LogLine, LogStream

if TYPE_CHECKING:
    import pytest

CELL = contextvars.ContextVar[str]("cell")


class Notebook(io.StringIO):
    """Routes by context, else to the cell that runs, as ipykernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""
        self.cells: dict[str, str] = {}

    def write(self, text: str, /) -> int:
        cell = CELL.get(self.running)
        self.cells[cell] = self.cells.get(cell, "") + text
        return len(text)


def line(text: str, stream: LogStream = LogStream.STDOUT) -> LogLine:
    return LogLine(node_id="n", worker_id="w", pid=1, name="f", text=text, stream=stream)


def test_a_line_appears_in_the_cell_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Notebook(), Notebook()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    out.running = "second"

    def first_cell() -> Printer:
        CELL.set("first")
        return Printer()

    printer = contextvars.copy_context().run(first_cell)
    printer.put(line("one"))
    printer.put(line("two", LogStream.STDERR))
    printer.close(30.0)
    assert out.cells == {"second": "(f pid=1) one\n"}
    assert err.cells == {"": "(f pid=1) two\n"}


def test_a_closed_stdout_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", err)
    printer = Printer()
    printer.put(line("lost"))
    printer.put(line("shown", LogStream.STDERR))
    printer.close(30.0)
    assert err.getvalue() == "(f pid=1) shown\n"
