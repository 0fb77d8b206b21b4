"""Write a stream's place as plain data, and read it back, also for another number of shards.

The stream calls this for ``state_dict`` and ``load_state_dict``. What it says is checked against the stream
that it is loaded into: a place in other files, or in another order, is no place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.streaming.core.blocks import Place, delivered
from stoker_train.streaming.core.segments import Deal, Segment, deal, mixed_seed, remaining

__all__ = ("Order", "Position", "load", "merge", "to_dict")

_VERSION = 1
_START = Place()


@dataclass(frozen=True, slots=True)
class Order:
    """All that decides the order of records; ``shuffle`` is the size of the buffer, 0 without one."""

    files: str
    seed: int
    shuffle: int
    deal: Deal
    sticky: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an epoch: ``rest`` are its segments where another number of shards began it, else None.

    ``dealt`` counts how often that was.
    """

    epoch: int = 0
    place: Place = _START
    rest: tuple[Segment, ...] | None = None
    dealt: int = 0

    def block_seed(self, order: Order, rank: int | None = None) -> int:
        """Return the seed of a shard's blocks, those of ``order`` unless a ``rank`` is given."""
        rank = order.deal.rank if rank is None else rank
        return mixed_seed(order.seed, self.epoch, rank, order.deal.world, self.dealt)

    @property
    def begins(self) -> bool:
        """Whether nothing of the epoch was delivered."""
        return self.place == _START and self.rest is None


def to_dict(order: Order, position: Position) -> dict[str, Any]:
    """Return a position as numbers, texts and lists (it can be JSON)."""
    place, rest = position.place, position.rest
    return {
        "version": _VERSION,
        "files": order.files,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "rank": order.deal.rank,
        "world": order.deal.world,
        "equal": order.deal.equal,
        "sticky": order.sticky,
        "epoch": position.epoch,
        "segment": place.segment,
        "record": place.record,
        "block": place.block,
        "skip": place.skip,
        "parts": [list(part) for part in place.parts],
        "dealt": position.dealt,
        "rest": None
        if rest is None
        else [[one.piece, one.start, one.stop, sorted(one.omit)] for one in rest],
    }


def load(order: Order, state: dict[str, Any]) -> Position:
    """Return the position of a state of this shard; ConflictError if it is of another stream."""
    known = _checked(order, state)
    if (known.rank, known.world) != (order.deal.rank, order.deal.world):
        raise ConflictError(
            f"the state is of shard {known.rank} of {known.world}, "
            f"the stream is shard {order.deal.rank} of {order.deal.world}\n"
            "load a list of the states of all shards: what is left is dealt anew"
        )
    return _position(state)


def merge(
    order: Order,
    states: Sequence[dict[str, Any]],
    segments: Callable[[int, Deal], list[Segment]],
    counts: Sequence[int] | None,
) -> Position:
    """Return this shard's position after all old shards' ``states``: its part of what is left of the epoch.

    ``segments(epoch, deal)`` returns a shard's list. The same on every new shard.
    """
    deals = [_checked(order, state) for state in states]
    world = len(states)
    if sorted(one.rank for one in deals) != list(range(world)) or {o.world for o in deals} != {
        world
    }:
        given = ", ".join(f"{one.rank} of {one.world}" for one in deals)
        raise BadRequestError(
            "the states are not those of all shards of one stream\n"
            f"given: {given}; give one of each",
            field="states",
        )
    positions = [_position(state) for state in states]
    epoch = min(one.epoch for one in positions)
    lists: list[list[Segment]] = []
    for dealt, position in sorted(
        zip(deals, positions, strict=True), key=lambda each: each[0].rank
    ):
        if position.epoch > epoch:
            if position.epoch > epoch + 1 or not position.begins:
                raise ConflictError(
                    f"shard {dealt.rank} is in epoch {position.epoch}, another in epoch {epoch}\n"
                    "load states that were saved at the same step"
                )
            continue
        lists.append(_left(order, dealt, position, segments))
    if all(one.begins for one in positions) and len(lists) == world:
        return Position(epoch)
    together = [one for row in itertools.zip_longest(*lists) for one in row if one is not None]
    return Position(
        epoch,
        rest=tuple(deal(together, order.deal, counts)),
        dealt=1 + max(one.dealt for one in positions),
    )


def _left(
    order: Order,
    dealt: Deal,
    position: Position,
    segments: Callable[[int, Deal], list[Segment]],
) -> list[Segment]:
    known = segments(position.epoch, dealt) if position.rest is None else list(position.rest)
    place = position.place
    if place.segment >= len(known):
        return []
    seed = position.block_seed(replace(order, deal=dealt))
    record = known[place.segment].start if place.record is None else place.record
    return remaining(known, place.segment, record, delivered(place, known, seed))


def _checked(order: Order, state: Any) -> Deal:
    """Return the shard of a state; ConflictError where it is of another order."""
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise BadRequestError(
            "the state is not one of a stream of this version\ngive what state_dict() returned",
            field="state",
        )
    wanted = {
        "files": order.files,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "equal": order.deal.equal,
        "sticky": order.sticky,
    }
    for name, value in wanted.items():
        if state[name] != value:
            shown = {"sticky": "cache"}.get(name, name)
            raise ConflictError(
                f"the state is of a stream with other {shown}\n"
                f"saved {state[name]!r}, this stream has {value!r}: make it as the one that was saved"
            )
    return Deal(state["rank"], state["world"], state["equal"])


def _position(state: dict[str, Any]) -> Position:
    rest = state["rest"]
    return Position(
        state["epoch"],
        Place(
            state["segment"],
            state["record"],
            state["block"],
            state["skip"],
            tuple((a, b, c) for a, b, c in state["parts"]),
        ),
        None
        if rest is None
        else tuple(Segment(a, b, c, frozenset(omit)) for a, b, c, omit in rest),
        state["dealt"],
    )
