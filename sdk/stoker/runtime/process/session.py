"""The runtime of this process: the one cell that ``init()`` fills and ``shutdown()`` empties.

Everything public goes through :func:`runtime`, so the error for a missing ``init()`` has one place.
This module is below all others and imports none of them: its callers name the type that they need.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from stoker.exceptions import ConflictError


class _Cell:
    """The holder of this process's runtime. Forked children start without one."""

    def __init__(self) -> None:
        self.runtime: Any = None
        self.lock = threading.RLock()
        self.driver: Any = None
        """This process as a job, if ``init()`` made it one."""
        self.cluster: Any = None
        """The local cluster that ``init()`` started, to be stopped by ``shutdown()``."""
        self.init: Callable[[], object] | None = None
        """Starts a local cluster, where one is needed and ``init()`` was not called."""
        self.auto_init = True
        self.forked = False

    def after_fork(self) -> None:
        """Forget the runtime in a forked child, where its loop thread is missing."""
        self.forked = self.forked or self.runtime is not None
        self.lock = threading.RLock()
        self.runtime = self.driver = self.cluster = None


CELL = _Cell()
os.register_at_fork(after_in_child=CELL.after_fork)


def runtime() -> Any:
    """Return this process's runtime; start a local cluster if ``init()`` was never called."""
    runtime = CELL.runtime
    if runtime is not None:
        return runtime
    if CELL.forked:
        raise ConflictError(
            "this process was forked from one that uses Stoker and cannot share its connection\n"
            "return the values to the parent, or start a new process (subprocess, or "
            "multiprocessing with 'spawn') that calls stoker.init(address)"
        )
    if not CELL.auto_init or CELL.init is None:
        raise ConflictError("stoker.shutdown() was called\ncall stoker.init() to go on")
    CELL.init()
    return CELL.runtime


def maybe_runtime() -> Any:
    """Return this process's runtime, or None."""
    return CELL.runtime
