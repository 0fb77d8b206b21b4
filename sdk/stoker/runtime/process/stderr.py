"""Notices of the runtime itself on stderr.

A terminal or a pipe may be slow or full, and the loop thread must not wait for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading

from stoker.runtime.process.terminal import clean


def write_soon(text: str) -> None:
    """Write to stderr from a thread, so that the caller need not wait.

    A notebook shows it in the cell that runs.
    """
    with contextlib.suppress(RuntimeError):  # at the interpreter's end there are no new threads
        run = contextvars.Context().run
        threading.Thread(target=run, args=(write_now, text), name="stoker-notice").start()
        return
    write_now(text)


def write_now(text: str) -> None:
    """Write to stderr, if it can be written to."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(clean(text))
        sys.stderr.flush()
