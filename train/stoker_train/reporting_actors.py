"""Actors that run a loop, as the controller of a training has them: tell, hear, end.

One thread per actor reads its stream of reports into the controller's queue; calls that tell an actor
something wait for no answer. Base of elastic replicas and of the ranks of a gang.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import stoker
from stoker.exceptions import StokerError

__all__ = ("ReportingActors", "preloaded")

_log = logging.getLogger(__name__)
_OF_OPTIMIZERS = "torch._dynamo"
"""The most of what a first optimizer imports: more than a second of every start."""


@dataclass(slots=True, eq=False)
class _One:
    handle: Any
    heard_s: float
    calls: list[Any] = field(default_factory=list)


class ReportingActors:
    """Actors by number, whose method ``reports`` streams lists of reports until their work has ended.

    ``put`` takes each report, from any thread, and what ``died`` makes of the number of one whose stream has
    ended and the reason. ``what`` names one in the log. A number may be given again once its actor was
    killed: nothing more is heard of the one before.
    """

    def __init__(
        self, what: str, put: Callable[[Any], None], died: Callable[[int, str], Any]
    ) -> None:
        self._what, self._put, self._died = what, put, died
        self._ones: dict[int, _One] = {}
        self._lock = threading.Lock()

    def add(self, worker: int, handle: Any) -> None:
        """Begin to hear an actor that was started; it takes the place of one of that number."""
        one = _One(handle, time.monotonic())
        thread = threading.Thread(
            target=self._hear,
            args=(worker, one, self._died),
            name=f"{self._what}-{worker}",
            daemon=True,
        )
        with self._lock:
            self._ones[worker] = one
        thread.start()

    def tell(self, worker: int, method: str, *values: Any) -> None:
        """Call a method of an actor, if it is there."""
        one = self._ones.get(worker)
        if one is None:
            return
        # The newest refs only: a call that failed is the end of its actor, which the stream tells.
        one.calls = [*one.calls[-7:], getattr(one.handle, method).remote(*values)]

    def kill(self, worker: int) -> None:
        """End an actor; nothing more is heard of it."""
        with self._lock:
            one = self._ones.pop(worker, None)
        if one is not None:
            try:
                stoker.kill(one.handle)
            except StokerError as error:
                _log.info("%s %d had ended: %s", self._what, worker, error)

    def kill_all(self) -> None:
        """End all actors."""
        for worker in list(self._ones):
            self.kill(worker)

    def silent(self, longest_s: float) -> list[int]:
        """Return the actors that have begun to report and then said nothing for so long."""
        now_s = time.monotonic()
        with self._lock:
            return [n for n, one in self._ones.items() if now_s - one.heard_s > longest_s]

    def excuse(self, now_s: float) -> None:
        """Take all actors as heard now."""
        with self._lock:
            for one in self._ones.values():
                one.heard_s = now_s

    def _hear(self, worker: int, one: _One, died: Callable[[int, str], Any]) -> None:
        why = "its stream of reports has ended"
        try:
            for ref in one.handle.reports.options(num_returns="streaming").remote():
                reports = stoker.get(ref)
                if self._ones.get(worker) is not one:  # ended; another may have its number by now
                    return
                one.heard_s = time.monotonic()
                for report in reports:
                    self._put(report)
        except StokerError as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        except Exception as error:  # of a report that cannot be read
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            known = self._ones.get(worker) is one
            if known:
                del self._ones[worker]
        if known:
            self._put(died(worker, why))


def preloaded(*modules: str, of_triton: Sequence[str] = ()) -> list[str]:
    """Return the modules that nodes import once for actors that train, so that each is there in a moment.

    ``of_triton``: those that import Triton, as torch's optimizers do, which are left out where that must be.
    It asks for its interpreter as it is imported: a job that wants that one has its
    variables only later, in its own processes.
    """
    wants_interpreter = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return [*modules] if wants_interpreter else [*modules, _OF_OPTIMIZERS, *of_triton]
