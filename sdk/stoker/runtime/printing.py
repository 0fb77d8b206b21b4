"""Prints the workers' output at the driver: their stdout to its stdout, their stderr to its stderr.

By a thread of its own. A terminal or a pipe that is slow or full must not hold up the runtime's loop,
and a notebook routes what a thread prints to the cell that runs, but what a task of a loop prints to
the cell that the loop was made in.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
import threading
from typing import TYPE_CHECKING

from stoker_wire.messages.control import LogStream

if TYPE_CHECKING:
    from stoker_wire.messages.control import LogLine


class Printer:
    """A queue of lines, and the thread that prints them; ``len()`` says how many wait."""

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
        """Print a line soon."""
        self._lines.put(line)

    def close(self, timeout_s: float) -> None:
        """Print what waits, and end; give up after ``timeout_s``."""
        self._lines.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            name = "stderr" if line.stream is LogStream.STDERR else "stdout"
            # The stream of this moment: programs and notebooks put others in its place.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream = getattr(sys, name)
                stream.write(f"{_prefix(line, is_terminal=stream.isatty())} {line.text}\n")
            if self._lines.empty():
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        stream.flush()


def tell(text: str) -> None:
    """Write to stderr by a thread, so that the caller need not wait; a notebook shows it where it is."""
    with contextlib.suppress(RuntimeError):  # at the interpreter's end there are no new threads
        run = contextvars.Context().run
        threading.Thread(target=run, args=(tell_now, text), name="stoker-notice").start()
        return
    tell_now(text)


def tell_now(text: str) -> None:
    """Write to stderr, if it can be written to."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _prefix(line: LogLine, *, is_terminal: bool) -> str:
    who = f"({line.name or 'worker'} pid={line.pid})" if line.worker_id else f"({line.name})"
    return f"\x1b[36m{who}\x1b[0m" if is_terminal else who
