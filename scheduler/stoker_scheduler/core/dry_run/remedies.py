"""Counterfactuals: what would have to change for a request to start, tried on forks before it is told.

What is in the request's way is taken away, one obstacle after the other, until it starts: by what may happen
by itself (leases end, time passes), and by what an operator can do (a higher limit, another node). The
effort is bounded: of what was not found to help nothing is said. With 1,000 nodes and 8,000 leases the search
takes two to four times as long as one fork.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork, size_of
from stoker_scheduler.core.dry_run.plan import ask, obey, placed_by
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.model.devices import DeviceFacts
from stoker_scheduler.core.model.gangs import Gang, GangStrategy
from stoker_scheduler.core.model.nodes import NodeSpec
from stoker_scheduler.core.model.resources import (
    COUNTED_IN_BYTES,
    UNIT,
    Units,
    add,
    amount_text,
    joined,
    units_text,
)
from stoker_scheduler.core.placement.explain import holder_text
from stoker_scheduler.core.placement.feasibility import (
    RESOURCE_RULES,
    RULES,
    Rule,
    first_obstacle,
)
from stoker_scheduler.core.placement.gang import GangRanking
from stoker_scheduler.core.placement.ranking import DirtyNodes

if TYPE_CHECKING:
    from stoker_scheduler.core.commands import Outbox
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.tenants import Hold
    from stoker_scheduler.core.state import State

MAX_STEPS = 8
"""Changes of which one remedy may consist."""
MAX_SIZE = 30_000
"""Nodes, leases and requests of a state that is forked for a remedy; of a larger one none is told."""
MAX_WAIT_S = 10.0
"""Time that may pass for a remedy: in more, too much else happens."""
MAX_NODES = 128
"""Nodes on which leases that could end are looked for."""
MAX_SHOWN = 3
_OTHERS = tuple(rule for rule in RULES if rule not in RESOURCE_RULES)
_GROUP_WEIGHT = 1000
"""To end a placement group is worth as much as to end so many leases."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that would have to happen: the events that it is, and in words."""

    events: tuple[ev.Event, ...]
    text: str
    leases: tuple[LeaseState, ...] = ()


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes after which the request starts: those on a fork did it. ``node_id`` is where it then goes."""

    changes: tuple[Change, ...]
    node_id: str

    @property
    def events(self) -> tuple[ev.Event, ...]:
        """The remedy as events, in order."""
        return tuple(event for change in self.changes for event in change.events)

    @property
    def leases(self) -> tuple[LeaseState, ...]:
        """The leases that have to end."""
        return tuple(lease for change in self.changes for lease in change.leases)

    @property
    def text(self) -> str:
        """The remedy in words."""
        return f"it starts if {' and '.join(change.text for change in self.changes)}"


Search = Callable[["State", ev.LeaseRequested], "Change | None"]
"""What would take away the obstacle that is next in the way of a request."""


def remedies(state: State, request: ev.LeaseRequested) -> tuple[Remedy, ...]:
    """Return what would make ``request`` start, pending or not: what may happen, and what can be done.

    None if it would start as things are, if the state is too large to try, and where nothing helped.
    """
    if size_of(state) > MAX_SIZE:
        return ()
    found = (_find(state, request, search) for search in (_what_may_happen, _what_can_be_done))
    return tuple(remedy for remedy in found if remedy is not None)


def _find(state: State, request: ev.LeaseRequested, search: Search) -> Remedy | None:
    twin, node_id = _asked(state, request)
    if node_id:
        return None
    changes: list[Change] = []
    while not node_id:
        change = None
        if request.request_id in twin.pending and len(changes) < MAX_STEPS:
            change = search(twin, request)
        if change is None:
            return None
        changes.append(change)
        node_id = _make(twin, change, request)
    if len(changes) > 1 and all(change.leases for change in changes):
        # The ends before the last may have helped others only.
        twin, _ = _asked(state, request)
        alone = _make(twin, changes[-1], request)
        if alone:
            return Remedy((changes[-1],), alone)
    return Remedy(tuple(changes), node_id)


def _asked(state: State, request: ev.LeaseRequested) -> tuple[State, str]:
    """Return a fork in which the request is made, and the node where it starts at once, or ''."""
    twin = fork(state)
    if request.request_id in twin.pending:
        return twin, ""
    # It is not to be given up while the search goes on.
    out = ask(twin, msgspec.structs.replace(request, wait_if_infeasible=True))
    return twin, _node_of(out, request)


def _make(twin: State, change: Change, request: ev.LeaseRequested) -> str:
    """Have a change happen to a fork; return the node where the request then starts, or ''."""
    return _node_of([c for event in change.events for c in obey(twin, event)], request)


def _node_of(out: Outbox, request: ev.LeaseRequested) -> str:
    return next((node_id for _, node_id in placed_by(out, request.request_id)), "")


# What may happen by itself


def _what_may_happen(twin: State, request: ev.LeaseRequested) -> Change | None:
    requirements, account = request.requirements, twin.pending[request.request_id].account
    hold = twin.hold(account, requirements)
    if hold is not None:
        if hold.resource and not hold.is_final:
            return _ends_of_limit(twin, request, hold)
        return None if hold.limit == "stopped" or hold.is_final else _time(twin, hold.until_s)
    ends = _least_ends(twin, requirements)
    if ends:
        names = requirements.names
        return _ends(
            twin, ends, f"on {joined(list(dict.fromkeys(one.node_id for one in ends)))}", names
        )
    return _next_retry(twin, requirements)


def _ends_of_limit(twin: State, request: ev.LeaseRequested, hold: Hold) -> Change | None:
    """Return the end of the fewest leases that a limit counts, so that it has room again."""
    name, excess = hold.resource, hold.needed - _limit_of(twin, hold)
    counted = [
        (dict(twin.cost(lease.requirements)).get(name, 0), lease)
        for lease in twin.leases.values()
        if is_counted(twin, lease, request, hold) and _can_end(lease) and lease.has_allocated(name)
    ]
    # One that suffices, else the largest first.
    enough = [one for one in counted if one[0] >= excess]
    chosen = [min(enough, key=lambda one: (_weight(one[1]), one[0]))] if enough else []
    if not enough:
        counted.sort(key=lambda one: (_weight(one[1]), -one[0]))
        for units, lease in counted:
            chosen.append((units, lease))
            excess -= units
            if excess <= 0:
                break
    if not chosen or (not enough and excess > 0):
        return None
    return _ends(
        twin, [lease for _, lease in chosen], f"of queue {hold.queue!r}", frozenset({name})
    )


def _limit_of(twin: State, hold: Hold) -> int:
    spec = twin.tenants.path(hold.queue)[0].spec
    return int(getattr(spec, hold.limit)[hold.resource])


def is_counted(twin: State, lease: LeaseState, request: ev.LeaseRequested, hold: Hold) -> bool:
    """Return whether the limit that holds a request counts a lease."""
    account = lease.account
    if lease.in_bundle or lease.requirements.background:
        return False
    if hold.limit == "user_limit":
        return account.queue == hold.queue and account.user == request.user
    if hold.limit == "job_limit":
        return account.queue == hold.queue and account.job_id == request.job_id
    return hold.queue in twin.tenants.names_above(account.queue)


def _least_ends(twin: State, requirements: Requirements | Gang) -> list[LeaseState]:
    """Return the fewest leases found whose end makes room, none if that takes more than ends."""
    if isinstance(requirements, Gang):
        return _ends_for_gang(twin, requirements)
    places: Iterable[NodeInfo] = twin.nodes.values()
    if requirements.group_id:
        group = twin.groups.get(requirements.group_id)
        places = group.places(requirements) if group is not None else ()
    found: tuple[int, list[LeaseState]] | None = None
    looked_at = 0
    for place in places:
        ends = _ends_on(twin, place, (requirements,))
        if not ends:
            continue
        weight = sum(map(_weight, ends))
        if found is None or weight < found[0]:
            found = (weight, ends)
        looked_at += 1
        if found[0] <= 1 or looked_at == MAX_NODES:
            break
    return [] if found is None else found[1]


def _ends_for_gang(twin: State, gang: Gang) -> list[LeaseState]:
    for groups_too in (False, True):
        nodes = {node.node_id: _emptied(twin, node, groups_too) for node in twin.nodes.values()}
        placement = GangRanking(gang).best(nodes, DirtyNodes(), twin.policy.score)
        if placement is None:
            continue
        wanted: dict[str, list[Requirements]] = {}
        for index, node_id in placement:
            wanted.setdefault(node_id, []).append(gang.bundles[index])
        found = [_ends_on(twin, twin.nodes[n], bundles) for n, bundles in wanted.items()]
        return [lease for ends in found for lease in ends or ()]
    return []


def _emptied(twin: State, node: NodeInfo, groups_too: bool) -> NodeInfo:
    trial = node.copy()
    for lease_id in node.leases:
        lease = twin.leases[lease_id]
        if _can_end(lease) and (groups_too or lease.kind is not ev.Kind.BUNDLE):
            trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
    return trial


def _ends_on(
    twin: State, place: NodeInfo, wanted: Sequence[Requirements]
) -> list[LeaseState] | None:
    """Return the leases whose end makes room for all of ``wanted`` at ``place``; None if nothing does."""
    if any(first_obstacle(place, one, _OTHERS) is not None for one in wanted):
        return None
    candidates = [twin.leases[i] for i in place.leases if _can_end(twin.leases[i])]
    trial, ends = place.copy(), []
    for one in wanted:
        while (obstacle := first_obstacle(trial, one, RESOURCE_RULES)) is not None:
            name = obstacle.subject
            holders = [c for c in candidates if c not in ends and c.has_allocated(name)]
            if obstacle.rule is not Rule.AVAILABLE or not holders:
                return None
            lease = min(holders, key=lambda one: (_weight(one), -dict(one.allocated).get(name, 0)))
            trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
            ends.append(lease)
        trial.allocate(one, trial.choose(one) or {})
    for lease in list(ends) if len(ends) > 1 else ():
        others = [other for other in ends if other is not lease]
        if _fit_after(place, others, wanted):
            ends = others
    return ends


def _fit_after(place: NodeInfo, ends: Iterable[LeaseState], wanted: Iterable[Requirements]) -> bool:
    trial = place.copy()
    for lease in ends:
        trial.free(lease.requirements, lease.gpus, blocked=lease.blocked)
    for one in wanted:
        if first_obstacle(trial, one, RESOURCE_RULES) is not None:
            return False
        trial.allocate(one, trial.choose(one) or {})
    return True


def _can_end(lease: LeaseState) -> bool:
    # The end of one that starts would only make its owner ask again.
    return lease.phase in (Phase.HELD, Phase.RELEASING)


def _weight(lease: LeaseState) -> int:
    """Return what the end of a lease is worth: nothing if it is on its way out."""
    if lease.phase is Phase.RELEASING or lease.preempted:
        return 0
    return _GROUP_WEIGHT if lease.kind is ev.Kind.BUNDLE else 1


def _ends(twin: State, leases: Sequence[LeaseState], where: str, names: frozenset[str]) -> Change:
    """Return the end of leases as a change; bundles end with their whole placement groups."""
    groups = dict.fromkeys(one.group_id for one in leases if one.kind is ev.Kind.BUNDLE)
    ids = tuple(one.lease_id for one in leases if one.kind is not ev.Kind.BUNDLE)
    at_s = twin.at_s
    made: list[ev.Event] = [ev.GroupRemoved(at_s=at_s, group_id=group_id) for group_id in groups]
    if ids:
        made.append(ev.LeaseReleased(at_s=at_s, lease_ids=ids))
        # Those that are on their way out already were ordered to end before.
        made += [ev.LeaseEnded(at_s=at_s, lease_id=lease_id) for lease_id in ids]
    freed: Units = {}
    for lease in leases:
        add(freed, [(name, units) for name, units in lease.allocated if name in names])
    shown = [holder_text(lease) for lease in leases[:MAX_SHOWN]]
    if len(leases) > MAX_SHOWN:
        shown.append(f"{len(leases) - MAX_SHOWN} more")
    verb = "ends" if len(leases) == 1 else "end"
    return Change(
        tuple(made),
        f"{units_text(tuple(freed.items()))} {where} is freed, when {joined(shown)} {verb}",
        tuple(leases),
    )


def _time(twin: State, until_s: float) -> Change | None:
    """Return the passing of time as a change; None for more than what can be foreseen."""
    wait_s, pause_s = max(0.0, until_s - twin.at_s), twin.policy.preemption_pause_s
    if wait_s > MAX_WAIT_S:
        return None
    # As it passes, what waits is reviewed.
    count = math.ceil(wait_s / pause_s)
    at_s = [min(until_s, twin.at_s + number * pause_s) for number in range(1, count + 1)]
    return Change(tuple(ev.Tick(at_s=one) for one in at_s), f"{wait_s:.1f} s pass")


def _next_retry(twin: State, requirements: Requirements | Gang) -> Change | None:
    """Return the wait until a node that refused a start is tried again."""
    kinds = requirements.kinds if isinstance(requirements, Gang) else (requirements,)
    times = [
        backoff.until_s
        for node in twin.nodes.values()
        for kind in kinds
        if (backoff := node.backoff(kind.env)) is not None and backoff.until_s > twin.at_s
    ]
    return _time(twin, min(times)) if times else None


# What can be done


def _what_can_be_done(twin: State, request: ev.LeaseRequested) -> Change | None:
    requirements, account = request.requirements, twin.pending[request.request_id].account
    hold = twin.hold(account, requirements)
    if hold is not None:
        return _lift(twin, hold)
    return _new_node(twin, requirements)


def _lift(twin: State, hold: Hold) -> Change | None:
    """Return the change of a queue's settings after which ``hold`` holds nothing."""
    spec = twin.tenants.path(hold.queue)[0].spec
    name, amount = hold.resource, hold.needed
    if hold.limit == "stopped":
        lifted = replace(spec, stopped=False)
        text = f"queue {hold.queue!r} is started (stoker queue start {hold.queue})"
    elif name:
        limits = {**getattr(spec, hold.limit), name: amount}
        lifted = replace(spec, **{hold.limit: limits})  # type: ignore[arg-type]
        option = hold.limit.replace("_", "-")
        written = f"{amount}" if name in COUNTED_IN_BYTES else f"{amount / UNIT:g}"
        text = (
            f"the {hold.limit} of queue {hold.queue!r} is {amount_text(name, amount)} "
            f"(stoker queue set {hold.queue} --{option} {name}={written})"
        )
    else:
        return None
    specs = tuple(lifted if one.name == hold.queue else one for one in twin.tenants.specs)
    return Change((ev.QueuesChanged(at_s=twin.at_s, queues=specs),), text)


