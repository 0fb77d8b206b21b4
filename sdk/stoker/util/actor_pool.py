"""``ActorPool``: spreads calls over actors, each of which does one at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker._api import get, wait
from stoker.exceptions import BadRequestError, GetTimeoutError

if TYPE_CHECKING:
    from stoker._refs import ObjectRef

A = TypeVar("A")
V = TypeVar("V")
R = TypeVar("R")


class ActorPool(Generic[A]):
    """A fixed group of actors that take calls in turn, as each becomes free.

    ::

        pool = ActorPool([Squarer.remote() for _ in range(4)])
        print(list(pool.map(lambda actor, value: actor.square.remote(value), range(10))))

    ``fn(actor, value)`` makes a call and returns its ref. A call that raises is counted as done: its
    error comes out of the ``get_next`` that takes it, and its actor goes on. One thread at a time.
    """

    def __init__(self, actors: Iterable[A]) -> None:
        self._idle: deque[A] = deque(actors)
        self._waiting: deque[tuple[int, Callable[[A, Any], ObjectRef[Any]], Any]] = deque()
        self._busy: dict[ObjectRef[Any], tuple[int, A]] = {}
        """Calls whose actors have not been seen free."""
        self._refs: dict[int, ObjectRef[Any]] = {}
        """By number: all calls made whose results nobody took."""
        self._next_number = 0
        self._next_return = 0

    def map(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> Iterator[R]:
        """Yield the results of ``fn(actor, value)`` in the order of ``values``.

        All values are submitted at once. Results that were left from before are dropped first.
        """
        self._start_map(fn, values)
        return self._drain(self.get_next)

    def map_unordered(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> Iterator[R]:
        """Like :meth:`map`, but each result as soon as it is there."""
        self._start_map(fn, values)
        return self._drain(self.get_next_unordered)

    def submit(self, fn: Callable[[A, V], ObjectRef[Any]], value: V) -> None:
        """Call ``fn(actor, value)`` on a free actor, or as soon as one is free."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting.append((number, fn, value))
        self._fill()

    def has_next(self) -> bool:
        """Whether a call was submitted whose result nobody took."""
        return bool(self._refs or self._waiting)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result in the order of submission, or raise what its call raised.

        After ``timeout`` seconds: ``GetTimeoutError``, and the result can be taken later; with
        ``ignore_if_timedout`` it is given up. ``StopIteration`` if nothing is left.
        """
        if not self.has_next():
            raise StopIteration("no result is left: submit() a call first")
        number = self._next_return
        while number not in self._refs and not self._is_waiting(number):
            number += 1  # taken by get_next_unordered
        self._next_return = number
        try:
            ref = self._made(number, timeout)
        except GetTimeoutError:
            if ignore_if_timedout:
                self._give_up(number)
            raise
        self._next_return = number + 1
        return self._taken(number, ref)

    def get_next_unordered(
        self, timeout: float | None = None, ignore_if_timedout: bool = False
    ) -> Any:
        """Return whichever result is there first; otherwise like :meth:`get_next`."""
        if not self.has_next():
            raise StopIteration("no result is left: submit() a call first")
        if not self._refs:
            raise BadRequestError("the pool has no actors: push() one first")
        ready, _ = wait(list(self._refs.values()), num_returns=1, timeout=timeout)
        if not ready:
            error = GetTimeoutError(f"none of {len(self._refs)} calls ended within {timeout:g} s")
            if ignore_if_timedout:
                self._give_up(min(self._refs))
            raise error
        number = next(n for n, ref in self._refs.items() if ref == ready[0])
        return self._taken(number, ready[0])

    def has_free(self) -> bool:
        """Whether an actor is idle and no call waits."""
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> A | None:
        """Take an idle actor out of the pool; None if there is none."""
        return self._idle.popleft() if self.has_free() else None

    def push(self, actor: A) -> None:
        """Add an actor; ``BadRequestError`` if it is in the pool already."""
        if actor in self._idle or any(actor == other for _, other in self._busy.values()):
            raise BadRequestError(f"{actor!r} is in the pool already", field="actor")
        self._idle.append(actor)
        self._fill()

    def _start_map(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> None:
        self._waiting.clear()
        self._refs.clear()
        self._next_return = self._next_number
        for value in values:
            self.submit(fn, value)

    def _drain(self, take: Callable[[], R]) -> Iterator[R]:
        while self.has_next():
            yield take()

    def _fill(self) -> None:
        while self._idle and self._waiting:
            number, fn, value = self._waiting.popleft()
            actor = self._idle.popleft()
            try:
                ref = fn(actor, value)
            except BaseException:
                self._idle.append(actor)
                raise
            self._busy[ref] = number, actor
            self._refs[number] = ref

    def _is_waiting(self, number: int) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= number

    def _made(self, number: int, timeout: float | None) -> ObjectRef[Any]:
        """Wait until call ``number`` is done; calls before it end first and free their actors."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            ref = self._refs.get(number)
            if ref is None and not self._busy:
                raise BadRequestError("the pool has no actors: push() one first")
            watched = [ref] if ref is not None else list(self._busy)
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready, _ = wait(watched, num_returns=1, timeout=left_s)
            for done in ready:
                self._free(done)
            if ref is not None and ready:
                return ref
            if not ready:
                raise GetTimeoutError(f"call {number} of the pool did not end within {timeout:g} s")

    def _free(self, ref: ObjectRef[Any]) -> None:
        found = self._busy.pop(ref, None)
        if found is not None:
            self._idle.append(found[1])
            self._fill()

    def _taken(self, number: int, ref: ObjectRef[Any]) -> Any:
        del self._refs[number]
        self._free(ref)
        return get(ref)

    def _give_up(self, number: int) -> None:
        """Forget a call: its actor serves others behind it, in order."""
        self._next_return = max(self._next_return, number + 1)
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        ref = self._refs.pop(number, None)
        if ref is not None:
            self._free(ref)
