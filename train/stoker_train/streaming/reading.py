"""Read a list of segments with actors, in order: the shell around the core of a stream.

It starts readers, replaces those that die, makes the calls that :class:`Dispatch` decides, and tells it what
came back. The stream makes one for each pass, and closes it: nothing of it is left then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stoker.api.calls import get, kill, wait
from stoker.api.remote import remote
from stoker.exceptions import (
    ActorDiedError,
    ActorError,
    GetTimeoutError,
    InternalError,
    NodeDiedError,
    ObjectLostError,
    StokerError,
    TaskError,
    UnavailableError,
    WorkerDiedError,
)
from stoker_train.streaming.core.dispatch import Call, Dispatch, Run
from stoker_train.streaming.reader import Chunk, Reader

if TYPE_CHECKING:
    from stoker_train.streaming.core.segments import Piece, Segment

__all__ = ("ChunkCache", "Reading", "ReadingOptions", "StreamStats")

_LOST = (ActorError, WorkerDiedError, NodeDiedError, ObjectLostError)
_POLL_S = 0.5
"""A wait looks so often whether the stream was closed by another thread."""
_WHY_S = 1.0
_log = logging.getLogger("stoker.data")


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """Numbers that :func:`stoker.data.stream` was given; ``actor`` are options of the readers."""

    readers: int
    window: int
    chunk: int
    timeout_s: float
    max_failures: int
    actor: dict[str, Any]


@dataclass(slots=True)
class StreamStats:
    """Counts of a stream, over all its epochs so far.

    ``opened`` counts openings of files or their parts, ``cached`` the chunks that came from memory,
    ``replaced`` the readers that died, ``max_in_flight`` the most records at once that were asked for or
    waited for their turn. ``nbytes`` are bytes of files, ``busy_s`` seconds of work, by reader.
    """

    records: int = 0
    chunks: int = 0
    cached: int = 0
    opened: int = 0
    replaced: int = 0
    max_in_flight: int = 0
    nbytes: dict[int, int] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)


class ChunkCache:
    """The chunks of segments that were read whole, as refs: they stay in the cluster's shared memory."""

    def __init__(self) -> None:
        self._whole: dict[Segment, list[tuple[int, int, Any]]] = {}
        self._partly: dict[Segment, list[tuple[int, int, Any]]] = {}

    def add(self, segment: Segment, start: int, stop: int, ref: Any, done: bool) -> None:
        """Note a chunk; chunks of a segment come in order."""
        if start == segment.start:
            self._partly[segment] = []
        chunks = self._partly.get(segment)
        if chunks is None:
            return  # its beginning was read by an earlier stream
        chunks.append((start, stop, ref))
        if done:
            self._whole[segment] = self._partly.pop(segment)

    def chunks(self, segment: Segment) -> list[tuple[int, int, Any]] | None:
        """Return (start, stop, ref of the chunk) of a whole segment, or None."""
        return self._whole.get(segment)

    def forget(self, segments: Iterable[Segment]) -> None:
        """Drop segments."""
        for segment in segments:
            self._whole.pop(segment, None)

    def drop_parts(self) -> None:
        """Forget segments that were not read to their end."""
        self._partly.clear()


@dataclass(slots=True)
class _Living:
    handle: Any
    started: bool = False


