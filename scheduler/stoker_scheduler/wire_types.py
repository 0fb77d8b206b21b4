"""Conversions between the wire's messages and the core's own types; nothing here decides.

The core imports no messages, so that its tests and simulations need none of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core.events import Kind, LeaseRequested
from stoker_scheduler.core.model.labels import Term
from stoker_scheduler.core.model.nodes import Health, NodeSpec, make_node_spec
from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError, to_amounts
from stoker_wire.errors import BadRequestError
from stoker_wire.label_selectors import parse_value
from stoker_wire.messages.cluster import (
    ClusterResources,
    Demand,
    Lease,
    LeaseKind,
    LeaseRequest,
    Node,
)
from stoker_wire.messages.common import OnInfeasible, RuntimeEnv, SpreadPolicy
from stoker_wire.messages.control import Fit, QueueEntry, Verdict
from stoker_wire.messages.kernels import kernel_set

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.placement.plan import NodeVerdict
    from stoker_scheduler.core.state import State

_POLICIES = {
    SpreadPolicy.HYBRID: PlacementPolicy.HYBRID,
    SpreadPolicy.SPREAD: PlacementPolicy.SPREAD,
}
_NO_ENV = RuntimeEnv()
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def requirements_of(demand: Demand, at: str = "demand.") -> Requirements:
    """Return the requirements of ``demand``; raise BadRequestError for one that makes no sense.

    ``at`` is where the demand is in the request, for the error's field.
    """
    strategy = demand.strategy
    try:
        return make_requirements(
            demand.resources,
            terms=terms_of(demand.label_selector),
            node_id=strategy.node_id,
            soft=strategy.soft,
            policy=_POLICIES[strategy.policy],
            env=_env_name(demand.runtime_env),
        )
    except InvalidDemandError as error:
        raise BadRequestError(str(error), field=f"{at}{error.field}") from None


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


def setup_of(env: RuntimeEnv) -> str:
    """Return in words what a node installs for ``env`` before a worker can start."""
    parts = []
    if env.working_dir or env.py_modules:
        parts.append("packages")
    if env.pip:
        more = f" and {len(env.pip) - 3} more" if len(env.pip) > 3 else ""
        parts.append(f"pip ({', '.join(env.pip[:3])}{more})")
    if env.kernels:
        parts.append("kernels")
    return ", ".join(parts)


def class_key(request: LeaseRequest) -> str:
    """Return the scheduling class: equal for requests whose leases may serve each other."""
    demand = request.demand
    actor, driver = request.actor, request.driver
    start = (actor.actor_id, actor.incarnation) if actor else (driver.job_id,) if driver else ()
    parts = (
        demand.job_id,
        demand.kind,
        demand.resources,
        demand.label_selector,
        demand.strategy,
        demand.priority,
        demand.runtime_env,
        start,
    )
    return _encode(parts).hex()


def request_event(request: LeaseRequest, *, at_s: float, wait_s: float) -> LeaseRequested:
    """Return the event of a request that arrives now; raise BadRequestError for a senseless demand."""
    demand = request.demand
    return LeaseRequested(
        at_s=at_s,
        request_id=request.request_id,
        owner_id=request.owner_id,
        job_id=demand.job_id,
        requirements=requirements_of(demand),
        class_key=class_key(request),
        count=request.count,
        deadline_s=at_s + wait_s,
        kind=Kind(demand.kind.value),
        priority=demand.priority,
        wait_if_infeasible=demand.on_infeasible is OnInfeasible.WAIT,
        locality=demand.locality,
        name=demand.name,
        actor_id=request.actor.actor_id if request.actor else "",
        kernels=kernel_set(demand.runtime_env),
        setup=setup_of(demand.runtime_env),
    )


def spec_of(node: Node) -> NodeSpec:
    """Return the core's spec of a node of the gcs."""
    return make_node_spec(
        node.node_id,
        node.resources,
        incarnation=node.incarnation,
        device_indices=tuple(device.index for device in node.devices),
        labels=node.labels,
        health=Health(node.state.value),
        reason=node.reason,
        warm=node.warm_kernels,
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


def queue_of(state: State, requests: Mapping[str, LeaseRequest], at_s: float) -> list[QueueEntry]:
    """Return the waiting requests in the order of the queue."""
    ordered = sorted(state.queue.pending(), key=lambda pending: pending.rank)
    return [
        QueueEntry(
            request_id=pending.request_id,
            owner_id=pending.request.owner_id,
            job_id=pending.request.job_id,
            name=pending.request.name,
            resources=to_amounts(pending.requirements.units),
            count=pending.wanted,
            waiting_s=max(0.0, at_s - pending.since_s),
            position=position,
            infeasible=pending.infeasible,
            demand=requests[pending.request_id].demand,
        )
        for position, pending in enumerate(ordered)
    ]
