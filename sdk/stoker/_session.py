"""Which runtime this process has: the one cell that ``init()`` fills and ``shutdown()`` empties.

Everything public goes through :func:`runtime`, so the error for a missing ``init()`` has one place.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from stoker.exceptions import StokerError

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


CELL = _Cell()


def runtime() -> Runtime:
    """Return this process's runtime; start a local cluster if ``init()`` was never called."""
    found = CELL.runtime
    if found is not None:
        return found
    if not CELL.auto_init:
        raise StokerError("stoker.shutdown() was called: call stoker.init() to go on")
    from stoker._init import init

    init()
    assert CELL.runtime is not None
    return CELL.runtime


def maybe_runtime() -> Runtime | None:
    """Return this process's runtime, or None."""
    return CELL.runtime