class Reading:
    """One pass over ``segments``, from record ``first`` of the one at ``begin`` on; iterates over their runs.

    ``parser`` is a ref. It may be interrupted from any thread; all else is for one.
    """

    def __init__(
        self,
        parser: Any,
        pieces: Sequence[Piece],
        segments: Sequence[Segment],
        begin: int,
        first: int,
        options: ReadingOptions,
        stats: StreamStats,
        cache: ChunkCache | None,
    ) -> None:
        self._parser, self._pieces = parser, pieces
        self._options, self._stats, self._cache = options, stats, cache
        self._segments, self._begin = segments, begin
        part = replace(segments[begin], start=first)
        whole = part == segments[begin]
        self._rest = None if whole else part
        """What is left of a segment; it is not kept, as no other pass has it."""
        # Segments that are in memory are no work of the readers.
        self._read_at = [
            at
            for at in range(begin, len(segments))
            if cache is None or (at == begin and not whole) or cache.chunks(segments[at]) is None
        ]
        self._to_read = to_read = [part if at == begin else segments[at] for at in self._read_at]
        self._dispatch = Dispatch(
            to_read,
            [pieces[segment.piece].nbytes for segment in to_read],
            window=options.window,
            chunk=options.chunk,
        )
        self._readers: dict[int, _Living] = {}
        self._refs: dict[Any, Call | int] = {}
        """Calls, also those of readers that were lost, and the numbers of readers that start."""
        self._number = 0
        self._failures = 0
        """Of readers, since the last chunk."""
        self._unstarted = 0
        """The readers that could not be started, since one could."""
        self._fatal: dict[tuple[int, int], int] = {}
        """How many readers died at a record of a segment."""
        self._again: Reading | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Run]:
        try:
            read = 0
            for at in range(self._begin, len(self._segments)):
                if read < len(self._read_at) and self._read_at[read] == at:
                    yield from self._runs(read)
                    read += 1
                    continue
                lost = yield from self._cached(at)
                if lost is not None:
                    yield from self._read_again(at, lost)
                    return
        finally:
            self.close()

    def interrupt(self) -> None:
        """Have a wait in another thread end soon; it raises GetTimeoutError."""
        self._closed = True
        if self._again is not None:
            self._again.interrupt()

    def close(self) -> None:
        """End all readers."""
        self._closed = True
        self._refs.clear()
        while self._readers:
            _, living = self._readers.popitem()
            # A RuntimeError on the runtime's own thread, where garbage may be collected: the last
            # handle is dropped here, which ends the actor as well.
            with contextlib.suppress(StokerError, RuntimeError):
                kill(living.handle)
        if self._cache is not None:
            self._cache.drop_parts()
        if self._again is not None:
            self._again.close()

    # -- in order ----------------------------------------------------------------------------------

    def _runs(self, read: int) -> Iterator[Run]:
        """Yield the runs of one segment that is read."""
        dispatch, at = self._dispatch, self._read_at[read]
        while dispatch.front == read:
            run = dispatch.take()
            if run is not None and run.segment != read:
                raise AssertionError(f"a run of segment {run.segment} in place of {read}")
            if run is None:
                if dispatch.front == read:
                    self._wait()
                continue
            self._settle_ready(0)
            self._stats.records += len(run.records)
            yield Run(at, run.start, run.stop, run.records, run.last)

    def _cached(self, at: int) -> Generator[Run, None, int | None]:
        """Yield a segment from memory; return the first record that has been lost, or None."""
        assert self._cache is not None
        chunks = self._cache.chunks(self._segments[at]) or []
        for number, (start, stop, ref) in enumerate(chunks):
            try:
                chunk: Chunk = get(ref, timeout=self._options.timeout_s)
            except (ObjectLostError, NodeDiedError):
                return start
            self._stats.cached += 1
            if chunk.records:
                self._stats.records += len(chunk.records)
                yield Run(at, start, stop, chunk.records, number == len(chunks) - 1)
        return None

    def _read_again(self, at: int, first: int) -> Iterator[Run]:
        """Yield all that is left from files: what was in memory lay on a node that is lost, most likely."""
        assert self._cache is not None
        if not self._closed:
            self.close()
            self._cache.forget(self._segments[at:])
            self._again = Reading(
                self._parser,
                self._pieces,
                self._segments,
                at,
                first,
                self._options,
                self._stats,
                self._cache,
            )
            yield from self._again

    # -- calls -------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until a call has returned."""
        deadline_s = time.monotonic() + self._options.timeout_s
        while not self._settle_ready(min(_POLL_S, deadline_s - time.monotonic())):
            if self._closed:
                raise GetTimeoutError("the stream was closed while it waited for records")
            if time.monotonic() >= deadline_s:
                self._check_timeout()

    def _settle_ready(self, timeout_s: float) -> bool:
        """Make the calls that can be made, and take what is there; whether anything was."""
        self._start_readers()
        self._make_calls()
        self._start_readers()  # those that were lost at a call
        refs = list(self._refs)
        if not refs:
            if timeout_s > 0 and not self._closed:
                raise InternalError("a stream waits for records that it has asked nobody for")
            return False
        ready, _ = wait(refs, num_returns=len(refs), timeout=0)
        if not ready and timeout_s > 0:
            ready, _ = wait(refs, timeout=timeout_s)
        for ref in ready:
            asked = self._refs.pop(ref, None)
            if isinstance(asked, int):
                self._started(asked, ref)
            elif asked is not None and asked.reader in self._readers:
                self._received(asked, ref)
        if ready:
            self._make_calls()
        return bool(ready)

    def _make_calls(self) -> None:
        for call in self._dispatch.calls():
            living = self._readers.get(call.reader)
            if living is None:
                continue  # lost at a call before this one, which was given back with it
            segment = self._to_read[call.segment]
            try:
                ref = living.handle.read.remote(
                    self._pieces[segment.piece], segment, call.record, call.limit
                )
            except _LOST as error:
                self._lost(call.reader, error)
                continue
            self._refs[ref] = call
        self._stats.max_in_flight = max(self._stats.max_in_flight, self._dispatch.in_flight)

    def _received(self, call: Call, ref: Any) -> None:
        segment = self._to_read[call.segment]
        piece = self._pieces[segment.piece]
        try:
            chunk: Chunk = get(ref, timeout=self._options.timeout_s)
        except TaskError as error:
            self._dispatch.failed(call.number, _located(error, piece, call.record))
            return
        except _LOST as error:
            self._lost(call.reader, error)
            return
        except StokerError as error:  # of records that cannot be sent
            self._dispatch.failed(call.number, _located(error, piece, call.record))
            return
        if not self._dispatch.received(call.number, chunk.records, chunk.stop, chunk.done):
            return
        self._failures = 0
        stats = self._stats
        stats.chunks += 1
        stats.opened += chunk.opened
        stats.busy_s[call.reader] = stats.busy_s.get(call.reader, 0.0) + chunk.took_s
        stats.nbytes[call.reader] = stats.nbytes.get(call.reader, 0)
        if chunk.done:
            stats.nbytes[call.reader] += piece.nbytes
        if self._cache is not None and segment is not self._rest:
            self._cache.add(segment, call.record, chunk.stop, ref, chunk.done)

    # -- readers -----------------------------------------------------------------------------------

    def _start_readers(self) -> None:
        """Start readers until there are as many as shall be, or as can have something to do."""
        if self._closed:
            return
        while len(self._readers) < min(self._options.readers, self._dispatch.unread):
            number, self._number = self._number, self._number + 1
            actor = remote(Reader).options(**self._options.actor)
            handle = actor.remote(self._parser)
            self._readers[number] = _Living(handle)
            self._refs[handle.start.remote()] = number

    def _started(self, number: int, ref: Any) -> None:
        try:
            get(ref, timeout=self._options.timeout_s)
        except StokerError as error:
            self._lost(number, error)
            self._unstarted += 1
            if self._unstarted >= self._options.max_failures:
                raise UnavailableError(
                    f"{self._unstarted} readers of a stream could not be started, one after the other\n"
                    f"the last of them: {error}"
                ) from error
            return
        self._unstarted = 0
        self._readers[number].started = True
        self._dispatch.add_reader(number)

    def _lost(self, number: int, error: StokerError) -> None:
        """Take a reader out, and say so; raise where readers die without reading anything."""
        living = self._readers.pop(number, None)
        if living is None:
            return
        with contextlib.suppress(StokerError):
            kill(living.handle)  # it may live, behind a connection that broke
        # Its other calls stay in _refs, and nobody gets them: an error that is let go unseen is reported.
        self._stats.replaced += 1
        self._failures += 1
        why = str(error).partition("\n")[0]
        _log.info("reader %d of a stream is replaced: %s", number, why)
        call = self._dispatch.remove_reader(number) if living.started else None
        limit = self._options.max_failures
        if call is not None:
            at = (call.segment, call.record)
            self._fatal[at] = self._fatal.get(at, 0) + 1
            if self._fatal[at] >= limit:
                piece = self._pieces[self._to_read[call.segment].piece]
                raise ActorDiedError(
                    f"{limit} readers of a stream have died at the same record\n"
                    f"the last of them at {_where(piece, call.record)}, or within {call.limit} records "
                    f"after it: {why}"
                ) from error
        if self._failures >= limit * self._options.readers:
            raise UnavailableError(
                f"{self._failures} readers of a stream have died without reading anything\n"
                f"the last of them: {why}"
            ) from error

    def _check_timeout(self) -> None:
        """Raise the error of a wait that was too long, unless what it waits for comes now."""
        dispatch = self._dispatch
        segment = self._to_read[dispatch.front]
        where = _where(self._pieces[segment.piece], dispatch.position(dispatch.front))
        started = sum(one.started for one in self._readers.values())
        waited: Any = next(
            (
                ref
                for ref, asked in self._refs.items()
                if (
                    started == 0
                    if isinstance(asked, int)
                    else asked.segment == dispatch.front and asked.reader in self._readers
                )
            ),
            None,
        )
        why = "no reader has been asked for it"
        if waited is not None:
            try:
                # The cluster is asked for the reason of a wait that is not shorter.
                get(waited, timeout=_WHY_S)
            except GetTimeoutError as error:
                why = str(error).partition("\n")[2]
            except StokerError:
                return
            else:
                return
        raise GetTimeoutError(
            f"a stream waited {self._options.timeout_s:g} s for records\n"
            f"the next is {where}; {started} of {len(self._readers)} readers have started\n{why}"
        )


def _where(piece: Piece, record: int) -> str:
    if piece.start == 0:
        return f"record {record} of {piece.path}"
    return f"record {record} of the part of {piece.path} that begins at {piece.start}"


def _located(error: StokerError, piece: Piece, record: int) -> StokerError:
    """Return the error of a parser with the place of the record."""
    error.add_note(f"at {_where(piece, record)}")
    for name, value in (("path", piece.path), ("record", record)):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)
    return error
