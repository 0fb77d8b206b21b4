"""The handler by which this worker writes its stacks at a signal, whatever holds the interpreter.

It is Python's faulthandler, in C, with a file in memory that the nodelet reads: it costs nothing until
then, and no thread. Programs may use faulthandler for themselves.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os

from stoker_wire.messages.node_api import STACK_FILE, STACK_SIGNAL


def write_stacks_at_signal() -> None:
    """Register the handler (main thread). The file is open as long as this process runs."""
    file = os.memfd_create(STACK_FILE, os.MFD_CLOEXEC)
    # Its reader empties it: what is written next is to begin there.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
