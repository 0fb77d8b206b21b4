"""Conversions between the wire's messages and the core's own types; nothing here decides.

The core imports no messages, so that its tests and simulations need none of them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core.dry_run.diagnosis import ConstraintKind as Binding
from stoker_scheduler.core.events import Kind, LeaseRequested
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.labels import Term
from stoker_scheduler.core.model.node_filters import (
    AllOf,
    AnyOf,
    Attribute,
    Condition,
    Expression,
    Field,
    NodeFilter,
    Operator,
)
from stoker_scheduler.core.model.nodes import Health, NodeSpec, make_node_spec
from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.core.model.resources import (
    UNIT,
    InvalidDemandError,
    add,
    to_amounts,
)
from stoker_scheduler.core.model.taints import Taint, Toleration
from stoker_scheduler.core.model.topology import make_topology
from stoker_scheduler.core.placement.feasibility import NodeFit
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from stoker_scheduler.core.queueing.tenants import dominant_share
from stoker_wire.constraints import node_filters
from stoker_wire.constraints.label_selectors import parse_value
from stoker_wire.constraints.taints import Toleration as WireToleration
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import (
    ClusterResources,
    Demand,
    Lease,
    LeaseKind,
    LeaseRequest,
    Node,
)
from stoker_wire.messages.common import OnInfeasible, RuntimeEnv, SpreadPolicy
from stoker_wire.messages.control import (
    Constraint,
    ConstraintKind,
    Explanation,
    Fit,
    Holder,
    QueueEntry,
    Remedy,
    Verdict,
    WaitPhase,
)
from stoker_wire.messages.groups import PlannedBundle, PlannedLease, PlanOutcome, RequestBundles
from stoker_wire.messages.kernels import kernel_set
from stoker_wire.messages.queues import QueueExplanation, QueueUsage, QueueWaiter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_scheduler.core.dry_run.diagnosis import Diagnosis
    from stoker_scheduler.core.dry_run.plan import Planned
    from stoker_scheduler.core.model.queues import Account
    from stoker_scheduler.core.placement.verdicts import NodeVerdict
    from stoker_scheduler.core.queueing.standing import Standing
    from stoker_scheduler.core.state import State
    from stoker_scheduler.jobs import JobFacts
    from stoker_wire.messages.groups import Bundle, GroupStrategy

_POLICIES = {
    SpreadPolicy.HYBRID: PlacementPolicy.HYBRID,
    SpreadPolicy.SPREAD: PlacementPolicy.SPREAD,
}
_NO_ENV = RuntimeEnv()
MAX_WAITERS = 100
_encode = msgspec.msgpack.Encoder(order="sorted").encode
_tolerations_of = partial(msgspec.convert, type=tuple[Toleration, ...], from_attributes=True)


def requirements_of(
    demand: Demand, at: str = "demand.", filters: tuple[NodeFilter, ...] = ()
) -> Requirements:
    """Return the requirements of ``demand``; raise BadRequestError for one that makes no sense.

    ``at`` is where the demand is in the request, for the error's field. ``filters`` are those of its job's
    queue, which a bundle has passed with its group.
    """
    strategy = demand.strategy
    try:
        if demand.kind is LeaseKind.BUNDLE:
            # Without a group, which the core would look for once it is placed.
            raise InvalidDemandError(
                "kind", "kind: bundles are reserved with their placement group\nask for that one"
            )
        return make_requirements(
            demand.resources,
            terms=terms_of(demand.label_selector),
            node_id=strategy.node_id,
            soft=strategy.soft,
            policy=_POLICIES[strategy.policy],
            env=_env_name(demand.runtime_env),
            group_id=strategy.group_id,
            bundle=strategy.bundle,
            node_filters=(
                *(() if strategy.group_id else filters),
                *_filters_of(demand.node_filter, strategy.group_id),
            ),
            background=demand.background,
            tolerations=_tolerations_of(demand.tolerations),
        )
    except InvalidDemandError as error:
        raise BadRequestError(str(error), field=f"{at}{error.field}") from None


def _filters_of(text: str, group_id: str = "") -> tuple[NodeFilter, ...]:
    if not text:
        return ()
    if group_id:
        raise InvalidDemandError(
            "node_filter",
            "node_filter: the nodes of a placement group are chosen with it\n"
            "give the filter to the placement group",
        )
    try:
        return (node_filter_of(text),)
    except node_filters.NodeFilterError as error:
        raise InvalidDemandError("node_filter", f"node_filter cannot be read\n{error}") from None


@lru_cache(maxsize=1024)
def node_filter_of(text: str, queue: str = "") -> NodeFilter:
    """Return the core's form of a node filter; raise NodeFilterError, with the position."""
    return NodeFilter(_expression_of(node_filters.parse(text)), queue)


