"""The workers' output at the driver: their stdout to its stdout, their stderr to its stderr.

It has a thread of its own. A terminal or a pipe that is slow or full must not block the runtime's loop,
and a notebook routes what a thread prints to the cell that runs, but what a task of a loop prints to
the cell that the loop was made in. Lines that name their cell go below that one.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from stoker.runtime.driver.notebook_output import notebook_output
from stoker.runtime.driver.progress_bars import reported, shown_bars
from stoker.runtime.process.terminal import line_of, speaker
from stoker_wire.messages.control import LogStream

if TYPE_CHECKING:
    from stoker.runtime.driver.notebook_output import NotebookOutput
    from stoker_wire.messages.control import LogLine

_PAUSE_S = 0.05
"""Between messages to a notebook: its server drops those of a kernel that sends too many."""


class Printer:
    """A queue of lines, and the thread that prints them; ``len()`` is the number that wait."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[LogLine | None] = queue.SimpleQueue()
        # Not in the context of the caller: it may be that of a notebook's first cell.
        self._thread = threading.Thread(
            target=contextvars.Context().run, args=(self._run,), name="stoker-output", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return self._lines.qsize()

    def put(self, line: LogLine) -> None:
        """Queue a line to be printed."""
        self._lines.put(line)

    def close(self, timeout_s: float) -> None:
        """Print what waits, and end; give up after ``timeout_s``."""
        self._lines.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        notebook = notebook_output()
        while (line := self._lines.get()) is not None:
            if (bar := reported(line.text)) is not None:
                shown_bars().update((line.worker_id, line.pid, bar.number), bar, line.cell)
            elif notebook is None or not _write_to_cell(notebook, line):
                _write(line)
            if self._lines.empty():
                _flush(notebook)
                if notebook is not None:
                    time.sleep(_PAUSE_S)
        _flush(notebook)


def _flush(notebook: NotebookOutput | None) -> None:
    if notebook is not None:
        notebook.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _write(line: LogLine) -> None:
    # The stream of this moment: programs and notebooks put others in its place.
    with shown_bars().hidden(), contextlib.suppress(OSError, ValueError, AttributeError):
        stream = getattr(sys, _stream_of(line))
        shown = line_of(speaker(line), line.text, is_terminal=stream.isatty())
        stream.write(f"{shown}\n")


def _write_to_cell(notebook: NotebookOutput, line: LogLine) -> bool:
    """Print a line below its cell; False, after those that came before it, if it goes where others do."""
    shown = line_of(speaker(line), line.text, is_terminal=False)
    if notebook.write(line.cell, _stream_of(line), f"{shown}\n"):
        return True
    notebook.flush()
    return False


def _stream_of(line: LogLine) -> str:
    return "stderr" if line.stream is LogStream.STDERR else "stdout"
