"""The lane: a communicator's operations one after the other, in a thread of their own.

All members must start the same operations in the same order; so each is queued here, and its caller waits for
its :class:`Handle`, or goes on (overlap). Before an operation the members exchange headers: differences are
named instead of exchanged. A group that fails fails all handles at once, whatever the thread is stuck in.
The supervisor reads :attr:`Lane.current`; nothing here decides that a member is lost.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from stoker.exceptions import BadRequestError, StokerError
from stoker_train.collective import headers
from stoker_train.collective.channel import Channel, TransportError
from stoker_train.collective.errors import CollectiveError, Failure, MismatchError
from stoker_train.collective.headers import Call

if TYPE_CHECKING:
    import torch

    from stoker_train.collective.timeline import Timeline

R = TypeVar("R")
_MAX_QUEUED = 4096
_SLACK_S = 15.0
"""How long after its deadline an operation's end is waited for: the supervisor has said why by then."""


class Handle(Generic[R]):
    """The result of an operation that was started: :meth:`wait` for it."""

    def __init__(self, title: str, limit_s: float) -> None:
        self._title = title
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | Failure | None = None
        self._then: Callable[[Any], R] | None = None
        self._result: Any = None

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> R:
        """Return the result, or raise why there is none; CollectiveError if it takes longer.

        Without ``timeout_s`` the group's own limit holds, for each of the operations before it too.
        """
        limit_s = self._limit_s if timeout_s is None else timeout_s
        if not self._done.wait(limit_s):
            raise CollectiveError(f"{self._title} did not end within {limit_s:g} s")
        if isinstance(self._error, Failure):
            raise self._error.error()
        if self._error is not None:
            raise self._error
        return self._result if self._then is None else self._then(self._result)

    def then(self, function: Callable[[Any], R]) -> Handle[R]:
        """Have :meth:`wait` apply ``function``, in the thread that waits, to the result; returns itself."""
        self._then = function
        return self

    def finish(self, result: Any = None, error: BaseException | Failure | None = None) -> None:
        """End it, unless it has ended already."""
        with self._lock:
            if not self._done.is_set():
                self._result, self._error = result, error
                self._done.set()


@dataclass(frozen=True, slots=True)
class Inline:
    """Values that are few enough to travel with the header: then there is no other exchange.

    ``values`` is this member's tensor: on the CPU, contiguous, of at most ``headers.INLINE_NBYTES``. ``take``
    gets those of all members, stacked in order of rank, and returns the result.
    """

    values: Any
    take: Callable[[Any], Any]


@dataclass(slots=True)
class Operation:
    """One call on its way through a lane."""

    call: Call
    run: Callable[[Channel], Any]
    handle: Handle[Any]
    queued_ns: int
    row: str
    limit_s: float
    inline: Inline | None = None
    began_s: float = 0.0
    reported: int = 0
    """How often its stall was reported."""


class Listener(Protocol):
    """Whoever is told that a lane's connections failed."""

    def lost(self, lane: Lane, text: str) -> None:
        """Find out why, and fail the group."""


