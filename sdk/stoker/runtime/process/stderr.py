"""Words of the runtime itself to whoever runs the program, on stderr."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading


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