def _expression_of(parsed: node_filters.Expression) -> Expression:
    match parsed:
        case node_filters.AllOf(parts):
            return AllOf(tuple(_expression_of(part) for part in parts))
        case node_filters.AnyOf(parts):
            return AnyOf(tuple(_expression_of(part) for part in parts))
        case node_filters.Condition(operator, operands):
            return Condition(
                Operator(operator),
                tuple(
                    Field(Attribute(one.attribute.value), one.name)
                    if isinstance(one, node_filters.Field)
                    else one
                    for one in operands
                ),
            )


def gang_of(
    bundles: Sequence[Bundle],
    strategy: GroupStrategy,
    taken: Sequence[str] = (),
    filters: tuple[NodeFilter, ...] = (),
) -> Gang:
    """Return bundles as a gang; raise BadRequestError, which names the bundle, for a senseless one."""
    at = "bundles"
    try:
        requirements = []
        for index, bundle in enumerate(bundles):
            at = f"bundles.{index}."
            terms = terms_of(bundle.label_selector)
            both = (*filters, *_filters_of(bundle.node_filter))
            tolerated = _tolerations_of(bundle.tolerations)
            requirements.append(
                make_requirements(
                    bundle.resources, terms=terms, node_filters=both, tolerations=tolerated
                )
            )
        at = ""
        return make_gang(requirements, GangStrategy(strategy.value), taken=taken)
    except InvalidDemandError as error:
        raise BadRequestError(str(error), field=f"{at}{error.field}") from None


def bundles_event(
    request: RequestBundles, job: JobFacts, *, at_s: float, wait_s: float
) -> LeaseRequested:
    """Return the event of a request for bundles that arrives now."""
    if len(request.indices) != len(request.bundles):
        raise BadRequestError("indices: one for each of the bundles", field="indices")
    return LeaseRequested(
        at_s=at_s,
        request_id=request.request_id,
        owner_id=GCS_OWNER,
        job_id=request.job_id,
        requirements=gang_of(request.bundles, request.strategy, request.taken, job.node_filters),
        class_key=request.group_id,
        count=1,
        deadline_s=at_s + wait_s,
        kind=Kind.BUNDLE,
        priority=job.priority,
        wait_if_infeasible=True,
        name=request.name,
        group_id=request.group_id,
        indices=request.indices,
        user=job.user,
        queue=job.queue,
        preemptible=request.preemptible,
        preemption_grace_s=request.preemption_grace_s,
    )


def terms_of(selector: Mapping[str, str]) -> tuple[Term, ...]:
    """Return a selector's conditions, ordered by label; raise InvalidDemandError for an unreadable one."""
    return tuple(_term_of(label, selector[label]) for label in sorted(selector))


def _term_of(label: str, written: str) -> Term:
    try:
        values, negated = parse_value(label, written)
    except ValueError as error:
        raise InvalidDemandError(f"label_selector.{label}", f"label_selector: {error}") from None
    return Term(label, values, negated)


def _env_name(env: RuntimeEnv) -> str:
    return "" if env == _NO_ENV else hashlib.sha256(_encode(env)).hexdigest()[:16]


def class_key(request: LeaseRequest) -> str:
    """Return the scheduling class: equal for requests whose leases may serve each other."""
    actor, driver = request.actor, request.driver
    start: object = request.acts_for
    if actor is not None:
        start = actor.actor_id, actor.incarnation
    elif driver is not None:
        start = driver.job_id
    alike = msgspec.structs.replace(
        request.demand, name="", locality={}, on_infeasible=OnInfeasible.ERROR
    )
    return _encode((alike, start)).hex()


