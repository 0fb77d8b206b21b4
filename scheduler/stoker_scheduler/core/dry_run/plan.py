"""Plans: where requests would go and whom they would preempt, made now and with nothing else happening.

Each request is given to the state machine on a fork, with the queue, its limits, fairness and reservations as
they are; what the machine then does is the plan. Its commands never leave the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.commands import (
    Command,
    CommitBundles,
    HoldBundles,
    Outbox,
    Reject,
    ReleaseLease,
    StartWorker,
)
from stoker_scheduler.core.leases.lease import LeaseState
from stoker_scheduler.core.leases.lifecycle import request_id_of
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.verdicts import NodeVerdict

if TYPE_CHECKING:
    from stoker_scheduler.core.state import State


class Outcome(StrEnum):
    """The fate of a request; the values are those of the wire."""

    STARTS = "starts"
    PREEMPTS = "preempts"
    """It waits for leases that are asked back for it."""
    WAITS = "waits"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """The node and GPUs of one lease; ``bundle`` is its number in a placement group, or -1."""

    node_id: str
    gpus: Shares
    bundle: int
    is_bundle: bool = False
    """Whether it is the bundle itself that is placed, and not a lease in it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The fate of one request.

    ``places`` are those of its leases; of a request that preempts, the ones that it gets once ``victims``
    have ended, none if they go to others that are ahead of it. ``reason`` is that of a rejection.
    ``verdicts`` are the nodes' before the request was made; of the first :data:`MAX_EXPLAINED` requests.
    """

    outcome: Outcome
    places: tuple[PlannedPlace, ...] = ()
    victims: tuple[LeaseState, ...] = ()
    reason: str = ""
    verdicts: tuple[NodeVerdict, ...] = ()


MAX_EXPLAINED = 20
"""Requests of one plan that are explained; the others are only placed."""


def plan(twin: State, requests: Sequence[ev.LeaseRequested]) -> tuple[Planned, ...]:
    """Make ``requests`` one after the other on a fork of the state; return what becomes of each."""
    planned = []
    for number, request in enumerate(requests):
        verdicts: tuple[NodeVerdict, ...] = ()
        if number < MAX_EXPLAINED:
            wanted, name = request.requirements, request.name
            found = explain(twin, wanted, name, request.locality, request.kernels)
            verdicts = found.verdicts
        planned.append(replace(_plan_one(twin, request), verdicts=verdicts))
    return tuple(planned)


def _plan_one(twin: State, request: ev.LeaseRequested) -> Planned:
    before = twin.preemptions.victims(request.requirements)
    out = ask(twin, request)
    pending = twin.pending.get(request.request_id)
    if (
        pending is not None
        and pending.wanted
        and twin.preemptions.victims(request.requirements) == before
    ):
        # Leases in use are looked at anew at each review; the first comes after this pause.
        out += step(twin, ev.Tick(at_s=twin.at_s + twin.policy.preemption_pause_s))
        pending = twin.pending.get(request.request_id)
    if pending is None:
        rejected = (c for c in out if isinstance(c, Reject) and c.request_id == request.request_id)
        return Planned(Outcome.REJECTED, reason=next((c.text for c in rejected), ""))
    if not pending.wanted:
        leases = [twin.leases[lease_id] for lease_id in (*pending.starting, *pending.ready)]
        return Planned(Outcome.STARTS, tuple(map(_place, leases)))
    asked_back = [i for i in twin.preemptions.victims(request.requirements) if i not in before]
    if not asked_back:
        return Planned(Outcome.WAITS)
    victims = tuple(twin.leases[lease_id] for lease_id in asked_back)
    out = obey(twin, ev.LeaseReleased(at_s=twin.at_s, lease_ids=tuple(asked_back)))
    leases = [twin.leases[lease_id] for lease_id, _ in placed_by(out, request.request_id)]
    return Planned(Outcome.PREEMPTS, tuple(map(_place, leases)), victims)


def ask(twin: State, request: ev.LeaseRequested) -> Outbox:
    """Make a request on a fork; return the commands that follow."""
    if isinstance(request.requirements, Gang) and request.group_id not in twin.groups:
        group_id, gang = request.group_id, request.requirements
        made = ev.GroupAdded(at_s=twin.at_s, group_id=group_id, job_id=request.job_id, gang=gang)
        step(twin, made)
    return step(twin, request)


def _place(lease: LeaseState) -> PlannedPlace:
    is_bundle = lease.kind is ev.Kind.BUNDLE
    return PlannedPlace(lease.node_id, lease.gpus, lease.bundle, is_bundle)


def obey(twin: State, event: ev.Event) -> Outbox:
    """Apply an event to a fork whose nodelets do at once what they are told to; return the commands."""
    done: Outbox = []
    events = [event]
    while events:
        out = step(twin, events.pop(0))
        done += out
        answers = (_answer(command, twin.at_s) for command in out)
        events += [answer for answer in answers if answer is not None]
    return done


def _answer(command: Command, at_s: float) -> ev.Event | None:
    match command:
        case StartWorker():
            return ev.LeaseStarted(at_s=at_s, lease_id=command.lease_id)
        case HoldBundles():
            return ev.BundlesHeld(at_s=at_s, lease_ids=command.lease_ids)
        case CommitBundles():
            return ev.BundlesCommitted(at_s=at_s, lease_ids=command.lease_ids)
        case ReleaseLease():
            return ev.LeaseEnded(at_s=at_s, lease_id=command.lease_id)
        case _:
            return None


def placed_by(out: Outbox, request_id: str) -> list[tuple[str, str]]:
    """Return the leases that commands start for a request, each with its node."""
    placed = []
    for command in out:
        if isinstance(command, StartWorker):
            placed.append((command.lease_id, command.node_id))
        elif isinstance(command, HoldBundles):
            placed += [(lease_id, command.node_id) for lease_id in command.lease_ids]
    return [one for one in placed if request_id_of(one[0]) == request_id]
