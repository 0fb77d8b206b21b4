"""The way from what elastic jobs have to what a round gives them: one step at a time, and none halfway.

Grow is to reserve what is missing whole, then to offer; shrink is to offer less, which is the notice, and to
release what the job leaves at a boundary between batches. :func:`settle` compares what is with what is wanted
and orders the next step of each job. It remembers nothing, so that a scheduler which takes over goes on where
the one before was, and repeats no step that is on its way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker_scheduler.core.elastic.allocations import Allocation, replicas_of


class Place(NamedTuple):
    """The place of a replica: a bundle of a placement group, on a node."""

    group_id: str
    bundle: int
    node_id: str


Places = tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """An offer that the job has not answered.

    ``withdraws`` if it lacks places that the job has, ``is_broken`` if some of its places are held no more.
    """

    places: Places
    withdraws: bool
    answer_by_s: float
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group that was made for a job, and is not used yet; ``places`` once it is held whole."""

    group_id: str
    wanted: Allocation
    since_s: float
    places: Places | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """An elastic job as it stands: its places, its open offer, and what is reserved for it besides.

    ``gone`` are places of it whose bundles are held no more; ``has_lost`` says that its generation has lost
    some before. ``unused`` are bundles of its groups that it neither has nor is offered. ``version`` fences
    orders: one for an older state is refused.
    """

    job_id: str
    version: int
    places: Places = ()
    offer: OpenOffer | None = None
    reservations: tuple[Reservation, ...] = ()
    gone: Places = ()
    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_lost: bool = False
    min_replicas: int = 1
    max_replicas: int = 1 << 20
    grace_s: float = 30.0
    spares: int = 0
    """The places more than its target that it asks for."""
    returned: Places = ()
    """The places of it that it gives back."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve a bundle for each of ``wanted``, all or none."""

    job_id: str
    wanted: Allocation


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer a job these places, as its next generation."""

    job_id: str
    version: int
    places: Places
    answer_within_s: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Void the open offer of a job. ``unanswered`` if its time is over."""

    job_id: str
    version: int
    unanswered: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take all places of a job that did not answer in time: it goes on from its last commit."""

    job_id: str
    version: int
    places: Places


@dataclass(frozen=True, slots=True)
class Lose:
    """Record that places of a job are gone."""

    job_id: str
    version: int
    places: Places


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take places that the job gives back."""

    job_id: str
    version: int
    places: Places


@dataclass(frozen=True, slots=True)
class Release:
    """Give up a placement group, or the bundles of it that no job has or is offered."""

    group_id: str
    bundles: tuple[int, ...] = ()
    """Empty for the whole group."""


Order = Reserve | Offer | Withdraw | Preempt | Lose | TakeBack | Release

RESERVE_S = 20.0
"""Room that was free when it was asked for, and is not had by then, went to others."""
GROW_ANSWER_S = 120.0
"""How long a job may take to answer an offer of more, at least."""


@dataclass(slots=True)
class _Pass:
    """One pass over all jobs: what is free as it goes, and what was ordered."""

    free: dict[str, int]
    now_s: float
    orders: list[Order] = field(default_factory=list)
    blocked: list[tuple[Standing, Places]] = field(default_factory=list)
    in_flight: bool = False


def settle(
    standings: Sequence[Standing],
    targets: Mapping[str, Allocation],
    free: Mapping[str, int],
    now_s: float,
) -> list[Order]:
    """Return the next orders, none if all jobs have what they are to have or wait for an answer.

    ``targets`` are the allocations of jobs that a round has decided on; a job without one keeps what it has,
    or is offered. ``free`` is the room of each node for replicas that nobody has or has reserved.
    """
    done = _Pass(dict(free), now_s)
    due = _due(standings, targets) if any(job.spares for job in standings) else Counter[str]()
    for job in standings:
        target = targets.get(job.job_id)
        if job.spares:
            left = {node_id: max(0, done.free[node_id] - due[node_id]) for node_id in free}
            target = with_spares(job, target, left)
        _settle_one(job, target, done)
    leaving = [one for one in done.blocked if len(one[1]) < len(one[0].places)]
    if leaving and not done.orders and not done.in_flight:
        # Each waits for room that another one of them has: one lets go first.
        job, kept = min(leaving, key=lambda one: len(one[0].places))
        kept = kept if len(kept) >= job.min_replicas else ()
        done.orders.append(Offer(job.job_id, job.version, kept, job.grace_s))
    return done.orders


def _due(standings: Sequence[Standing], targets: Mapping[str, Allocation]) -> Counter[str]:
    """Return the room of each node that jobs are to have by a round and do not hold: none of it is lent."""
    due: Counter[str] = Counter()
    for job in standings:
        held = [*job.places, *(job.offer.places if job.offer is not None else ())]
        held += [place for one in job.reservations for place in one.places or ()]
        there = Counter(place.node_id for place in dict.fromkeys(held))
        due.update(Counter(dict(targets.get(job.job_id, ()))) - there)
    return due