def request_event(
    request: LeaseRequest, job: JobFacts, *, at_s: float, wait_s: float
) -> LeaseRequested:
    """Return the event of a request that arrives now; raise BadRequestError for a senseless demand."""
    demand = request.demand
    return LeaseRequested(
        at_s=at_s,
        request_id=request.request_id,
        owner_id=request.owner_id,
        job_id=demand.job_id,
        requirements=requirements_of(demand, filters=job.node_filters),
        class_key=class_key(request),
        count=request.count,
        deadline_s=at_s + wait_s,
        kind=Kind(demand.kind.value),
        priority=job.priority + demand.priority,
        wait_if_infeasible=demand.on_infeasible is OnInfeasible.WAIT,
        locality=demand.locality,
        name=demand.name,
        actor_id=request.actor.actor_id if request.actor else "",
        kernels=kernel_set(demand.runtime_env),
        setup=demand.runtime_env.installs,
        user=job.user,
        queue=job.queue,
        preemptible=demand.preemptible or demand.background,
        preemption_grace_s=demand.preemption_grace_s,
        owner_node_id=request.owner_node_id,
    )


def spec_of(node: Node) -> NodeSpec:
    """Return the core's spec of a node of the gcs."""
    return make_node_spec(
        node.node_id,
        node.resources,
        hostname=node.hostname,
        incarnation=node.incarnation,
        device_indices=tuple(device.index for device in node.devices),
        device_memory={device.index: device.memory_bytes for device in node.devices},
        mig_slices=[device.index for device in node.devices if device.mig_profile],
        topology=make_topology({device.index: device.links for device in node.devices}),
        quarantined={one.index: one.quarantine for one in node.devices if one.quarantine},
        labels=node.labels,
        health=Health(node.state.value),
        reason=node.reason,
        warm=node.warm_kernels,
        cordon=order.text if (order := node.drain or node.cordon) else "",
        drain_until_s=node.drain.deadline_at_s if node.drain else None,
        taints=msgspec.convert(node.taints, tuple[Taint, ...], from_attributes=True),
        pressure="; ".join(one.reason for one in node.conditions),
    )


def lease_of(lease: LeaseState) -> Lease:
    """Return a lease as it crosses the wire."""
    return Lease(
        lease_id=lease.lease_id,
        owner_id=lease.owner_id,
        job_id=lease.job_id,
        kind=LeaseKind(lease.kind.value),
        node_id=lease.node_id,
        node_incarnation=lease.incarnation,
        resources=to_amounts(lease.requirements.units),
        gpus={index: units / UNIT for index, units in lease.gpus.items()},
        granted_at_s=lease.granted_at_s,
        blocked=lease.blocked,
        actor_id=lease.actor_id,
        name=lease.name,
        group_id=lease.group_id,
        bundle=lease.bundle,
        preemptible=lease.preemptible,
        preemption_grace_s=lease.preemption_grace_s,
        priority=lease.priority,
        background=lease.requirements.background,
        owner_node_id=lease.owner_node_id,
        tolerations=msgspec.convert(
            lease.requirements.tolerations, tuple[WireToleration, ...], from_attributes=True
        ),
    )


def verdicts_of(verdicts: tuple[NodeVerdict, ...]) -> tuple[Verdict, ...]:
    """Return verdicts as they cross the wire; ``rule`` joins all broken rules."""
    return tuple(
        Verdict(
            node_id=v.node_id,
            fit=Fit(v.fit.value),
            rule=",".join(rule.value for rule in v.rules),
            detail=v.detail,
            remedy=v.remedy,
            score=v.score,
        )
        for v in verdicts
    )