def _new_node(twin: State, requirements: Requirements | Gang) -> Change | None:
    """Return the coming of a node that is just large enough; for a gang that is to be apart, of each."""
    gang = requirements if isinstance(requirements, Gang) else None
    bundles = gang.bundles if gang is not None else (requirements,)
    if gang is not None and gang.strategy is GangStrategy.STRICT_SPREAD:
        bundles = gang.kinds[:1]
    pinned = None
    if not isinstance(requirements, Gang):
        pinned = None if requirements.soft else requirements.node_id
        if requirements.group_id or pinned in twin.nodes:
            return None
    node_id = pinned or f"n_new{len(twin.nodes)}"
    spec = _spec_for(node_id, [one for one in bundles if not isinstance(one, Gang)])
    named = f" {node_id}" if pinned else ""
    labels = "".join(f", label {label}={value}" for label, value in spec.labels.items())
    text = f"a node{named} with {units_text(tuple(spec.total_units.items()))}{labels} joins"
    return Change((ev.NodeJoined(at_s=twin.at_s, spec=spec),), text)


def _spec_for(node_id: str, bundles: Sequence[Requirements]) -> NodeSpec:
    """Return a node on which all of ``bundles`` fit when it is idle, as far as that depends on its size."""
    total: Units = {}
    labels: dict[str, str] = {}
    parts, gpus, nbytes = 0, 0, 0
    for bundle in bundles:
        add(total, bundle.items)
        labels.update({term.label: term.values[0] for term in bundle.terms if not term.negated})
        gpus += bundle.gpu // UNIT
        parts += bundle.gpu % UNIT
        gpus += bool(bundle.gpu_memory)
        nbytes = max(nbytes, bundle.gpu_memory)
    gpus += -(-parts // UNIT)
    return NodeSpec(
        node_id=node_id,
        total=total,
        gpus=tuple(range(gpus)),
        gpu_facts=DeviceFacts(memory=dict.fromkeys(range(gpus), nbytes) if nbytes else {}),
        labels=labels,
    )
