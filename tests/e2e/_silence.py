"""Two ways to fall silent for good; small, as workers import it when they read the arguments of a task."""

from __future__ import annotations

import ctypes
import os
import signal

FOR_EVER_S = 600


def hold_the_interpreter() -> None:
    """Sleep in C, with the GIL: no other thread of this process runs."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def stop_the_process() -> None:
    """As Ctrl-Z does, but by a signal that no process can refuse."""
    os.kill(os.getpid(), signal.SIGSTOP)