def explanation_of(diagnosis: Diagnosis, *, subject: str, now_s: float) -> Explanation:
    """Return a diagnosis as it crosses the wire, with whole sentences."""
    placement, hold, pending = diagnosis.placement, diagnosis.hold, diagnosis.pending
    summary, remedy, waited_s = placement.summary, placement.remedy, 0.0
    if pending is not None:
        waited_s = max(0.0, now_s - pending.since_s)
        ahead = f"{diagnosis.position} ahead in the queue"
        summary += f"; it has waited {waited_s:.1f} s with {ahead}"
    if hold is not None:
        summary, remedy = f"{hold.text}; {summary}", hold.remedy
    if diagnosis.starting and pending is not None:
        summary = f"{diagnosis.starting}; {summary}"
    elif diagnosis.starting:
        summary, remedy = diagnosis.starting, "none needed: it starts when that is done"
    constraint, state = diagnosis.constraint, "QUEUED"
    phase = WaitPhase.QUEUE
    if constraint is not None and constraint.kind is Binding.STARTING:
        installs = "environment" in diagnosis.starting
        phase = WaitPhase.ENVIRONMENT if installs else WaitPhase.LEASE
    if placement.fit is NodeFit.NEVER or (hold is not None and hold.is_final):
        state = "INFEASIBLE"
    elif pending is None:
        state = "FITS" if placement.fit is NodeFit.FITS else "BUSY"
    return Explanation(
        subject=subject,
        state=state,
        summary=summary,
        remedy=remedy,
        waited_s=waited_s,
        queue_position=diagnosis.position,
        verdicts=verdicts_of(placement.verdicts),
        phase=phase,
        constraint=constraint_of(diagnosis),
        remedies=remedies_of(diagnosis),
        holders=tuple(map(holder_of, diagnosis.holders)),
    )


def constraint_of(diagnosis: Diagnosis) -> Constraint | None:
    """Return the binding constraint as it crosses the wire."""
    found = diagnosis.constraint
    if found is None:
        return None
    kind = ConstraintKind(found.kind.value)
    return Constraint(kind=kind, text=found.text, queue=found.queue, resource=found.resource)


