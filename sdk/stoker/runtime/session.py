"""Which runtime this process has: the one cell that ``init()`` fills and ``shutdown()`` empties.

Everything public goes through :func:`runtime`, so the error for a missing ``init()`` has one place.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ConflictError

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime


class _Cell:
    """Holds the runtime of this process. Forked children start without one."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.lock = threading.RLock()
        self.cluster: Any = None
        """The local cluster that ``init()`` started, to be stopped by ``shutdown()``."""
        self.auto_init = True
        self.forked = False

    def after_fork(self) -> None:
        """In a forked child the loop thread is missing: nothing of the runtime may be touched."""
        self.forked = self.forked or self.runtime is not None
        self.lock = threading.RLock()
        self.runtime = self.cluster = None


CELL = _Cell()
os.register_at_fork(after_in_child=CELL.after_fork)


def runtime() -> Runtime:
    """Return this process's runtime; start a local cluster if ``init()`` was never called."""
    found = CELL.runtime
    if found is not None:
        return found
    if CELL.forked:
        raise ConflictError(
            "this process was forked from one that uses Stoker and cannot share its connection\n"
            "return the values to the parent, or start a new process (subprocess, or "
            "multiprocessing with 'spawn') that calls stoker.init(address)"
        )
    if not CELL.auto_init:
        raise ConflictError("stoker.shutdown() was called\ncall stoker.init() to go on")
    from stoker.api.init import init

    init()
    assert CELL.runtime is not None
    return CELL.runtime


def maybe_runtime() -> Runtime | None:
    """Return this process's runtime, or None."""
    return CELL.runtime
