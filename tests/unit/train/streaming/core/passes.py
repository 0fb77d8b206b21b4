"""Passes over made-up files without processes: readers that are slow, and die, as a seed has it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker_train.streaming.core.dispatch import Call, Dispatch, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stoker_train.streaming.core.segments import Segment


@dataclass
class Cluster:
    """Readers of one pass; ``death`` is the chance of each to die at a call. A record is (piece, number)."""

    counts: list[int]
    rng: random.Random
    readers: int = 3
    death: float = 0.0
    window: int = 40
    chunk: int = 5
    most_in_flight: int = 0
    deaths: int = 0
    loads: dict[int, int] = field(default_factory=dict)

    def runs(self, segments: Sequence[Segment], begin: int, first: int) -> Iterator[Run]:
        """Yield the runs of ``segments`` from record ``first`` of the one at ``begin`` on."""
        left = list(segments[begin:])
        if not left:
            return
        left[0] = replace(left[0], start=first)
        weights = [self.counts[one.piece] for one in left]
        dispatch = Dispatch(left, weights, window=self.window, chunk=self.chunk)
        asked: dict[int, list[Call]] = {}
        number = 0
        for _ in range(100_000):
            if dispatch.finished:
                assert dispatch.in_flight == 0
                return
            while len(asked) < self.readers:
                asked[number] = []
                dispatch.add_reader(number)
                number += 1
            for call in dispatch.calls():
                asked[call.reader].append(call)
            self._check(dispatch)
            front = dispatch.front
            busy = [reader for reader, calls in asked.items() if calls]
            if busy and self.rng.random() < 0.7:
                reader = self.rng.choice(busy)
                if self.rng.random() < self.death:
                    self.deaths += 1
                    at = dispatch.remove_reader(reader)
                    late = asked.pop(reader)
                    assert at == late[0]
                    assert not dispatch.received(at.number, [], at.record, False)
                    continue
                self._answer(dispatch, left, asked[reader].pop(0))
            elif (run := dispatch.take()) is not None:
                yield Run(run.segment + begin, run.start, run.stop, run.records, run.last)
            else:
                assert busy or dispatch.front > front, "nothing is under way, and nothing is there"
            self._check(dispatch)
        raise AssertionError("the pass does not end")

    def _answer(self, dispatch: Dispatch, segments: list[Segment], call: Call) -> None:
        segment = segments[call.segment]
        end = self.counts[segment.piece] if segment.stop is None else segment.stop
        # A reader may return less than it was asked for.
        limit = self.rng.randint(1, call.limit)
        records: list[tuple[int, int]] = []
        record = call.record
        while record < end and len(records) < limit:
            if record not in segment.omit:
                records.append((segment.piece, record))
            record += 1
        self.loads[call.reader] = self.loads.get(call.reader, 0) + len(records)
        dispatch.received(call.number, records, record, record >= end)

    def _check(self, dispatch: Dispatch) -> None:
        assert 0 <= dispatch.in_flight <= self.window
        self.most_in_flight = max(self.most_in_flight, dispatch.in_flight)


def records_of(segments: Sequence[Segment], counts: list[int]) -> list[tuple[int, int]]:
    """Return the records of segments in order: the model."""
    return [
        (one.piece, record)
        for one in segments
        for record in one.kept(one.start, counts[one.piece] if one.stop is None else one.stop)
    ]
