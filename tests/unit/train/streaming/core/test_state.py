"""Places of a stream: what follows one is the same after a restart, with other readers, or other shards."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.streaming.core.blocks import groups, shuffled
from stoker_train.streaming.core.segments import Deal, Segment, segments_of_epoch
from stoker_train.streaming.core.state import Order, Position, load, merge, to_dict
from tests.unit.train.streaming.core.passes import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNTS = st.lists(st.integers(0, 15), min_size=1, max_size=12)
SHUFFLE = st.sampled_from((0, 1, 7, 30, 1000))
ORDER = Order("f", seed=4, shuffle=7, deal=Deal())


class Streamed:
    """A stream over made-up files: the pure parts of the real one, put together as it does."""

    def __init__(self, order: Order, counts: list[int], seed: int) -> None:
        self.order, self.counts = order, counts
        self.cluster = Cluster(counts, random.Random(seed), readers=1 + seed % 4, death=0.1)
        self.position = Position()

    def segments(self, epoch: int, dealt: Deal) -> list[Segment]:
        order = self.order
        return segments_of_epoch(
            len(self.counts),
            dealt,
            seed=order.seed,
            epoch=epoch,
            shuffle=bool(order.shuffle),
            counts=self.counts,
            sticky=order.sticky,
        )

    def records(self) -> Iterator[tuple[int, int]]:
        """Yield the rest of the epoch; the position is after each."""
        base, order = self.position, self.order
        segments = self.segments(base.epoch, order.deal) if base.rest is None else list(base.rest)
        place = base.place
        if place.segment < len(segments):
            first = segments[place.segment].start if place.record is None else place.record
            runs = self.cluster.runs(segments, place.segment, first)
            made = (
                shuffled(runs, segments, order.shuffle, base.block_seed(order), place)
                if order.shuffle
                else groups(runs, segments)
            )
            for group in made:
                for at in range(group.first, len(group.records)):
                    self.position = replace(base, place=group.after(at + 1))
                    yield group.records[at]
        self.position = Position(base.epoch + 1)

    def take(self, count: int) -> list[tuple[int, int]]:
        taken = []
        for one in self.records() if count else ():
            taken.append(one)
            if len(taken) == count:
                break
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state as a checkpoint has it."""
        state: dict[str, Any] = json.loads(json.dumps(to_dict(self.order, self.position)))
        return state


@settings(max_examples=100, deadline=None)
@given(COUNTS, SHUFFLE, st.integers(0, 99), st.lists(st.integers(0, 40), max_size=4))
def test_it_goes_on_with_the_next_record(
    counts: list[int], shuffle: int, seed: int, stops: list[int]
) -> None:
    order = replace(ORDER, shuffle=shuffle)
    whole = list(Streamed(order, counts, seed).records())
    assert Counter(whole) == Counter(
        (piece, at) for piece, count in enumerate(counts) for at in range(count)
    )
    got: list[tuple[int, int]] = []
    stream = Streamed(order, counts, seed + 1)
    for number, stop in enumerate(stops):
        if stream.position.epoch:
            break
        got += stream.take(stop)
        resumed = Streamed(order, counts, seed + 2 + number)
        resumed.position = load(order, stream.state())
        assert resumed.state() == stream.state()
        stream = resumed
    if not stream.position.epoch:
        got += stream.records()
    assert got == whole


@settings(max_examples=100, deadline=None)
@given(
    COUNTS,
    SHUFFLE,
    st.integers(0, 99),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from((None, "drop", "pad")),
    st.booleans(),
    st.data(),
)
def test_what_is_left_can_be_dealt_to_other_shards(
    counts: list[int],
    shuffle: int,
    seed: int,
    worlds: list[int],
    equal: str | None,
    sticky: bool,
    data: st.DataObject,
) -> None:
    """Each record once over all worlds of an epoch; equal parts lose or double fewer than one per shard."""
    order = replace(ORDER, shuffle=shuffle, sticky=sticky)
    got: Counter[tuple[int, int]] = Counter()
    states: list[dict[str, Any]] = []
    for number, world in enumerate(worlds):
        last = number == len(worlds) - 1
        shards = []
        for rank in range(world):
            shard = Streamed(replace(order, deal=Deal(rank, world, equal)), counts, seed + rank)
            if states:
                random.Random(seed).shuffle(states)
                shard.position = merge(shard.order, states, shard.segments, counts)
            shards.append(shard)
        if {shard.position.epoch for shard in shards} != {0}:
            break  # all were at the end before
        count = 1000 if last else data.draw(st.integers(0, 12))
        for shard in shards:
            got.update(shard.take(count))
        states = [shard.state() for shard in shards]
    every = Counter((piece, at) for piece, size in enumerate(counts) for at in range(size))
    slack = sum(worlds)
    if equal is None:
        assert got == every
    else:
        assert (every - got).total() <= (slack if equal == "drop" else 0)
        assert (got - every).total() <= (slack if equal == "pad" else 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"files": "g"}, "files"),
        ({"seed": 5}, "seed"),
        ({"shuffle": 9}, "shuffle"),
        ({"deal": Deal(equal="pad")}, "equal"),
        ({"sticky": True}, "cache"),
        ({"deal": Deal(1, 3)}, "shard"),
    ],
)
def test_a_state_of_another_stream_is_refused(change: dict[str, Any], name: str) -> None:
    state = to_dict(replace(ORDER, **change), Position())
    with pytest.raises(ConflictError, match=name):
        load(ORDER, state)


def test_states_that_do_not_belong_together_are_refused() -> None:
    def state(rank: int, world: int, epoch: int = 0) -> dict[str, Any]:
        return to_dict(replace(ORDER, deal=Deal(rank, world)), Position(epoch))

    def merged(*states: dict[str, Any]) -> Position:
        return merge(ORDER, states, lambda _epoch, _deal: [], None)

    for states in ((state(0, 2),), (state(0, 2), state(0, 2)), (state(0, 1), state(1, 2))):
        with pytest.raises(BadRequestError) as caught:
            merged(*states)
        assert caught.value.field == "states"
    with pytest.raises(ConflictError, match="epoch 3"):
        merged(state(0, 2, epoch=1), state(1, 2, epoch=3))
    with pytest.raises(BadRequestError):
        merged({"version": 99})
