"""The core of a stream: in order, once, within the window, whatever readers do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_train.streaming.core.dispatch import Dispatch
from stoker_train.streaming.core.segments import Segment
from tests.unit.train.streaming.core.passes import Cluster, records_of

SEED = st.integers(0, 2**32)
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(
    COUNTS,
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(1, 12),
    st.sampled_from((0.0, 0.1, 0.4)),
    SEED,
)
def test_records_come_in_order_and_once(
    counts: list[int], readers: int, window: int, chunk: int, death: float, seed: int
) -> None:
    chunk = min(chunk, window)
    cluster = Cluster(
        counts, random.Random(seed), readers=readers, death=death, window=window, chunk=chunk
    )
    segments = [Segment(piece) for piece in range(len(counts))]
    got = [one for run in cluster.runs(segments, 0, 0) for one in run.records]
    assert got == records_of(segments, counts)
    assert cluster.most_in_flight <= window


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.data(), SEED)
def test_parts_and_omitted_records_are_left_out(
    counts: list[int], data: st.DataObject, seed: int
) -> None:
    segments = []
    for piece, count in enumerate(counts):
        start = data.draw(st.integers(0, count))
        stop = data.draw(st.one_of(st.none(), st.integers(start, count)))
        omit = data.draw(st.frozensets(st.integers(0, max(0, count - 1)), max_size=5))
        segments.append(Segment(piece, start, stop, omit))
    cluster = Cluster(counts, random.Random(seed), death=0.1)
    got = [one for run in cluster.runs(segments, 0, segments[0].start) for one in run.records]
    assert got == records_of(segments, counts)


@pytest.mark.parametrize("skew", ["even", "one large file", "powers"])
def test_readers_have_the_same_to_do(skew: str) -> None:
    """Pieces of a large file are pieces like any other, so a skew of files is none of readers."""
    sizes = {
        "even": [4000] * 10,
        "one large file": [36_000, *[400] * 10],
        "powers": [20_000 // 2**i for i in range(10)],
    }[skew]
    counts = [min(100, size - at) for size in sizes for at in range(0, size, 100)]
    cluster = Cluster(counts, random.Random(3), readers=4, window=4000, chunk=100)
    for _ in cluster.runs([Segment(piece) for piece in range(len(counts))], 0, 0):
        pass
    assert max(cluster.loads.values()) <= 1.2 * min(cluster.loads.values()), cluster.loads


def test_an_error_comes_after_what_is_before_it() -> None:
    dispatch = Dispatch([Segment(0), Segment(1)], [1, 1], window=10, chunk=2)
    dispatch.add_reader(0)
    first, second = dispatch.calls()
    dispatch.failed(second.number, KeyError("of the second"))
    assert dispatch.take() is None
    dispatch.received(first.number, ["a"], 1, True)
    run = dispatch.take()
    assert run is not None
    assert run.records == ["a"]
    with pytest.raises(KeyError, match="second"):
        dispatch.take()


def test_a_dead_reader_is_asked_again_from_where_it_was() -> None:
    dispatch = Dispatch([Segment(0), Segment(1)], [1, 1], window=20, chunk=2)
    dispatch.add_reader(0)
    first, second = dispatch.calls()
    dispatch.received(first.number, ["a", "b"], 2, False)
    (third,) = dispatch.calls()
    assert dispatch.remove_reader(0) == second
    assert dispatch.calls() == []
    dispatch.add_reader(1)
    again = dispatch.calls()
    assert [(one.reader, one.segment, one.record) for one in again] == [(1, 0, 2), (1, 1, 0)]
    assert not dispatch.received(third.number, ["c"], 3, True)


def test_a_segment_that_ends_without_a_record_is_not_passed_over_unseen() -> None:
    """The shell has to see each end: what lies between two segments that are read may be in memory."""
    dispatch = Dispatch([Segment(0), Segment(1)], [1, 1], window=10, chunk=2)
    dispatch.add_reader(0)
    first, second = dispatch.calls()
    dispatch.received(second.number, ["b"], 1, True)
    dispatch.received(first.number, [], 0, True)
    assert dispatch.take() is None
    assert dispatch.front == 1
    run = dispatch.take()
    assert run is not None
    assert (run.segment, run.records) == (1, ["b"])
    assert dispatch.finished