def _settle_one(job: Standing, target: Allocation | None, done: _Pass) -> None:
    done.orders += [Release(group_id, bundles) for group_id, bundles in job.unused]
    if job.gone:
        done.orders.append(Lose(job.job_id, job.version, job.gone))
    elif job.offer is not None:
        _await_answer(job, job.offer, target, done)
    elif job.returned and len(job.places) - len(job.returned) >= job.min_replicas:
        done.orders.append(TakeBack(job.job_id, job.version, job.returned))
    elif target is None or _same(allocation_of(job.places), target):
        done.orders += [Release(one.group_id) for one in job.reservations]
        if job.has_lost and target is not None:
            done.orders.append(Offer(job.job_id, job.version, job.places, job.grace_s))
    else:
        _move(job, target, done)


def _await_answer(job: Standing, offer: OpenOffer, target: Allocation | None, done: _Pass) -> None:
    if done.now_s >= offer.answer_by_s:
        if offer.withdraws:
            done.orders.append(Preempt(job.job_id, job.version, job.places))
        else:
            done.orders.append(Withdraw(job.job_id, job.version, unanswered=True))
    elif offer.is_broken or not (target is None or offer.withdraws or _is_for(offer, target)):
        done.orders.append(Withdraw(job.job_id, job.version))
    else:
        done.in_flight = True


def _move(job: Standing, target: Allocation, done: _Pass) -> None:
    kept, missing = split(job.places, target)
    if not missing:
        done.orders += [Release(one.group_id) for one in job.reservations]
        within_s = job.grace_s if len(kept) < len(job.places) else _grow_s(job)
        done.orders.append(Offer(job.job_id, job.version, kept, within_s))
        return
    useful = [one for one in job.reservations if _same(one.wanted, missing)][:1]
    done.orders += [Release(one.group_id) for one in job.reservations if one not in useful]
    for reservation in useful:
        if reservation.places is not None:
            places = in_order((*kept, *reservation.places), target)
            shrinks = len(kept) < len(job.places)
            within_s = job.grace_s if shrinks else _grow_s(job)
            done.orders.append(Offer(job.job_id, job.version, places, within_s))
        elif done.now_s - reservation.since_s > RESERVE_S:
            done.orders.append(Release(reservation.group_id))
        else:
            done.in_flight = True
        return
    if all(done.free.get(node_id, 0) >= count for node_id, count in missing):
        for node_id, count in missing:
            done.free[node_id] -= count
        done.orders.append(Reserve(job.job_id, missing))
    else:
        done.blocked.append((job, kept))


def with_spares(
    job: Standing, target: Allocation | None, free: Mapping[str, int]
) -> Allocation | None:
    """Return a target with the places more that the job asks for, all or none, where nodes have room.

    ``free`` is that room without what others are to have. Once they are on their way, or there, they stay.
    """
    if not job.spares or not target:
        return target
    count = replicas_of(target)
    wanted = min(count + job.spares, job.max_replicas)
    on_the_way = job.places if job.offer is None else job.offer.places
    if len(on_the_way) == wanted:
        return allocation_of(on_the_way)
    if job.offer is not None or not _same(allocation_of(job.places), target):
        return target
    reserved = [one.wanted for one in job.reservations if replicas_of(one.wanted) == wanted - count]
    more = Counter(dict(reserved[0])) if reserved else Counter[str]()
    for node_id in sorted(free, key=lambda name: -free[name]):
        more[node_id] += min(free[node_id], wanted - count - more.total())
    if more.total() < wanted - count:
        return target
    return tuple((Counter(dict(target)) + more).items())


def _same(one: Allocation, other: Allocation) -> bool:
    return sorted(one) == sorted(other)


def _is_for(offer: OpenOffer, target: Allocation) -> bool:
    return _same(allocation_of(offer.places), target)


def _grow_s(job: Standing) -> float:
    return max(GROW_ANSWER_S, job.grace_s)


def allocation_of(places: Places) -> Allocation:
    """Return the replicas by node, in the order of their ranks."""
    return tuple(Counter(place.node_id for place in places).items())


def split(places: Places, target: Allocation) -> tuple[Places, Allocation]:
    """Return the places that a job keeps on its way to ``target``, in its order, and what is missing."""
    kept: list[Place] = []
    missing: list[tuple[str, int]] = []
    for node_id, count in target:
        here = [place for place in places if place.node_id == node_id][:count]
        kept += here
        if len(here) < count:
            missing.append((node_id, count - len(here)))
    return tuple(kept), tuple(missing)


def in_order(places: Places, target: Allocation) -> Places:
    """Return places in the order of a target's nodes, so that ranks of one node follow each other."""
    order = {node_id: index for index, (node_id, _) in enumerate(target)}
    return tuple(sorted(places, key=lambda place: order.get(place.node_id, math.inf)))
