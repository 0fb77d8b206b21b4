"""The runtime of this process, which ``init()`` sets and ``shutdown()`` takes away.

This module is below all others and imports none of them, so it knows no type of a runtime: each user has a
:class:`CurrentRuntime` of the Protocol that it needs, and :func:`stoker.runtime.current.set_runtime` sets all
of them. Everything public goes through :meth:`CurrentRuntime.get`, so the error for a missing ``init()`` has
one place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from stoker.exceptions import ConflictError

R = TypeVar("R")


class _Driver(Protocol):
    """This process as the driver of a job."""

    def finish(self, *, reachable: bool, exits: bool) -> None: ...


class _Cluster(Protocol):
    """A cluster on this machine."""

    def is_alive(self) -> bool: ...
    def stop(self) -> None: ...


class _Lifecycle:
    """The making and ending of this process's runtime. Forked children start without one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.driver: _Driver | None = None
        """This process as a job, if ``init()`` made it one."""
        self.cluster: _Cluster | None = None
        """The local cluster that ``init()`` started, to be stopped by ``shutdown()``."""
        self.init: Callable[[], object] | None = None
        """Starts a local cluster, where one is needed and ``init()`` was not called."""
        self.auto_init = True
        self.forked = False

    def start(self) -> None:
        """Make a runtime, which the process lacks: start a local cluster. Raises what ``check`` does."""
        self.check()
        assert self.init is not None
        self.init()

    def check(self) -> None:
        """Raise ConflictError where :meth:`start` is refused."""
        if self.forked:
            raise ConflictError(
                "this process was forked from one that uses Stoker and cannot share its connection\n"
                "return the values to the parent, or start a new process (subprocess, or "
                "multiprocessing with 'spawn') that calls stoker.init(address)"
            )
        if not self.auto_init or self.init is None:
            raise ConflictError("stoker.shutdown() was called\ncall stoker.init() to go on")

    def after_fork(self) -> None:
        """Forget the driver and the cluster in a forked child: both are its parent's."""
        self.lock = threading.RLock()
        self.driver = self.cluster = None


LIFECYCLE = _Lifecycle()
os.register_at_fork(after_in_child=LIFECYCLE.after_fork)


class CurrentRuntime(Generic[R]):
    """The runtime of this process as one module sees it: ``R`` has what that module uses."""

    def __init__(self) -> None:
        self.runtime: R | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def get(self) -> R:
        """Return this process's runtime; start a local cluster if ``init()`` was never called."""
        runtime = self.runtime
        if runtime is None:
            LIFECYCLE.check()  # without the lock: shutdown() holds it while it waits for threads
            with LIFECYCLE.lock:
                if self.runtime is None:  # no other thread was about it
                    LIFECYCLE.start()
            runtime = self.runtime
            assert runtime is not None
        return runtime

    def _after_fork(self) -> None:
        """Forget the runtime in a forked child, where its loop thread is missing."""
        LIFECYCLE.forked = LIFECYCLE.forked or self.runtime is not None
        self.runtime = None
