"""Decide which reader reads what next, and put what they read in order: the work-stealing core of a stream.

Readers take segments from one list, in its order: whoever is free takes the next, so no reader is bound to a
large file. Each is asked for one chunk of records of a segment at a time, and has two segments, so that it
is never idle. What comes early waits for its turn. The window bounds the records that are asked for or
wait; one chunk of it is always left for the segment whose turn it is, so that those behind it can not keep it
waiting for ever.

Pure: the shell (``streaming/reading.py``) makes the calls, and says what came back and who died. A call
names the record that it begins with, so what a dead reader was asked for is asked again, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_train.streaming.core.segments import Segment

__all__ = ("Call", "Dispatch", "Run")

_SEGMENTS_PER_READER = 2


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a reader: ``limit`` records of a segment (its place in the list) from ``record`` on."""

    number: int
    reader: int
    segment: int
    record: int
    limit: int


@dataclass(frozen=True, slots=True)
class Run:
    """Records of a segment in order: those from number ``start`` to ``stop``; ``last`` ends the segment."""

    segment: int
    start: int
    stop: int
    records: Sequence[Any]
    last: bool


@dataclass(slots=True)
class _Open:
    """A segment that was given to a reader and not yet delivered."""

    record: int
    """The first record that was not received."""
    reader: int | None = None
    call: Call | None = None
    done: bool = False
    used: int = 0
    """Its records in flight: asked for, or received and not taken."""
    runs: deque[Run] = field(default_factory=deque)
    error: Exception | None = None
    """What the parser raised, after the runs."""


class Dispatch:
    """The state of one pass over ``segments``; see the module.

    ``nbytes`` is about how much there is to read in each segment. ``chunk`` <= ``window``.
    """

    def __init__(
        self, segments: Sequence[Segment], nbytes: Sequence[int], *, window: int, chunk: int
    ) -> None:
        self._segments, self._nbytes = segments, nbytes
        self._window, self._chunk = window, chunk
        self._front = 0
        self._next = 0
        self._open: dict[int, _Open] = {}
        self._unread: set[int] = set()
        """The open segments that have not been read to their end."""
        self._readers: dict[int, set[int]] = {}
        """The unfinished segments of each."""
        self._loads: dict[int, int] = {}
        self._calls: dict[int, Call] = {}
        self._number = 0
        self.in_flight = 0
        """The records asked for, or received and not taken."""

    @property
    def finished(self) -> bool:
        """Whether all was delivered."""
        return self._front == len(self._segments)

    @property
    def unread(self) -> int:
        """The segments that have not been read to their end."""
        return len(self._segments) - self._next + len(self._unread)

    @property
    def front(self) -> int:
        """The segment whose turn it is."""
        return self._front

    def position(self, segment: int) -> int:
        """Return the record that a segment is read to."""
        one = self._open.get(segment)
        return self._segments[segment].start if one is None else one.record

    def add_reader(self, reader: int) -> None:
        """Let a reader take segments."""
        self._readers[reader] = set()
        # As much as the least of the others: it is to catch up with nothing that they have done before.
        self._loads[reader] = min(self._loads.values(), default=0)

    def remove_reader(self, reader: int) -> Call | None:
        """Give a dead reader's segments back; return the call that it was at, if there is one."""
        self._loads.pop(reader, None)
        calls = []
        for segment in self._readers.pop(reader, ()):
            one = self._open[segment]
            one.reader = None
            if one.call is not None:
                calls.append(one.call)
                del self._calls[one.call.number]
                self._use(one, -one.call.limit)
                one.call = None
        return min(calls, key=lambda call: call.number, default=None)

    def calls(self) -> list[Call]:
        """Return the calls to make now."""
        made: list[Call] = []
        if not self._readers:
            return made
        for segment in sorted(self._unread):
            one = self._open[segment]
            if one.call is None and self._has_room(segment):
                if one.reader is None and not self._assign(segment, one):
                    continue
                made.append(self._call(segment, one))
        while self._next < len(self._segments) and self._has_room(self._next):
            segment, one = self._next, _Open(self._segments[self._next].start)
            if not self._assign(segment, one):
                break
            self._next += 1
            self._open[segment] = one
            self._unread.add(segment)
            made.append(self._call(segment, one))
        return made

    def received(self, number: int, records: Sequence[Any], stop: int, done: bool) -> bool:
        """Take what a call returned: the records up to number ``stop``, and whether the segment ends there.

        False for a call of a reader that was removed: it has been asked of another.
        """
        call = self._calls.pop(number, None)
        if call is None:
            return False
        one = self._open[call.segment]
        one.call = None
        self._use(one, len(records) - call.limit)
        one.runs.append(Run(call.segment, one.record, stop, records, done))
        one.record, one.done = stop, done
        if done:
            self._end_reading(call)
        return True

    def failed(self, number: int, error: Exception) -> None:
        """Take the error of a call: it is raised when all before it has been delivered."""
        call = self._calls.pop(number, None)
        if call is not None:
            one = self._open[call.segment]
            one.call, one.error = None, error
            self._use(one, -call.limit)
            self._end_reading(call)

    def take(self) -> Run | None:
        """Return the records whose turn it is, None if they are not there; raise an error at its turn.

        None as well where the segment has ended without a record more: ``front`` is the next one then.
        """
        one = self._open.get(self._front)
        while one is not None and one.runs:
            run = one.runs.popleft()
            self._use(one, -len(run.records))
            if run.last:
                self._advance()
            if run.records:
                return run
            if run.last:
                return None
        if one is not None and one.error is not None:
            raise one.error
        return None

    def _end_reading(self, call: Call) -> None:
        self._unread.discard(call.segment)
        self._readers[call.reader].discard(call.segment)

    def _advance(self) -> None:
        del self._open[self._front]
        self._front += 1

    def _use(self, one: _Open, records: int) -> None:
        one.used += records
        self.in_flight += records

    def _has_room(self, segment: int) -> bool:
        """Whether a segment may be asked for a chunk more."""
        if segment == self._front:
            return self.in_flight + self._chunk <= self._window
        front = self._open.get(self._front)
        others = self.in_flight - (0 if front is None else front.used)
        return others + self._chunk <= self._window - self._chunk and (
            self.in_flight + self._chunk <= self._window
        )

    def _assign(self, segment: int, one: _Open) -> bool:
        """Give a segment to the reader with the least to do; the one whose turn it is to a busy one too."""
        reader = min(
            self._readers, key=lambda each: (len(self._readers[each]), self._loads[each], each)
        )
        if len(self._readers[reader]) >= _SEGMENTS_PER_READER and segment != self._front:
            return False
        one.reader = reader
        self._readers[reader].add(segment)
        self._loads[reader] += self._nbytes[segment]
        return True

    def _call(self, segment: int, one: _Open) -> Call:
        assert one.reader is not None
        call = Call(self._number, one.reader, segment, one.record, self._chunk)
        self._number += 1
        self._calls[call.number] = one.call = call
        self._use(one, call.limit)
        return call
