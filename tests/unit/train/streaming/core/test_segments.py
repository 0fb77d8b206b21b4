"""Epochs as lists of segments: each record in one shard, equal parts where asked, the same everywhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.exceptions import BadRequestError
from stoker_train.streaming.core.segments import (
    Deal,
    Piece,
    Segment,
    fingerprint,
    segments_of_epoch,
)
from tests.unit.train.streaming.core.passes import records_of

COUNTS = st.lists(st.integers(0, 12), min_size=0, max_size=15)
ALL = pytest.mark.parametrize("sticky", [False, True])


def parts_of(
    counts: list[int], world: int, equal: str | None, *, shuffle: bool, sticky: bool, epoch: int = 0
) -> list[list[tuple[int, int]]]:
    """Return the records of each shard."""
    return [
        records_of(
            segments_of_epoch(
                len(counts),
                Deal(rank, world, equal),
                seed=5,
                epoch=epoch,
                shuffle=shuffle,
                counts=counts,
                sticky=sticky,
            ),
            counts,
        )
        for rank in range(world)
    ]


@ALL
@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 5), st.booleans(), st.sampled_from((None, "drop", "pad")))
def test_shards_are_disjoint_and_whole(
    sticky: bool, counts: list[int], world: int, shuffle: bool, equal: str | None
) -> None:
    parts = parts_of(counts, world, equal, shuffle=shuffle, sticky=sticky)
    every = {(piece, at) for piece, count in enumerate(counts) for at in range(count)}
    got = Counter(one for part in parts for one in part)
    assert set(got) <= every
    total = len(every)
    if equal is None:
        assert got == Counter(every)
    elif equal == "drop":
        assert {len(part) for part in parts} == {total // world}
        assert max(got.values(), default=1) == 1
    else:
        assert {len(part) for part in parts} == {-(-total // world)}
        assert set(got) == every
        assert got.total() - total < world


def test_an_order_is_decided_by_seed_and_epoch() -> None:
    counts = [3] * 40
    first = parts_of(counts, 1, None, shuffle=True, sticky=False)
    assert first == parts_of(counts, 1, None, shuffle=True, sticky=False)
    assert first != parts_of(counts, 1, None, shuffle=True, sticky=False, epoch=1)
    assert parts_of(counts, 1, None, shuffle=False, sticky=False) == [
        records_of([Segment(piece) for piece in range(40)], counts)
    ]


def test_a_shard_that_keeps_what_it_read_has_the_same_in_each_epoch() -> None:
    counts = [3] * 40
    one, two = (
        parts_of(counts, 4, "drop", shuffle=True, sticky=True, epoch=epoch) for epoch in (0, 1)
    )
    assert [set(part) for part in one] == [set(part) for part in two]
    assert one != two


def test_equal_parts_without_counts_are_an_error() -> None:
    with pytest.raises(BadRequestError) as caught:
        segments_of_epoch(2, Deal(0, 2, "pad"), seed=0, epoch=0, shuffle=False)
    assert caught.value.field == "counts"


def test_a_fingerprint_does_not_depend_on_the_folder() -> None:
    def of(folder: str, stop: int) -> str:
        return fingerprint([Piece(0, f"{folder}/x.jsonl", 0, stop, stop)])

    assert of("/a", 5) == of("s3://b/c", 5) != of("/a", 6)
