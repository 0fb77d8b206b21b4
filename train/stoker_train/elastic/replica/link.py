"""The mailbox between a replica's loop and its control calls: orders come in, reports go out.

One per replica process. The loop's thread takes, the actor's threads put; a lock guards each side.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.replica.reports import Beat

if TYPE_CHECKING:
    from stoker_train.elastic.core.events import Form
    from stoker_train.elastic.core.membership import Order

__all__ = ("Link",)

_MAX_REPORTS = 10_000
_LATENCY_S = 0.1
"""Reports that nobody waits for are sent together, so often."""
_BEAT_S = 0.5


class Link:
    """The two directions of a replica's control, for ``worker``."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._lock = threading.Condition()
        self._orders: dict[int, Order] = {}
        self._known = self._base = 0
        self._form: Form | None = None
        self._void = 0
        self._ended = False
        self._reports: deque[Any] = deque()
        self._urgent = False
        self._waits: tuple[int, int, float] | None = None
        self.thread_id = 0
        """The loop's thread."""
        self.abandoned = threading.Event()
        """Set while the rendezvous that the loop is in, if any, will not be completed."""

    # The side of the loop.

    def report(self, report: Any, *, urgent: bool = False) -> None:
        """Send a report; what is not ``urgent`` waits a moment. The oldest is lost if 10,000 wait."""
        with self._lock:
            if len(self._reports) >= _MAX_REPORTS:
                self._reports.popleft()
            self._reports.append(report)
            if urgent:
                self._urgent = True
                self._lock.notify_all()

    @property
    def known_order(self) -> int:
        """The number up to which all orders have come."""
        return self._known

    def orders(self, upto: int, after: int) -> list[Order]:
        """Return the orders numbered above ``after``, to ``upto``, and forget them."""
        with self._lock:
            found = [self._orders[n] for n in sorted(self._orders) if after < n <= upto]
            self._orders = {n: one for n, one in self._orders.items() if n > upto}
            self._base = max(self._base, upto)
            return found

    def waiting_orders(self) -> dict[int, Order]:
        """Return the orders that were not taken yet, by number."""
        with self._lock:
            return dict(self._orders)

    def is_void(self, generation: int) -> bool:
        """Return whether this generation is known not to go on."""
        return generation <= self._void

    def wait_form(self, after: int, timeout_s: float) -> Form | None:
        """Return the newest generation to form with a number above ``after``; None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                form = self._form
                if form is not None and form.membership.generation > max(after, self._void):
                    self._form = None
                    self.abandoned.clear()
                    return form
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._ended:
                    return None
                self._lock.wait(left_s)

    def begin_wait(self, generation: int, step: int) -> None:
        """Note that the loop waits for other ranks."""
        self._waits = (generation, step, time.monotonic())

    def end_wait(self) -> None:
        """Note that it does not any more."""
        self._waits = None

    # The side of the actor.

    def put_order(self, order: Order) -> None:
        """Take an order; one that has come before changes nothing, one that comes too early waits."""
        with self._lock:
            if order.number > self._base:
                self._orders.setdefault(order.number, order)
                self._count()

    def begin_orders(self, base: int) -> None:
        """Begin a generation: orders numbered up to ``base`` are of the past."""
        with self._lock:
            self._base = self._known = base
            self._orders = {n: one for n, one in self._orders.items() if n > base}
            self._count()

    def _count(self) -> None:
        while self._known + 1 in self._orders:
            self._known += 1

    def put_form(self, form: Form) -> None:
        """Take the order to form a generation; an older one changes nothing."""
        with self._lock:
            if form.membership.generation > self._void:
                self._form = form
                self._lock.notify_all()

    def interrupt(self, generation: int) -> None:
        """Void a generation and all before it: who waits for its ranks is told."""
        with self._lock:
            self._void = max(self._void, generation)
            if self._form is not None and self._form.membership.generation <= self._void:
                self._form = None
            self.abandoned.set()
            self._lock.notify_all()

    def end(self) -> None:
        """End the stream of reports, once all are taken."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()

    def drain(self) -> list[Any] | None:
        """Return the next reports, a beat if there are none for a while, None at the end."""
        deadline = time.monotonic() + _BEAT_S
        with self._lock:
            while not self._urgent and not self._ended:
                wait_s = deadline - time.monotonic()
                if wait_s <= 0:
                    break
                self._lock.wait(min(wait_s, _LATENCY_S))
                if self._reports:
                    break
            reports, self._reports, self._urgent = list(self._reports), deque(), False
            if self._ended and not reports:
                return None
        return [*reports, Beat(self.worker)]

    def waiting(self) -> tuple[int, int, float, str] | None:
        """Return generation, step and seconds for which the loop has waited for others, and at which line."""
        waits = self._waits
        if waits is None:
            return None
        generation, step, since = waits
        return generation, step, time.monotonic() - since, self._line()

    def _line(self) -> str:
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None and "stoker_train" in frame.f_code.co_filename:
            frame = frame.f_back
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_library(path: str) -> bool:
    return "site-packages" in path or "/lib/python" in path or "stoker_train" in path