class Lane:
    """A queue of operations over one channel. ``ranks`` are its members, as the group counts them.

    ``connect`` makes the channel, in the lane's thread as its first operation begins.
    Lanes that talk to each other have one ``label``, unique in the group.
    """

    def __init__(
        self,
        label: str,
        ranks: tuple[int, ...],
        connect: Callable[[], Channel],
        listener: Listener,
        *,
        timeout_s: float,
        check: bool,
    ) -> None:
        self.label = label
        self.ranks = ranks
        self.check = check
        self.sequence = 0
        """How many operations have begun."""
        self.current: Operation | None = None
        self.broken = ""
        """What torch said when its connections failed."""
        self.timeline: Timeline | None = None
        self._connect: Callable[[], Channel] | None = connect
        self._channel: Channel | None = None
        self._listener = listener
        self._timeout_s = timeout_s
        self._failure: Failure | None = None
        self._refusal: Failure | None = None
        """Why no operation is taken any more: the group failed, or was left."""
        self._queue: queue.Queue[Operation | None] = queue.Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(
        self,
        call: Call,
        run: Callable[[Channel], R],
        inline: Inline | None = None,
        *,
        limit_s: float | None = None,
    ) -> Handle[R]:
        """Queue an operation: ``run`` gets the channel, in the lane's thread. Raises if the group failed.

        ``inline`` does the same without it, where headers are exchanged. ``limit_s`` is given to one that may
        take longer than others.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        wait_s = self._timeout_s * self._queue.qsize() + limit_s + _SLACK_S
        handle: Handle[R] = Handle(str(call), wait_s)
        row = call.name or call.operation
        operation = Operation(call, run, handle, time.time_ns(), row, limit_s, inline)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal.error()
            if self._thread is None:
                name = f"collective-{self.label or 'all'}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        try:
            self._queue.put(operation, timeout=self._timeout_s)
        except queue.Full:
            raise CollectiveError(
                f"{_MAX_QUEUED} collectives wait already\nwait for some of their handles first"
            ) from None
        self._end_if_refused(handle)  # meanwhile: what is queued behind the end would never run
        return handle

    def fail(self, failure: Failure) -> None:
        """End all operations by ``failure``, and refuse later ones."""
        with self._lock:
            self._failure = self._refusal = failure
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()
            del channel
        if (current := self.current) is not None:
            current.handle.finish(error=failure)
        self._empty(failure)
        with contextlib.suppress(queue.Full):  # then there is something that wakes the thread
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Refuse later operations; the thread ends after what is queued, and the channel with it."""
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = Failure(
                code="collective_failed", text="this process has left the group"
            )
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_SLACK_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a lane that was closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _end_if_refused(self, handle: Handle[Any]) -> None:
        if self._refusal is not None:
            handle.finish(error=self._refusal)

    def _empty(self, failure: Failure) -> None:
        while True:
            try:
                operation = self._queue.get_nowait()
            except queue.Empty:
                return
            if operation is not None:
                operation.handle.finish(error=failure)

    def _serve(self) -> None:
        while not self.broken:
            operation = self._queue.get()
            if operation is None:
                self._channel = None
                return
            self._run(operation)
        # What is queued, and current, the supervisor ends once it knows why.

    def _connected(self) -> Channel | None:
        """Return the channel; None if the lane was closed meanwhile."""
        if self._connect is not None:
            connect, self._connect = self._connect, None
            channel = connect()
            with self._lock:
                if self._failure is None:
                    self._channel = channel
        return self._channel

    def _run(self, operation: Operation) -> None:
        operation.began_s = time.monotonic()
        self.sequence += 1
        self.current = operation
        handle = operation.handle
        try:
            handle.finish(self._execute(operation))
        except TransportError as error:
            self.broken = str(error)
            if self._failure is not None:
                handle.finish(error=self._failure)
            else:
                self._listener.lost(self, self.broken)
            return
        except Exception as error:
            # The frames of its traceback would keep the channel, and so its connections, alive.
            traceback.clear_frames(error.__traceback__)
            handle.finish(error=error)
            if not isinstance(error, StokerError):
                # The others may be inside the exchange: nothing that is sent from here on would fit.
                self.broken = f"{type(error).__name__}: {error}"
                self._listener.lost(self, self.broken)
                return
        self.current = None

    def _execute(self, operation: Operation) -> Any:
        """Do all of an operation, and return its result."""
        began_ns, late, table = time.time_ns(), None, None
        channel = self._connected()
        if channel is None:
            raise TransportError("the group has failed")
        if self.check:
            table, late = self._negotiate(operation, channel)
        agreed_ns = time.time_ns()
        if operation.inline is None or table is None:
            result = operation.run(channel)
        else:
            result = operation.inline.take(_inlined(operation.inline.values, table))
        if self.timeline is not None:
            self._draw(operation, began_ns, agreed_ns, late)
        return result

    def _negotiate(
        self, operation: Operation, channel: Channel
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Exchange headers; MismatchError if they differ.

        Returns what the members sent, and for a timeline who came last, and by how much.
        """
        import torch

        own = torch.zeros(headers.SLOT_NBYTES, dtype=torch.uint8)
        if operation.inline is not None:
            values = operation.inline.values.view(-1).view(torch.uint8)
            own[headers.NBYTES : headers.NBYTES + values.numel()] = values
        header = headers.encode(operation.call, self.sequence, time.time_ns())
        own[: headers.NBYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        slots = channel.all_gather(own)
        table = slots[:, : headers.NBYTES].numpy().tobytes()
        if not headers.agree(table):
            text, apart = headers.differences(table, self.ranks)
            raise MismatchError(
                f"the members did not call the same collective\n{text}",
                extra={"ranks": list(apart)},
            )
        if self.timeline is None:
            return slots, {}
        came = [headers.sent_ns(one) for one in headers.split(table)]
        last = max(came)
        late = {"last_rank": self.ranks[came.index(last)], "waited_ms": (last - min(came)) / 1e6}
        return slots, late

    def _draw(
        self, operation: Operation, began_ns: int, agreed_ns: int, late: dict[str, Any] | None
    ) -> None:
        timeline = self.timeline
        if timeline is not None:
            timeline.record(operation.row, "QUEUE", operation.queued_ns, began_ns)
            if late is not None:
                timeline.record(operation.row, "NEGOTIATE", began_ns, agreed_ns, late)
            call = {"call": str(operation.call), "number": self.sequence}
            timeline.record(operation.row, "EXCHANGE", agreed_ns, time.time_ns(), call)


def _inlined(values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what all members sent with their headers, each like ``values``."""
    sent = slots[:, headers.NBYTES : headers.NBYTES + values.nbytes]
    return sent.view(values.dtype).view(slots.shape[0], *values.shape)


class Peers:
    """The lanes between this member and single others, for send and recv: made when first used."""

    def __init__(self, make: Callable[[str, tuple[int, ...]], Lane]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], Lane] = {}

    def lane(self, source: int, to: int) -> Lane:
        """Return the lane of what ``source`` sends ``to``; BadRequestError if that is one member."""
        if source == to:
            raise BadRequestError(
                f"rank {to} cannot send to itself\ngive the rank of another member", field="rank"
            )
        with self._lock:
            lane = self._lanes.get((source, to))
            if lane is None:
                lane = self._lanes[source, to] = self._make(f"{source}->{to}", (source, to))
            return lane
