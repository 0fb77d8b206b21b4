"""Feasibility: the rules by which a node takes a lease's requirements, or why it does not.

:data:`RULES` are the only judge. The ranking asks for the first obstacle, ``plan`` and ``explain`` print
all of them with their numbers and remedies, so an explanation can never differ from the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.nodes import Health, NodeInfo
from stoker_scheduler.core.model.resources import GPU, GPU_MEMORY, UNIT, amount_text, joined
from stoker_scheduler.core.model.taints import FORBIDDING, Taint, untolerated

if TYPE_CHECKING:
    from stoker_scheduler.core.model.devices import Devices
    from stoker_scheduler.core.model.gangs import Gang
    from stoker_scheduler.core.model.groups import PlacementGroup
    from stoker_scheduler.core.model.node_filters import NodeFilter
    from stoker_scheduler.core.model.requirements import Requirements


class NodeFit(StrEnum):
    """The answer of a node to requirements; the values are those of the wire."""

    FITS = "fits"
    BUSY = "busy"
    NEVER = "never"


class Rule(StrEnum):
    """The rules that a node can break; the values are those of the wire."""

    AFFINITY = "node_affinity"
    LABEL = "label_selector"
    FILTER = "node_filter"
    FILTER_NOW = "node_filter_now"
    """The node filter holds on the node at another time."""
    EXTENDER = "extender"
    EXTENDER_PENDING = "extender_pending"
    """No extender has been asked about the node yet."""
    TOTAL = "insufficient_total"
    STATE = "node_state"
    CORDON = "node_cordoned"
    TAINT = "node_taint"
    PRESSURE = "node_pressure"
    BACKOFF = "node_refused"
    RESERVED = "node_reserved"
    AVAILABLE = "insufficient_available"


NEVER_RULES = frozenset({Rule.AFFINITY, Rule.LABEL, Rule.FILTER, Rule.TOTAL})
"""Rules that stay broken whatever lease ends."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One broken rule; ``subject`` is the resource or label that it is about."""

    rule: Rule
    subject: str = ""

    @property
    def fit(self) -> NodeFit:
        """BUSY if time can remove the obstacle, else NEVER."""
        return NodeFit.NEVER if self.rule in NEVER_RULES else NodeFit.BUSY


_NONE: tuple[Obstacle, ...] = ()
_AFFINITY = (Obstacle(Rule.AFFINITY),)
_FILTER = (Obstacle(Rule.FILTER),)
_FILTER_NOW = (Obstacle(Rule.FILTER_NOW),)
_EXTENDER = (Obstacle(Rule.EXTENDER),)
_EXTENDER_PENDING = (Obstacle(Rule.EXTENDER_PENDING),)
_STATE = (Obstacle(Rule.STATE),)
_CORDON = (Obstacle(Rule.CORDON),)
_TAINT = (Obstacle(Rule.TAINT),)
_PRESSURE = (Obstacle(Rule.PRESSURE),)
_BACKOFF = (Obstacle(Rule.BACKOFF),)
_RESERVED = (Obstacle(Rule.RESERVED),)
_AVAILABLE_GPU = (Obstacle(Rule.AVAILABLE, GPU),)
_TOTAL_GPU = (Obstacle(Rule.TOTAL, GPU),)


# Made once per name: a busy cluster breaks the same rules again and again.


@lru_cache(maxsize=4096)
def _wrong_label(label: str) -> Obstacle:
    return Obstacle(Rule.LABEL, label)


@lru_cache(maxsize=4096)
def _too_small(resource: str) -> Obstacle:
    return Obstacle(Rule.TOTAL, resource)


@lru_cache(maxsize=4096)
def _unavailable(resource: str) -> Obstacle:
    return Obstacle(Rule.AVAILABLE, resource)


Check = Callable[[NodeInfo, "Requirements"], Sequence[Obstacle]]
"""A rule as a function: the obstacles that it finds, none if it holds."""


