"""The runtime of this process, by its whole type; set here for all who use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.runtime.actors import handle
from stoker.runtime.objects import refs
from stoker.runtime.process.current_runtime import CurrentRuntime

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime

CURRENT: CurrentRuntime[Runtime] = CurrentRuntime()


def runtime() -> Runtime:
    """Return this process's runtime; start a local cluster if ``init()`` was never called."""
    return CURRENT.get()


def maybe_runtime() -> Runtime | None:
    """Return this process's runtime, or None."""
    return CURRENT.runtime


def set_runtime(runtime: Runtime | None) -> None:
    """Make this the runtime of this process, or leave it without one."""
    handle.CURRENT.runtime = refs.CURRENT.runtime = CURRENT.runtime = runtime