def remedies_of(diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """Return the remedies as they cross the wire."""
    return tuple(
        Remedy(
            text=one.text,
            node_id=one.node_id,
            lease_ids=tuple(lease.lease_id for lease in one.leases),
        )
        for one in diagnosis.remedies
    )


def holder_of(lease: LeaseState) -> Holder:
    """Return a lease as one that holds what another wants."""
    until = "it was asked back" if lease.preempted else "its owner does not use it"
    if lease.phase is Phase.RELEASING:
        until = "it is ending"
    is_leaving = lease.preempted or lease.idle or lease.phase is Phase.RELEASING
    return Holder(
        lease_id=lease.lease_id,
        kind=lease.kind.value,
        job_id=lease.job_id,
        node_id=lease.node_id,
        resources=to_amounts(dict(lease.allocated)),
        gpus={index: units / UNIT for index, units in lease.gpus.items()},
        name=lease.name,
        actor_id=lease.actor_id,
        group_id=lease.group_id,
        queue=lease.account.queue,
        user=lease.account.user,
        priority=lease.priority,
        since_s=lease.granted_at_s,
        until=until if is_leaving else "",
    )


def planned_of(planned: Planned, diagnosis: Diagnosis | None) -> PlannedLease:
    """Return what would become of a request as it crosses the wire; ``diagnosis`` is of one that waits."""
    places, reason = planned.places, planned.reason
    constraint = constraint_of(diagnosis) if diagnosis is not None else None
    if planned.victims:
        count = len(planned.victims)
        leases = "1 lease is" if count == 1 else f"{count} leases are"
        reason = f"{leases} asked back for it, and must end first"
        constraint = Constraint(kind=ConstraintKind.PREEMPTION, text=reason)
    elif constraint is not None:
        reason = reason or constraint.text
    bundles = tuple(
        PlannedBundle(bundle=one.bundle, node_id=one.node_id, gpus=_gpus(one.gpus))
        for one in sorted(places, key=lambda one: one.bundle)
        if one.is_bundle
    )
    return PlannedLease(
        node_id=places[0].node_id if places else None,
        gpus=_gpus(places[0].gpus) if places and not bundles else {},
        verdicts=verdicts_of(planned.verdicts),
        outcome=PlanOutcome(planned.outcome.value),
        bundles=bundles,
        victims=tuple(
            msgspec.structs.replace(holder_of(one), until="it would be asked back")
            for one in planned.victims
        ),
        reason=reason,
        constraint=constraint,
        remedies=remedies_of(diagnosis) if diagnosis is not None else (),
    )


def _gpus(shares: Mapping[int, int]) -> dict[int, float]:
    return {index: units / UNIT for index, units in shares.items()}


def queue_explanation_of(standing: Standing, usage: QueueUsage, now_s: float) -> QueueExplanation:
    """Return the standing of a queue as it crosses the wire."""
    spec, holds = standing.spec, standing.holds
    limits = tuple(f"{hold.text}; {hold.remedy}" for hold in holds)
    return QueueExplanation(
        name=spec.name,
        usage=usage,
        quota=to_amounts(spec.quota),
        limit=to_amounts(spec.limit),
        borrowed=to_amounts(standing.borrowed),
        lent=to_amounts(standing.lent),
        stopped=spec.stopped,
        waiting=tuple(
            QueueWaiter(
                position=position,
                request_id=pending.request_id,
                job_id=pending.request.job_id,
                name=pending.request.name,
                user=pending.account.user,
                resources=to_amounts(pending.requirements.units),
                count=pending.wanted,
                priority=pending.request.priority,
                waited_s=max(0.0, now_s - pending.since_s),
                held=hold.text if hold is not None else "",
            )
            for position, (pending, hold) in enumerate(standing.waiting[:MAX_WAITERS])
        ),
        waiting_count=len(standing.waiting),
        limits=limits,
        summary=standing.text,
        remedy=holds[0].remedy if holds else "",
    )


def resources_of(state: State) -> ClusterResources:
    """Return total and available resources, over live nodes and per node."""
    nodes = {n: node for n, node in state.nodes.items() if node.spec.health is Health.ALIVE}
    available: dict[str, int] = {}
    for node in nodes.values():
        for name, units in node.available_units.items():
            available[name] = available.get(name, 0) + units
    return ClusterResources(
        total=to_amounts(state.capacity),
        available=to_amounts(available),
        nodes={n: to_amounts(node.spec.total_units) for n, node in nodes.items()},
        nodes_available={n: to_amounts(node.available_units) for n, node in nodes.items()},
    )


def usage_of(state: State) -> list[QueueUsage]:
    """Return what each queue that is known, with those below it, has and waits for."""
    tenants = state.tenants
    # A lease of nothing (0 CPUs) is in no account's usage, and its queue may have been removed since.
    waiting_ones = [pending.account for pending in state.pending.values()]
    accounts = (*state.usage, *waiting_ones, *(lease.account for lease in state.leases.values()))
    queues = dict.fromkeys(above for one in accounts for above in tenants.names_above(one.queue))
    used: dict[str, dict[str, int]] = {name: {} for name in (*tenants.names, *queues)}
    leases, waiting = dict.fromkeys(used, 0), dict.fromkeys(used, 0)
    for account, units in state.usage.items():
        for name in tenants.names_above(account.queue):
            add(used[name], units.items())
    for lease in state.leases.values():
        for name in tenants.names_above(lease.account.queue):
            leases[name] += 1
    wanting: dict[Account, None] = {}
    for pending in state.queue.pending():
        wanting[pending.account] = None
        waiting[pending.account.queue] += pending.wanted
    held = {
        account.queue: hold.text
        for holds in state.queue.held.values()
        for account, hold in holds.items()
    }
    entitled = tenants.entitlements({**state.usage, **wanting}).of_queue
    return [
        QueueUsage(
            name=name,
            used=to_amounts(units),
            share=dominant_share(units, state.capacity),
            entitled=entitled.get(name, 0.0),
            leases=leases[name],
            waiting=waiting[name],
            held=held.get(name, ""),
        )
        for name, units in used.items()
    ]


def queue_of(
    state: State, requests: Mapping[str, LeaseRequest | RequestBundles], at_s: float
) -> list[QueueEntry]:
    """Return the waiting requests in the order of the queue."""
    entries = []
    for position, pending in enumerate(sorted(state.queue.pending(), key=lambda one: one.rank)):
        request = requests[pending.request_id]
        group = request if isinstance(request, RequestBundles) else None
        entries.append(
            QueueEntry(
                request_id=pending.request_id,
                owner_id=pending.request.owner_id,
                job_id=pending.request.job_id,
                name=pending.request.name,
                resources=to_amounts(pending.requirements.units),
                count=pending.wanted,
                waiting_s=max(0.0, at_s - pending.since_s),
                position=position,
                infeasible=state.is_infeasible(pending),
                demand=request.demand if isinstance(request, LeaseRequest) else None,
                group_id=group.group_id if group else "",
            )
        )
    return entries
