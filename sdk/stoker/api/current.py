"""The runtime of this process, by its type: the cell that holds it is below all modules and knows none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.runtime.process import session

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime


def runtime() -> Runtime:
    """Return this process's runtime; start a local cluster if ``init()`` was never called."""
    current: Runtime = session.runtime()
    return current


def maybe_runtime() -> Runtime | None:
    """Return this process's runtime, or None."""
    current: Runtime | None = session.maybe_runtime()
    return current
