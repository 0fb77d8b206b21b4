"""Memberships and orders: who is in a generation of an elastic job, and what its ranks are told.

Written by the generation machine (:mod:`.machine`), sent to replicas by the controller, and kept in the gcs
by compare-and-set. Pure: no clock, no IO.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Slot(msgspec.Struct, frozen=True, order=True):
    """A place for a replica: a bundle of a placement group, on a node."""

    group_id: str
    bundle: int
    node_id: str


class Member(msgspec.Struct, frozen=True):
    """A rank of a generation, and the actor that is it.

    ``incarnation`` tells apart the actors that one job had, one after the other. ``survivor``: it was in the
    generation before, and has the state of the training.
    """

    rank: int
    actor_id: str
    node_id: str
    incarnation: int
    survivor: bool = False


class Membership(msgspec.Struct, frozen=True):
    """The ranks of one generation of a job: one lives at most, and its number only grows.

    ``attempt`` is that of the controller which wrote the record: over a later one's it writes nothing.
    """

    job_id: str
    generation: int
    members: tuple[Member, ...]
    attempt: int = 0

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return len(self.members)

    @property
    def nodes(self) -> dict[str, int]:
        """Its ranks by node, in their order."""
        counts: dict[str, int] = {}
        for member in self.members:
            counts[member.node_id] = counts.get(member.node_id, 0) + 1
        return counts

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of an actor, None if it is not in."""
        for member in self.members:
            if member.incarnation == incarnation:
                return member.rank
        return None

    def member(self, incarnation: int) -> Member | None:
        """Return the member that an actor is, None if it is not in."""
        return next((one for one in self.members if one.incarnation == incarnation), None)


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Form this generation at the boundary; whoever is not in it leaves."""

    membership: Membership


class SetBatch(msgspec.Struct, frozen=True, tag=True):
    """Change the global batch to ``batch`` samples, in passes of ``local`` samples at most."""

    batch: int
    local: int
    lr_scale: float | None = None


class SetLocal(msgspec.Struct, frozen=True, tag=True):
    """Change the samples of a pass alone: memory ran out with more."""

    local: int


class SetLr(msgspec.Struct, frozen=True, tag=True):
    """Multiply the learning rate that the loop or its scheduler sets by ``factor``."""

    factor: float


class SetSync(msgspec.Struct, frozen=True, tag=True):
    """Go on with another strategy of synchronisation, pickled by cloudpickle."""

    strategy: bytes
    name: str = ""


class SetShares(msgspec.Struct, frozen=True, tag=True):
    """Split each step by these weights, one for each rank; empty: evenly."""

    weights: tuple[float, ...]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit, and save a durable checkpoint."""


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Save a durable checkpoint and leave: the next generation begins from it."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the training here, as if its last epoch were over."""

    reason: str = ""


Action = Resize | SetBatch | SetLocal | SetLr | SetSync | SetShares | Commit | Suspend | Stop


class Order(msgspec.Struct, frozen=True):
    """An action for all ranks of a generation, taken by all at the same boundary, in order of numbers."""

    number: int
    generation: int
    action: Action

    @property
    def kind(self) -> str:
        """The name of its action."""
        return type(self.action).__name__


class Restore(msgspec.Struct, frozen=True):
    """State with which a generation begins.

    ``step``: the commit in memory of rank 0 at this step; ``durable``: the newest checkpoint; neither: rank
    0 goes on as it is, or begins anew.
    """

    step: int | None = None
    durable: bool = False
    local: int | None = None
    """The most samples of a pass from now on: memory ran out with more."""


def encode(record: Membership) -> bytes:
    """Return the record as it is kept in the gcs."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> Membership:
    """Return the record that :func:`encode` made; ValueError if it is none."""
    return msgspec.json.decode(data, type=Membership)


def plain(action: Any) -> str:
    """Return an action in words, for logs."""
    if isinstance(action, Resize):
        return f"resize to {action.membership.world_size} ranks"
    if isinstance(action, SetBatch):
        return f"batch {action.batch}, {action.local} in a pass"
    if isinstance(action, SetSync):
        return f"synchronise by {action.name}"
    fields = msgspec.structs.asdict(action)
    inside = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{type(action).__name__} {inside}".strip()
