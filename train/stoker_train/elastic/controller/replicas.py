"""The replica actors of a job, as its controller has them: start, tell, hear, end.

One thread per replica reads its stream of reports into the controller's queue; calls that tell a replica
something wait for no answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import stoker
from stoker.exceptions import StokerError
from stoker.train.elastic import Generation
from stoker_train.elastic.core import events as ev
from stoker_train.elastic.replica.actor import Replica, Work
from stoker_wire.messages.elastic import Replica as Place

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Slot

__all__ = ("Replicas",)

_log = logging.getLogger(__name__)
_CONCURRENCY = 8
_PRELOAD = ("torch", "torch.distributed.nn.functional", "stoker_train.elastic.replica.context")
"""Imported once per node, so that a newcomer is there in a moment."""
_OF_OPTIMIZERS = "torch._dynamo"
"""The most of what a first optimizer imports: more than a second of every replica's start."""


@dataclass(slots=True)
class _One:
    handle: Any
    thread: threading.Thread
    heard_s: float
    calls: list[Any] = field(default_factory=list)


class Replicas:
    """All replicas of a controller. ``put`` takes what they report, from any thread."""

    def __init__(
        self, work: Work, resources: Mapping[str, float], put: Callable[[Any], None]
    ) -> None:
        self._work = stoker.put(work)
        self._resources = dict(resources)
        self._put = put
        self._ones: dict[int, _One] = {}
        self._lock = threading.Lock()

    def launch(self, worker: int, slot: Slot, *, rehearse: bool, local: int | None) -> None:
        """Start a replica in a slot."""
        place = Place(group_id=slot.group_id, bundle=slot.bundle, node_id=slot.node_id)
        (strategy,) = Generation(0, (place,), self._resources).strategies()
        needs = dict(self._resources)
        actor = stoker.remote(Replica).options(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs or None,
            scheduling_strategy=strategy,
            max_concurrency=_CONCURRENCY,
            runtime_env={"preload": _preloaded()},
        )
        handle = actor.remote(self._work, worker, rehearse, local)
        thread = threading.Thread(
            target=self._hear, args=(worker, handle), name=f"replica-{worker}", daemon=True
        )
        with self._lock:
            self._ones[worker] = _One(handle, thread, time.monotonic())
        thread.start()

    def order(self, worker: int, order: Any) -> None:
        """Give an order."""
        self._tell(worker, "order", order)

    def form(self, worker: int, form: ev.Form) -> None:
        """Have a replica form a generation."""
        self._tell(worker, "form", form)

    def interrupt(self, worker: int, generation: int) -> None:
        """Tell a replica that a generation will not go on."""
        self._tell(worker, "interrupt", generation)

    def kill(self, worker: int) -> None:
        """End a replica; nothing more is heard of it."""
        with self._lock:
            one = self._ones.pop(worker, None)
        if one is not None:
            try:
                stoker.kill(one.handle)
            except StokerError as error:
                _log.info("replica %d had ended: %s", worker, error)

    def kill_all(self) -> None:
        """End all replicas."""
        for worker in list(self._ones):
            self.kill(worker)

    def silent(self, longest_s: float) -> list[int]:
        """Return the replicas that have begun to report and then said nothing for so long."""
        now_s = time.monotonic()
        with self._lock:
            return [n for n, one in self._ones.items() if now_s - one.heard_s > longest_s]

    def excuse(self, now_s: float) -> None:
        """Take all replicas as heard now."""
        with self._lock:
            for one in self._ones.values():
                one.heard_s = now_s

    def _tell(self, worker: int, method: str, value: Any) -> None:
        one = self._ones.get(worker)
        if one is None:
            return
        # The newest refs only: a call that failed is the end of its actor, which the stream tells.
        one.calls = [*one.calls[-7:], getattr(one.handle, method).remote(value)]

    def _hear(self, worker: int, handle: Any) -> None:
        why = "its stream of reports has ended"
        try:
            for ref in handle.reports.options(num_returns="streaming").remote():
                reports = stoker.get(ref)
                one = self._ones.get(worker)
                if one is None:
                    return
                one.heard_s = time.monotonic()
                for report in reports:
                    self._put(report)
        except StokerError as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        except Exception as error:  # of a report that cannot be read
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            known = self._ones.pop(worker, None)
        if known is not None:
            self._put(ev.Died(0.0, worker, why))


def _preloaded() -> list[str]:
    """Return the modules that nodes import for replicas.

    Triton is one of them, and asks for its interpreter as it is imported: a job that wants that one has its
    variables only later, in its own processes.
    """
    wants_interpreter = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return [*_PRELOAD] if wants_interpreter else [*_PRELOAD, _OF_OPTIMIZERS]
