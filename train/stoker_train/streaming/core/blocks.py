"""Shuffle a stream of records in blocks, so that a place in it is two numbers.

A block is as many records as the buffer holds, one after the other as they are read, and is delivered in an
order that its seed and its number decide. Unlike a reservoir, whose state is its records, a block is read
again from where it begins: a cursor is its beginning, and how much of it was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.core.sampler import epoch_order
from stoker_train.streaming.core.segments import Segment

if TYPE_CHECKING:
    from stoker_train.streaming.core.dispatch import Run

__all__ = ("Group", "Place", "delivered", "groups", "shuffled")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a shard's list: ``record`` of ``segment``, where ``block`` begins.

    ``skip`` records of that block have been delivered; ``parts`` are (segment, first, past the last record)
    of which it consists, as far as that matters.
    """

    segment: int = 0
    record: int | None = None
    """None: the first of the segment."""
    block: int = 0
    skip: int = 0
    parts: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Records to deliver from number ``first`` on, in order, with the place after each."""

    records: Sequence[Any]
    first: int
    begin: Place
    end: Place
    segment: Segment | None = None
    """What it is a run of; None for a block."""

    def after(self, count: int) -> Place:
        """Return the place after ``count`` of its records, those before ``first`` included."""
        if count == len(self.records):
            return self.end
        begin = self.begin
        if self.segment is None:
            return Place(begin.segment, begin.record, begin.block, count, begin.parts)
        assert begin.record is not None
        return Place(begin.segment, self.segment.advance(begin.record, count))


def groups(runs: Iterable[Run], segments: Sequence[Segment]) -> Iterator[Group]:
    """Yield runs as they come."""
    for run in runs:
        end = Place(run.segment + 1) if run.last else Place(run.segment, run.stop)
        begin = Place(run.segment, run.start)
        yield Group(run.records, 0, begin, end, segments[run.segment])


def shuffled(
    runs: Iterable[Run], segments: Sequence[Segment], size: int, seed: int, place: Place
) -> Iterator[Group]:
    """Yield blocks of ``size`` records in their order, from ``place`` on, where the runs begin."""
    block, skip = place.block, place.skip
    records: list[Any] = []
    parts: list[tuple[int, int, int]] = []
    for run in runs:
        start, at, count = run.start, 0, len(run.records)
        while at < count:
            take = min(size - len(records), count - at)
            stop = segments[run.segment].advance(start, take) if at + take < count else run.stop
            records += run.records[at : at + take]
            if parts and parts[-1][0] == run.segment:  # they follow each other
                start = parts.pop()[1]
            parts.append((run.segment, start, stop))
            start, at = stop, at + take
            if len(records) == size:
                after = Place(run.segment + 1, block=block + 1)
                if at < count or not run.last:
                    after = Place(run.segment, stop, block + 1)
                yield _block(records, parts, seed, block, skip, after)
                records, parts, block, skip = [], [], block + 1, 0
    if records:
        yield _block(records, parts, seed, block, skip, Place(len(segments), block=block + 1))


def _block(
    records: list[Any],
    parts: list[tuple[int, int, int]],
    seed: int,
    block: int,
    skip: int,
    end: Place,
) -> Group:
    order = epoch_order(len(records), seed, block, True).tolist()
    begin = Place(parts[0][0], parts[0][1], block, skip, tuple(parts))
    return Group([records[at] for at in order], skip, begin, end)


def delivered(place: Place, segments: Sequence[Segment], seed: int) -> Iterator[tuple[int, int]]:
    """Yield (segment, record) of what a place inside a block has delivered of that block."""
    if not place.skip:
        return
    records = [
        (segment, record)
        for segment, start, stop in place.parts
        for record in segments[segment].kept(start, stop)
    ]
    order = epoch_order(len(records), seed, place.block, True).tolist()
    for at in order[: place.skip]:
        yield records[at]
