"""Read chunks of records, as an actor: what runs on the cluster's nodes for a stream.

It keeps the files open in which it was asked for records lately, and nothing that matters: a call names the
record that it begins with, so another reader can answer it as well. It knows neither order nor window.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker_train.streaming.parsers import fewer

if TYPE_CHECKING:
    from stoker_train.streaming.core.segments import Piece, Segment
    from stoker_train.streaming.parsers import Parser

__all__ = ("Chunk", "Reader")

_OPEN = 4
"""The parts of files that it keeps open."""
_MAX_NBYTES = 8 << 20
"""Of the records of a chunk, as far as their size is cheap to know."""
_END = object()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of a segment, up to number ``stop``; ``done``: it has no more.

    ``opened`` is 1 if a file had to be opened; ``took_s`` is how long it took.
    """

    records: list[Any]
    stop: int
    done: bool
    opened: int
    took_s: float


@dataclass(slots=True)
class _Part:
    """A piece that is being read."""

    records: Iterator[Any]
    next: int
    """The number of the record that comes next."""
    ahead: list[Any] = field(default_factory=list)
    """It, if it was read already."""
    error: Exception | None = None
    """In place of it."""


class Reader:
    """Reads for one stream."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._parts: dict[int, _Part] = {}

    def start(self) -> None:
        """Return once it can read."""

    def read(self, piece: Piece, segment: Segment, record: int, limit: int) -> Chunk:
        """Return up to ``limit`` records from number ``record`` on, those in ``omit`` left out.

        What the parser raises comes after the records before it, at the next call.
        """
        began_s = time.perf_counter()
        part, opened = self._parts.pop(piece.number, None), 0
        if part is None or part.next != record:
            records = self._parser.read(piece.path, piece.start, piece.stop, record)
            part, opened = _Part(iter(records), record), 1
        chunk: list[Any] = []
        done = _fill(part, piece.path, segment, chunk, limit)
        if part.error is not None and not chunk:
            raise part.error
        if not done:
            self._parts[piece.number] = part
            if len(self._parts) > _OPEN:
                del self._parts[next(iter(self._parts))]
        return Chunk(chunk, part.next, done, opened, time.perf_counter() - began_s)


def _fill(part: _Part, path: str, segment: Segment, chunk: list[Any], limit: int) -> bool:
    """Read into ``chunk``; return whether the segment ends there."""
    while len(chunk) < limit:
        if segment.stop is not None and part.next >= segment.stop:
            return True
        if not _look_ahead(part):
            return _ends(part, path, segment)
        if part.next in segment.omit:
            part.ahead.clear()
            part.next += 1
            continue
        limit = min(limit, max(1, _MAX_NBYTES // _nbytes_of(part.ahead[0])))
        count = max(1, limit - len(chunk))
        if segment.omit:
            count = 1
        elif segment.stop is not None:
            count = min(count, segment.stop - part.next)
        before = len(chunk)
        chunk += part.ahead
        part.ahead.clear()
        try:
            # extend keeps what came before an error
            chunk.extend(itertools.islice(part.records, count - 1))
        except Exception as error:
            part.error = error
        part.next += len(chunk) - before
    if segment.stop is not None and part.next >= segment.stop:
        return True
    return not _look_ahead(part) and _ends(part, path, segment)


def _ends(part: _Part, path: str, segment: Segment) -> bool:
    """Return whether a segment ends where there is no record more; it was counted if it has a stop."""
    if part.error is None and segment.stop is not None:
        part.error = fewer(path, part.next, segment.stop)
    return part.error is None


def _look_ahead(part: _Part) -> bool:
    """Read the next record, if that has not been done; return whether there is one."""
    if part.error is not None:
        return False
    if not part.ahead:
        try:
            one = next(part.records, _END)
        except Exception as error:
            part.error = error
            return False
        if one is _END:
            return False
        part.ahead.append(one)
    return True


def _nbytes_of(record: Any, depth: int = 2) -> int:
    """Return about how large a record is: that of arrays, bytes and texts in dicts and lists counts."""
    nbytes = getattr(record, "nbytes", None)
    if isinstance(nbytes, int):
        return max(1, nbytes)
    if isinstance(record, bytes | str):
        return max(1, len(record))
    if depth and isinstance(record, dict | list | tuple):
        parts = record.values() if isinstance(record, dict) else record
        return max(1, sum(_nbytes_of(part, depth - 1) for part in parts))
    return 1
