"""``ActorPool``: calls spread over actors, each of which runs one at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from stoker.api.calls import get, wait
from stoker.exceptions import BadRequestError, GetTimeoutError, WrongTypeError
from stoker.runtime.objects.refs import ObjectRef, ObjectRefGenerator

A = TypeVar("A")
V = TypeVar("V")
R = TypeVar("R")


class ActorPool(Generic[A]):
    """A fixed group of actors that take calls in turn, as each becomes free.

    ::

        pool = ActorPool([Squarer.remote() for _ in range(4)])
        print(list(pool.map(lambda actor, value: actor.square.remote(value), range(10))))

    ``fn(actor, value)`` makes a call and returns what ``.remote()`` returned: a ref, a list of refs
    (``num_returns=2``), of which the values are the result, or a generator, which is the result. A
    call that raises is counted as done: its error comes out of the ``get_next`` that takes it, and
    its actor goes on. One thread at a time.
    """

    def __init__(self, actors: Iterable[A]) -> None:
        self._idle: deque[A] = deque(actors)
        self._waiting: deque[tuple[int, Callable[[A, Any], Any], Any]] = deque()
        self._busy: dict[int, tuple[ObjectRef[Any], A]] = {}
        """By number: the completion refs of calls whose actors are not known to be free, and the actors."""
        self._unread: dict[int, tuple[ObjectRef[Any], Any]] = {}
        """By number: the completion refs and results of all calls made whose results nobody took."""
        self._next_number = 0
        self._next_return = 0

    def map(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> Iterator[R]:
        """Yield the results of ``fn(actor, value)`` in the order of ``values``.

        All values are submitted at once. Results that were left from before are dropped first.
        """
        self._start_map(fn, values)
        return self._results(self.get_next)

    def map_unordered(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> Iterator[R]:
        """Yield as :meth:`map` does, but each result as soon as it is there."""
        self._start_map(fn, values)
        return self._results(self.get_next_unordered)

    def submit(self, fn: Callable[[A, V], Any], value: V) -> None:
        """Call ``fn(actor, value)`` on a free actor, or as soon as one is free."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting.append((number, fn, value))
        self._start_waiting()

    def has_next(self) -> bool:
        """Return whether a call was submitted whose result nobody took."""
        return bool(self._unread or self._waiting)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result in the order of submission, or raise what its call raised.

        After ``timeout`` seconds: ``GetTimeoutError``, and the result can be taken later; with
        ``ignore_if_timedout`` it is given up. ``StopIteration`` if nothing is left.
        """
        if not self.has_next():
            raise StopIteration("no result is left: submit() a call first")
        number = self._next_return
        while number not in self._unread and not self._is_waiting(number):
            number += 1  # taken by get_next_unordered
        self._next_return = number
        try:
            self._wait_for(number, timeout)
        except GetTimeoutError:
            if ignore_if_timedout:
                self._abandon(number)
            raise
        self._next_return = number + 1
        return self._pop_result(number)

    def get_next_unordered(
        self, timeout: float | None = None, ignore_if_timedout: bool = False
    ) -> Any:
        """Return the result that is there first; otherwise as :meth:`get_next`."""
        if not self.has_next():
            raise StopIteration("no result is left: submit() a call first")
        if not self._unread:
            raise BadRequestError("the pool has no actors: push() one first")
        ready = _first_of([completion for completion, _ in self._unread.values()], timeout)
        if ready is None:
            error = GetTimeoutError(f"none of {len(self._unread)} calls ended within {timeout:g} s")
            if ignore_if_timedout:
                self._abandon(min(self._unread))
            raise error
        return self._pop_result(
            next(n for n, (completion, _) in self._unread.items() if completion == ready)
        )

    def has_free(self) -> bool:
        """Return whether an actor is idle and no call waits."""
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> A | None:
        """Take an idle actor out of the pool; None if there is none."""
        return self._idle.popleft() if self.has_free() else None

    def push(self, actor: A) -> None:
        """Add an actor; ``BadRequestError`` if it is in the pool already."""
        if actor in self._idle or any(actor == other for _, other in self._busy.values()):
            raise BadRequestError(f"{actor!r} is in the pool already", field="actor")
        self._idle.append(actor)
        self._start_waiting()

    def _start_map(self, fn: Callable[[A, V], ObjectRef[R]], values: Iterable[V]) -> None:
        self._waiting.clear()
        self._unread.clear()
        self._next_return = self._next_number
        for value in values:
            self.submit(fn, value)

    def _results(self, take: Callable[[], R]) -> Iterator[R]:
        while self.has_next():
            yield take()

    def _start_waiting(self) -> None:
        while self._idle and self._waiting:
            number, fn, value = self._waiting.popleft()
            actor = self._idle.popleft()
            try:
                result = fn(actor, value)
                completion = _completion_ref(result)
            except BaseException:
                self._idle.append(actor)
                raise
            self._busy[number] = completion, actor
            self._unread[number] = completion, result

    def _is_waiting(self, number: int) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= number

    def _wait_for(self, number: int, timeout: float | None) -> None:
        """Wait until call ``number`` is done; calls before it end first and free their actors."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            call = self._unread.get(number)
            if call is None and not self._busy:
                raise BadRequestError("the pool has no actors: push() one first")
            watched = [call[0]] if call is not None else [ref for ref, _ in self._busy.values()]
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = _first_of(watched, left_s)
            if ready is None:
                raise GetTimeoutError(f"call {number} of the pool did not end within {timeout:g} s")
            for ended in [n for n, (ref, _) in self._busy.items() if ref == ready]:
                self._free(ended)
            if call is not None:
                return

    def _free(self, number: int) -> None:
        entry = self._busy.pop(number, None)
        if entry is not None:
            self._idle.append(entry[1])
            self._start_waiting()

    def _pop_result(self, number: int) -> Any:
        _, result = self._unread.pop(number)
        self._free(number)
        return result if isinstance(result, ObjectRefGenerator) else get(result)

    def _abandon(self, number: int) -> None:
        """Forget a call: its actor serves the next ones once it is free."""
        self._next_return = max(self._next_return, number + 1)
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        if self._unread.pop(number, None) is not None:
            self._free(number)


def _completion_ref(result: Any) -> ObjectRef[Any]:
    """Return a ref that is settled when a call has ended."""
    if isinstance(result, ObjectRef):
        return result
    if isinstance(result, ObjectRefGenerator):
        return result.completed()
    if isinstance(result, list) and result and all(isinstance(r, ObjectRef) for r in result):
        last: ObjectRef[Any] = result[-1]
        return last
    raise WrongTypeError(
        f"the function given to the pool returned {type(result).__name__}\n"
        "it must return what .remote() returns of a method with results (a ref, a list of refs, "
        "a generator)",
        field="fn",
    )


def _first_of(refs: list[ObjectRef[Any]], timeout: float | None) -> ObjectRef[Any] | None:
    ready, _ = wait(list(dict.fromkeys(refs)), num_returns=1, timeout=timeout)
    return ready[0] if ready else None
