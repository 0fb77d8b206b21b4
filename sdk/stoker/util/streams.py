"""``map_stream``: a function over as many items as there are, of which only a window is under way.

Executors and pools make their iterators of :class:`Stream` too.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker.api.calls import cancel
from stoker.api.remote import RemoteFunction
from stoker.exceptions import BadRequestError, GetTimeoutError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.objects.waiters import ThreadWaiter
from stoker.runtime.serialization.exceptions import decode_error
from stoker.util.functions import Functions, note_item

if TYPE_CHECKING:
    from typing import Self

    from stoker_wire.messages.data import Failed, Location

T = TypeVar("T")
R = TypeVar("R")
WINDOW = 1000
_REFILLS = 4
"""A window is refilled in so many parts: calls that leave together cost less."""
_JOIN_S = 0.005
"""Chunks go together in one call that takes about this long."""
_JOIN_ITEMS = 10_000
_JOIN_NBYTES = 256 << 10
_FORGET = 0.8
"""An item that took long counts for less with each call after it."""


def map_stream(
    fn: Callable[[T], R] | RemoteFunction[..., R],
    items: Iterable[T],
    *,
    window: int = WINDOW,
    ordered: bool = True,
    chunksize: int = 1,
    **options: Any,
) -> Stream[R]:
    """Return an iterator over ``fn(item)`` for each of ``items``, which may be without end.

    ::

        for text in stoker.map_stream(read, paths, window=200, ordered=False):
            ...

    At most ``window`` items are under way at once: taken from ``items``, and their results not yet
    taken from here. So memory is bounded by the window however many items there are, and a consumer
    that is slow holds the producers back. Results come in the order of ``items``, or with
    ``ordered=False`` as they are there. ``chunksize`` items at least go in one call; chunks that take
    less than a few milliseconds go together by themselves. An item that is an ``ObjectRef`` arrives as
    its value. ``options`` are those of ``@stoker.remote``; ``fn`` may be a remote function, with its
    own.

    An error of ``fn`` comes out at its item, as its own type, with ``error.item_index`` (from 0) and a note
    that says so; it ends the stream, as does ``close()``, the end of a ``with`` block, Ctrl-C in a wait, and
    the loss of the last reference: what is under way is cancelled. An error of ``items`` comes out after the
    results of those before it. One thread at a time.
    """
    if isinstance(fn, RemoteFunction):
        remote = fn.options(**options) if options else fn
        functions, function = Functions(remote._options, what="map_stream()"), fn.function
    else:
        if not callable(fn):
            raise WrongTypeError(f"map_stream(): {fn!r} is not callable", field="fn")
        functions, function = Functions(options, what="map_stream()"), fn
    return Stream(functions, function, items, window=window, ordered=ordered, chunksize=chunksize)


class Stream(Iterator[R], Generic[R]):
    """The results of calls, as :func:`map_stream` describes them.

    ``chunksize`` items are one chunk, and chunks that take less than ``_JOIN_S`` go together in one
    call. Without a ``window`` a thousand calls or so are under way. ``total`` is the number of items,
    if it is known. With ``goes_on`` an error does not end it: what follows the chunk can be taken.
    ``on_end`` is told that the last result was taken, or the stream closed.
    """

    def __init__(
        self,
        functions: Functions,
        function: Callable[..., R],
        items: Iterable[Any],
        *,
        window: int | None,
        ordered: bool = True,
        chunksize: int = 1,
        star: bool = False,
        total: int | None = None,
        goes_on: bool = False,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self._closed = True  # until all is as it must be: __del__ may come before
        self._window = _checked(window, "window") if window is not None else None
        self._chunksize = _checked(chunksize, "chunksize")
        self._chunk = functions.chunk(function, star=star)
        self._items: Iterator[Any] | None = iter(items)
        self._input_error: Exception | None = None
        self._left = total
        self._goes_on = goes_on
        self._on_end = on_end
        self._objects = current.runtime().objects
        self._workers = functions.workers
        self._may_join = functions.may_join
        self._cost_s = -1.0
        """How long an item took lately, at most; below 0 as long as none came back."""
        self._nbytes = 0
        self._next_index = 0
        self._open = 0
        """The items that were taken, and whose results were not."""
        self._groups: deque[list[Any] | _Failure] = deque()
        self._values: deque[R] = deque()
        self._flight: deque[_Call] = deque()
        self._arrivals = None if ordered else _Arrivals()
        self._unordered: dict[_Call, None] = {}
        self._closed = False
        self._fill()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        """Return the next result, waiting as long as it takes."""
        return self.next()

    def next(self, timeout: float | None = None) -> R:
        """Return the next result, or raise its error; ``GetTimeoutError`` after ``timeout`` seconds.

        After a timeout the stream goes on. ``StopIteration`` after the last result.
        """
        while not self._values:
            self._values.extend(self.next_group(timeout))
        self._open -= 1
        return self._values.popleft()

    def next_group(self, timeout: float | None = None) -> list[R]:
        """Return the results of the next chunk, or raise its error; see ``count_taken``."""
        if not self._groups:
            self._receive(timeout)
        group = self._groups.popleft()
        if type(group) is _Failure:
            self._open -= group.count
            if not self._goes_on:
                self.close()
            raise group.error
        assert isinstance(group, list)
        return group

    def collect(self) -> list[R]:
        """Return all results."""
        values: list[R] = []
        while True:
            try:
                group = self.next_group()
            except StopIteration:
                return values
            self.count_taken(len(group))
            values += group

    def buffer_all(self) -> None:
        """Make all calls, whatever the window, and wait for them; their results can be taken then."""
        self._window = None
        kept: deque[list[Any] | _Failure] = deque()
        try:
            while True:
                kept += self._groups
                self._groups.clear()
                self._receive(None)
        except StopIteration:
            pass
        except Exception as error:
            self._input_error = error
        self._groups = kept

    def settle(self) -> None:
        """Wait until the calls under way have ended."""
        refs = self.refs()
        self._objects.wait(refs, len(refs), None)

    def count_taken(self, count: int) -> None:
        """Note that so many results of ``next_group`` do not wait any more."""
        self._open -= count

    def close(self) -> None:
        """Cancel what is under way; there are no further results."""
        if self._closed:
            return
        refs = self.refs()
        self._flight, self._unordered = deque(), {}
        self._groups, self._values = deque(), deque()
        self._end()
        self._objects.unseen.mark_requested([ref._entry for ref in refs])
        _cancel(refs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and current.maybe_runtime() is not None:
            self.close()

    def refs(self) -> list[ObjectRef[Any]]:
        """Return the refs of the calls whose results were not taken."""
        return [call.ref for call in (*self._flight, *self._unordered)]

    def stop(self) -> list[ObjectRef[Any]]:
        """Take no more items (any thread); return the refs of the calls whose results were not taken."""
        self._items = None
        return self.refs()

    def cancel(self) -> None:
        """Take no more items, and cancel the calls under way (any thread): they raise at their results."""
        _cancel(self.stop())

    # -- inside ------------------------------------------------------------------------------------

    def _receive(self, timeout: float | None) -> None:
        """Wait for a call; the results of its chunks are in ``_groups`` then."""
        try:
            self._fill()
            while self._flight or self._unordered:
                self._receive_call(timeout)
                if self._groups:
                    return
        except GetTimeoutError:
            raise
        except BaseException:
            self.close()
            raise
        error, self._input_error = self._input_error, None
        self._end()
        if error is not None:
            raise error
        raise StopIteration

    def _receive_call(self, timeout: float | None) -> None:
        objects, arrivals = self._objects, self._arrivals
        if arrivals is None:
            call = self._flight[0]
        else:
            deadline_s = None if timeout is None else time.monotonic() + timeout
            call = arrivals.first(objects, self._unordered, timeout)
            timeout = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        failure: _Failure | None = None
        took_s, groups = 0.0, []
        try:
            ((took_s, groups),) = objects.get((call.ref,), timeout)
        except GetTimeoutError:
            raise
        except Exception as error:
            note_item(error, call.start, call.start + len(call.items))
            failure = _Failure(error, len(call.items))
        if arrivals is None:
            self._flight.popleft()
        else:
            arrivals.drop_first()
            del self._unordered[call]
        if failure is not None:
            self._groups.append(failure)
        else:
            self._open_groups(call, took_s, groups)

    def _open_groups(self, call: _Call, took_s: float, groups: list[list[Any] | Failed]) -> None:
        size, done = self._chunksize, 0
        for group in groups:
            count = min(size, len(call.items) - done)
            done += count
            if isinstance(group, list):
                self._groups.append(group)
                if group:
                    self._nbytes = max(self._nbytes, _nbytes_of(group[0]))
            else:
                self._groups.append(_Failure(decode_error(group), count))
        self._cost_s = max(took_s / max(1, done), self._cost_s * _FORGET)
        # What was sent with a chunk that took long goes on elsewhere, each alone, and before all else.
        rest = range(done, len(call.items), size)
        again = [self._call(call.start + at, call.items[at : at + size]) for at in rest]
        if self._arrivals is None:
            self._flight.extendleft(reversed(again))
        else:
            for one in again:
                self._follow(one)

    def _fill(self) -> None:
        """Make calls while the window has room for a part of it."""
        window, size = self._window, self._chunksize
        if self._items is None:
            return
        if window is not None and window - self._open < max(1, window // _REFILLS):
            return
        if self._cost_s < 0:
            # The others may go together. So many chunks are few enough to go as they are.
            limit = (2 if self._left is None or self._left > 4 * self._workers * size else 4) * max(
                2, self._workers
            )
        else:
            limit = max(WINDOW, 4 * self._workers)
        while len(self._flight) + len(self._unordered) < limit:
            count = self._joined()
            if window is not None and self._open:
                count = min(count, (window - self._open) // size * size)
                if not count:
                    return
            items = self._some_items(count)
            if not items:
                return
            call = self._call(self._next_index, items)
            self._next_index += len(items)
            self._open += len(items)
            if self._arrivals is None:
                self._flight.append(call)
            else:
                self._follow(call)

    def _joined(self) -> int:
        """Return the number of items for the next call: short chunks of small values go together."""
        size, cost_s = self._chunksize, self._cost_s
        if cost_s < 0 or not self._may_join:
            return size
        count = int(_JOIN_S / max(cost_s, 1e-9))
        count = min(count, _JOIN_ITEMS, _JOIN_NBYTES // max(1, self._nbytes))
        if self._window is not None:
            count = min(count, self._window // (2 * self._workers))
        if self._left is not None:
            count = min(count, -(-self._left // (2 * self._workers)))
        return max(1, count // size) * size

    def _some_items(self, count: int) -> tuple[Any, ...]:
        """Return the next items: none at the end, or at an error of the iterable."""
        source = self._items
        items: list[Any] = []
        if source is None:
            return ()
        try:
            items.extend(itertools.islice(source, count))
        except Exception as error:
            self._input_error = error
            self._items = None
        if len(items) < count:
            self._items = None
        if items:
            self._nbytes = max(self._nbytes, _nbytes_of(items[0]))
        if self._left is not None:
            self._left -= len(items)
        if len(items) > self._chunksize and ObjectRef in map(type, items):
            # The error of one would be that of all.
            self._may_join = False
            self._items = itertools.chain(items[self._chunksize :], self._items or ())
            if self._left is not None:
                self._left += len(items) - self._chunksize
            del items[self._chunksize :]
        return tuple(items)

    def _call(self, start: int, items: tuple[Any, ...]) -> _Call:
        loose = ObjectRef in map(type, items)
        args = ((), *items) if loose else (items,)
        return _Call(self._chunk.remote(start, self._chunksize, *args), start, items)

    def _follow(self, call: _Call) -> None:
        assert self._arrivals is not None
        self._unordered[call] = None
        self._objects.watch((call.ref,), _Arrival(self._arrivals, call))

    def _end(self) -> None:
        self._closed, self._items = True, None
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class _Call:
    """A call for some items, which are kept because some may have to be sent again."""

    __slots__ = ("items", "ref", "start")

    def __init__(self, ref: ObjectRef[Any], start: int, items: tuple[Any, ...]) -> None:
        self.ref = ref
        self.start = start
        self.items = items


class _Failure:
    """The error of a chunk, and of how many items that is."""

    __slots__ = ("count", "error")

    def __init__(self, error: Exception, count: int) -> None:
        self.error = error
        self.count = count


class _Arrivals:
    """The calls that ended, in the order in which they did, for one thread that takes them."""

    def __init__(self) -> None:
        self._ended: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._waiter: ThreadWaiter | None = None

    def add(self, call: _Call) -> None:
        """Add a call that ended (the loop thread)."""
        with self._lock:
            self._ended.append(call)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.settled()

    def first(self, objects: Any, calls: Iterable[_Call], timeout: float | None) -> _Call:
        """Return the first call that nobody took, once there is one; GetTimeoutError."""
        if not self._ended:
            waiter = ThreadWaiter()
            waiter.missing = 1
            with self._lock:
                waits = not self._ended
                if waits:
                    self._waiter = waiter
            entries = [call.ref._entry for call in calls]
            if waits and not objects.waits.wait(waiter, timeout, "a stream", entries):
                with self._lock:
                    self._waiter = None
                    if not self._ended:
                        raise GetTimeoutError(f"no call of the stream ended within {timeout:g} s")
        return self._ended[0]

    def drop_first(self) -> None:
        """Take away the first call."""
        self._ended.popleft()


class _Arrival:
    """The waiter of one call of a stream."""

    __slots__ = ("_arrivals", "_call")

    def __init__(self, arrivals: _Arrivals, call: _Call) -> None:
        self._arrivals = arrivals
        self._call = call

    def settled(self, location: Location | None = None) -> None:
        """Hand the call over (the loop thread)."""
        self._arrivals.add(self._call)


def _cancel(refs: Iterable[ObjectRef[Any]]) -> None:
    for ref in refs:
        if ref._entry.location is None:
            cancel(ref)


def _checked(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"{field}={value!r} is no whole number", field=field)
    if value < 1:
        raise BadRequestError(f"{field}={value}: give a number from 1", field=field)
    return value


def _nbytes_of(value: Any) -> int:
    """Return about how large a value is, as far as that is cheap to know."""
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value, 64)