def check_state(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require a node that is ALIVE."""
    return _NONE if node.spec.health is Health.ALIVE else _STATE


def check_affinity(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require the node to which the lease is pinned; a soft affinity is a matter of scoring."""
    wanted = requirements.node_id
    if wanted is None or requirements.soft or wanted == node.spec.node_id:
        return _NONE
    return _AFFINITY


def check_labels(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that each term of the label selector holds."""
    labels = node.spec.labels
    return [_wrong_label(t.label) for t in requirements.terms if not t.holds(labels)]


def check_node_filters(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that each node filter holds."""
    if all(one.holds(node) for one in requirements.node_filters):
        return _NONE
    return _FILTER_NOW if may_pass(node, requirements) else _FILTER


def check_extenders(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that the extenders admit the node."""
    if not requirements.extenders:
        return _NONE
    answer = node.answers.get(requirements)
    if answer is None:
        return _EXTENDER_PENDING
    if node.node_id in answer.gains:
        return _NONE
    return _EXTENDER if node.node_id in answer.refusals else _EXTENDER_PENDING


def check_may_pass(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that each node filter could hold; for nodes that are taken to be idle."""
    return _NONE if may_pass(node, requirements) else _FILTER


def may_pass(node: NodeInfo, requirements: Requirements) -> bool:
    """Return whether each node filter holds, or could when other work ends or starts."""
    return all(one.may_hold(node) for one in requirements.node_filters)


def check_resources(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require the amount of every resource but GPUs."""
    available = node.available
    for name, count in requirements.items:
        if available.get(name, 0) < count:
            break
    else:
        return _NONE
    total = node.spec.total
    return [
        _too_small(name) if total.get(name, 0) < count else _unavailable(name)
        for name, count in requirements.items
        if available.get(name, 0) < count
    ]


def check_gpus(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require a part of one GPU, or wholly free ones."""
    gpu, nbytes = requirements.gpu, requirements.gpu_memory
    if not requirements.needs_gpu or node.devices.can_serve(gpu, nbytes):
        return _NONE
    return _AVAILABLE_GPU if node.devices.can_ever_serve(gpu, nbytes) else _TOTAL_GPU


def check_open(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that the node takes new work: no cordon, taint, pressure or backoff; name one of these."""
    if node.spec.closed:
        if node.spec.cordon:
            return _CORDON
        if _forbidding(node, requirements):
            return _TAINT
        if node.spec.pressure:
            return _PRESSURE
    if node.backoffs and node.backoff(requirements.env) is not None:
        return _BACKOFF
    return _NONE


def _forbidding(node: NodeInfo, requirements: Requirements) -> tuple[Taint, ...]:
    return untolerated(node.spec.taints, requirements.tolerations, FORBIDDING)


def check_reserved(node: NodeInfo, requirements: Requirements) -> Sequence[Obstacle]:
    """Require that nothing of what is asked for is reserved for others."""
    if node.reserved_for is None or not is_reserved(node, requirements, requirements.names):
        return _NONE
    return _RESERVED


def is_reserved(node: NodeInfo, claimant: Requirements | Gang, names: frozenset[str]) -> bool:
    """Return whether some of ``names`` on the node is reserved for another than ``claimant``."""
    return (
        node.reserved_for is not None
        and bool(node.reserved_names & names)
        and node.reserved_for != claimant
    )


RULES: tuple[Check, ...] = (
    check_state,
    check_affinity,
    check_labels,
    check_node_filters,
    check_extenders,
    check_resources,
    check_gpus,
    check_open,
    check_reserved,
)


RESOURCE_RULES: tuple[Check, ...] = (check_resources, check_gpus)
"""Those that depend on what leases have; for nodes that hold the others."""


def rules_for(requirements: Requirements) -> tuple[Check, ...]:
    """Return the rules that ``requirements`` can break, in order; the others hold on every node."""
    moot = set()
    if requirements.node_id is None or requirements.soft:
        moot.add(check_affinity)
    if not requirements.terms:
        moot.add(check_labels)
    if not requirements.node_filters:
        moot.add(check_node_filters)
    if not requirements.extenders:
        moot.add(check_extenders)
    if not requirements.items:
        moot.add(check_resources)
    if not requirements.needs_gpu:
        moot.add(check_gpus)
    return tuple(check for check in RULES if check not in moot)


def idle_rules_for(requirements: Requirements) -> tuple[Check, ...]:
    """Return the rules for nodes that are taken to be idle: what passes by itself is no obstacle."""
    return tuple(
        check_may_pass if rule is check_node_filters else rule
        for rule in rules_for(requirements)
        if rule is not check_extenders
    )


def first_obstacle(
    node: NodeInfo, requirements: Requirements, rules: tuple[Check, ...] = RULES
) -> Obstacle | None:
    """Return the first obstacle on ``node``, or None if the requirements fit there now.

    A caller that looks at many nodes passes :func:`rules_for` the requirements.
    """
    for check in rules:
        broken = check(node, requirements)
        if broken:
            return broken[0]
    return None


def obstacles(node: NodeInfo, requirements: Requirements) -> tuple[Obstacle, ...]:
    """Return all obstacles on ``node``, those that never pass first."""
    broken = [obstacle for check in RULES for obstacle in check(node, requirements)]
    return tuple(sorted(broken, key=lambda obstacle: obstacle.fit is not NodeFit.NEVER))


def could_ever_fit(node: NodeInfo, requirements: Requirements) -> bool:
    """Return whether the requirements would fit if the node were idle and healthy."""
    spec = node.spec
    if (
        requirements.node_id is not None
        and not requirements.soft
        and requirements.node_id != spec.node_id
    ):
        return False
    return (
        all(term.holds(spec.labels) for term in requirements.terms)
        and all(spec.total.get(name, 0) >= count for name, count in requirements.items)
        and may_pass(node, requirements)
        and node.devices.can_ever_serve(requirements.gpu, requirements.gpu_memory)
        and spec.health is not Health.DEAD
    )


def could_be_in_bundle(group: PlacementGroup, requirements: Requirements) -> bool:
    """Return whether the requirements would fit in a bundle of the group if it were placed and empty."""
    return any(
        all(bundle.amount(name) >= count for name, count in requirements.items)
        and bundle.gpu >= requirements.gpu
        and (bundle.gpu or bundle.gpu_memory >= requirements.gpu_memory)
        for bundle in group.wanted_bundles(requirements)
    )


def detail(obstacle: Obstacle, node: NodeInfo, requirements: Requirements) -> str:
    """Return in words what is wrong, with the numbers."""
    subject, spec = obstacle.subject, node.spec
    match obstacle.rule:
        case Rule.STATE:
            return f"the node is {spec.health.value}" + (f": {spec.reason}" if spec.reason else "")
        case Rule.AFFINITY:
            return f"the demand is pinned to node {requirements.node_id}"
        case Rule.LABEL:
            term = requirements.term(subject)
            return f"label_selector needs {term.text}, the node has {_label(node, subject)}"
        case Rule.FILTER | Rule.FILTER_NOW:
            return joined([one.why_not(node) for one in _not_passed(node, requirements)], "; ")
        case Rule.EXTENDER:
            return node.answers[requirements].refusals[node.node_id]
        case Rule.EXTENDER_PENDING:
            return f"waits for extender {joined(requirements.extenders)}"
        case Rule.TOTAL:
            return f"needs {_wanted(requirements, subject)}, the node has {_has(node, requirements, subject)}"
        case Rule.AVAILABLE:
            return f"needs {_wanted(requirements, subject)}, {_free(node, requirements, subject)}"
        case Rule.CORDON:
            return f"the node is {spec.cordon}"
        case Rule.TAINT:
            taints = joined([taint.text for taint in _forbidding(node, requirements)])
            return f"the node has the taint {taints}, which is not tolerated"
        case Rule.PRESSURE:
            return f"the node takes no new work: {spec.pressure}"
        case Rule.BACKOFF:
            backoff = node.backoff(requirements.env)
            assert backoff is not None
            return (
                f"the nodelet did not start the last lease and is tried again soon: {backoff.cause}"
            )
        case Rule.RESERVED:
            names = ", ".join(sorted(node.reserved_names))
            return f"its {names} is reserved for a larger demand that has waited long"


def remedy(obstacle: Obstacle, node: NodeInfo, requirements: Requirements) -> str:
    """Return in words what would have to change for this rule to hold."""
    subject, spec = obstacle.subject, node.spec
    match obstacle.rule:
        case Rule.STATE if spec.health is Health.SUSPECT:
            return "the node's heartbeats must arrive again"
        case Rule.STATE:
            return "the node must be started again"
        case Rule.AFFINITY:
            return "choose this node, or make the affinity soft"
        case Rule.LABEL:
            term = requirements.term(subject)
            return f"start the node with a label so that {term.text} holds, or change the selector"
        case Rule.FILTER | Rule.FILTER_NOW:
            texts = joined([one.text for one in _not_passed(node, requirements)], " AND ")
            return f"{_FILTER_REMEDIES[obstacle.rule]} {texts} holds, or change node_filter"
        case Rule.EXTENDER:
            return "the extender must admit the node; it is asked again soon"
        case Rule.EXTENDER_PENDING:
            return "none needed: the extender answers, or its httpTimeout passes"
        case Rule.TOTAL:
            return f"start the node with at least {_wanted(requirements, subject)}, or ask for less {subject}"
        case Rule.AVAILABLE:
            free = f"{_wanted(requirements, subject)} is free{_pieces(requirements, subject)}"
            return f"leases on the node must end until {free}{_put_back(node, subject)}"
        case Rule.CORDON:
            return f"open the node again: stoker node uncordon {spec.node_id}"
        case Rule.TAINT:
            return "give the work a toleration of it, or remove it with stoker node taint"
        case Rule.PRESSURE:
            return "work on the node must end, or others must free what they have (docs/memory.md)"
        case Rule.BACKOFF:
            return "none needed: the nodelet is tried again after a backoff; its log has the cause"
        case Rule.RESERVED:
            return "the larger demand must start or leave first"


_FILTER_REMEDIES = {
    Rule.FILTER: "start a node on which",
    Rule.FILTER_NOW: "other work on the node must end, or start, until",
}


def _put_back(node: NodeInfo, name: str) -> str:
    if name != GPU or not node.devices.quarantined:
        return ""
    return ", or a quarantined GPU must come back (docs/gpus.md)"


def _not_passed(node: NodeInfo, requirements: Requirements) -> list[NodeFilter]:
    return [one for one in requirements.node_filters if not one.holds(node)]


def _has(node: NodeInfo, requirements: Requirements, name: str) -> str:
    if name != GPU:
        return f"{amount_text(name, node.spec.total.get(name, 0))} in all"
    if requirements.gpu > UNIT and node.devices.only_slices:
        return "only MIG slices, of which a program can use one"
    if not requirements.gpu_memory:
        return f"{amount_text(name, node.devices.total_units)} in all"
    most = max(node.devices.memory.values(), default=0)
    if node.devices.indices and not most:
        return "GPUs whose memory is not known"
    return f"at most {amount_text(GPU_MEMORY, most)} on one device"


def _wanted(requirements: Requirements, name: str) -> str:
    if name == GPU and requirements.gpu_memory:
        return amount_text(GPU_MEMORY, requirements.gpu_memory)
    return amount_text(name, requirements.gpu if name == GPU else requirements.amount(name))


def _pieces(requirements: Requirements, name: str) -> str:
    if name != GPU:
        return ""
    is_part = requirements.gpu_memory or requirements.gpu < UNIT
    return " on one device" if is_part else " as wholly free devices"


def _free(node: NodeInfo, requirements: Requirements, name: str) -> str:
    if name != GPU:
        free, total = node.available.get(name, 0), node.spec.total.get(name, 0)
        return f"{amount_text(name, free)} of {amount_text(name, total)} is free"
    return _free_gpus(node.devices, requirements) + "".join(
        f"; GPU {index} of {node.node_id} is quarantined: {why}"
        for index, why in node.devices.quarantined.items()
    )


def _free_gpus(devices: Devices, requirements: Requirements) -> str:
    if requirements.gpu_memory:
        return (
            f"at most {amount_text(GPU_MEMORY, devices.largest_free_bytes)} is free on one device"
        )
    if requirements.gpu < UNIT:
        return f"at most {amount_text(GPU, devices.largest_free)} is free on one device"
    return f"{devices.wholly_free} of {devices.wholes} devices are wholly free"


def _label(node: NodeInfo, label: str) -> str:
    value = node.spec.labels.get(label)
    return f"no label {label}" if value is None else f"{label}={value}"
