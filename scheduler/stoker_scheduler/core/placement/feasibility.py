"""May this node take this need: named rules, each with numbers and with what would have to change.

:func:`obstacles` is the only judge. The ranking asks it for the first obstacle, ``plan`` and
``explain`` print all of them, so an explanation can never differ from the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.nodes import Health, Node
from stoker_scheduler.core.model.resources import GPU, UNIT, amount_text

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Need


class Fit(StrEnum):
    """A node's answer to a need; the values are those of the wire."""

    FITS = "fits"
    BUSY = "busy"
    NEVER = "never"


class Rule(StrEnum):
    """Why a node does not take a need."""

    AFFINITY = "node_affinity"
    LABEL = "label_selector"
    TOTAL = "insufficient_total"
    STATE = "node_state"
    DRAINING = "node_draining"
    REFUSED = "node_refused"
    RESERVED = "node_reserved"
    AVAILABLE = "insufficient_available"


NEVER_RULES = frozenset({Rule.AFFINITY, Rule.LABEL, Rule.TOTAL})
"""Rules that no lease's end can change."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One broken rule; ``subject`` is the resource or label that it is about."""

    rule: Rule
    subject: str = ""

    @property
    def fit(self) -> Fit:
        """Whether time can remove the obstacle."""
        return Fit.NEVER if self.rule in NEVER_RULES else Fit.BUSY


_AFFINITY = Obstacle(Rule.AFFINITY)
_STATE = Obstacle(Rule.STATE)
_DRAINING = Obstacle(Rule.DRAINING)
_REFUSED = Obstacle(Rule.REFUSED)
_RESERVED = Obstacle(Rule.RESERVED)


def first_obstacle(node: Node, need: Need) -> Obstacle | None:
    """Return the first rule that ``node`` breaks, or None if the need fits there now."""
    found: list[Obstacle] = []
    _judge(node, need, found, first_only=True)
    return found[0] if found else None


def obstacles(node: Node, need: Need) -> tuple[Obstacle, ...]:
    """Return all rules that ``node`` breaks, those that never pass first."""
    found: list[Obstacle] = []
    _judge(node, need, found, first_only=False)
    return tuple(sorted(found, key=lambda o: o.fit is not Fit.NEVER))


def could_ever_fit(node: Node, need: Need) -> bool:
    """Whether the need would fit if the node were idle and healthy."""
    spec = node.spec
    if need.node_id is not None and not need.soft and need.node_id != spec.node_id:
        return False
    return (
        all(term.holds(spec.labels) for term in need.terms)
        and all(spec.total.get(name, 0) >= count for name, count in need.items)
        and need.gpu <= UNIT * len(spec.gpus)
        and spec.health is not Health.DEAD
    )


def _judge(node: Node, need: Need, found: list[Obstacle], *, first_only: bool) -> None:
    spec = node.spec
    if spec.health is not Health.ALIVE:
        found.append(_STATE)
        if first_only:
            return
    if need.node_id is not None and not need.soft and need.node_id != spec.node_id:
        found.append(_AFFINITY)
        if first_only:
            return
    for term in need.terms:
        if not term.holds(spec.labels):
            found.append(Obstacle(Rule.LABEL, term.label))
            if first_only:
                return
    available = node.available
    for name, count in need.items:
        if available.get(name, 0) < count:
            rule = Rule.TOTAL if spec.total.get(name, 0) < count else Rule.AVAILABLE
            found.append(Obstacle(rule, name))
            if first_only:
                return
    if need.gpu and node.devices.choose(need.gpu) is None:
        rule = Rule.AVAILABLE if node.devices.can_ever_serve(need.gpu) else Rule.TOTAL
        found.append(Obstacle(rule, GPU))
        if first_only:
            return
    if spec.draining:
        found.append(_DRAINING)
    elif node.refusals and node.refused(need.env) is not None:
        found.append(_REFUSED)
    elif (
        node.reserved_for is not None
        and node.reserved_names & need.names
        and node.reserved_for != need
    ):
        found.append(_RESERVED)


def detail(obstacle: Obstacle, node: Node, need: Need) -> str:
    """Say what is wrong, with the numbers."""
    subject, spec = obstacle.subject, node.spec
    match obstacle.rule:
        case Rule.STATE:
            return f"the node is {spec.health.value}" + (f": {spec.reason}" if spec.reason else "")
        case Rule.AFFINITY:
            return f"the demand is pinned to node {need.node_id}"
        case Rule.LABEL:
            term = need.term(subject)
            return f"label_selector needs {term.text}, the node has {_label(node, subject)}"
        case Rule.TOTAL:
            has = len(spec.gpus) * UNIT if subject == GPU else spec.total.get(subject, 0)
            return f"needs {_asked(need, subject)}, the node has {amount_text(subject, has)} in all"
        case Rule.AVAILABLE:
            return f"needs {_asked(need, subject)}, {_free(node, need, subject)}"
        case Rule.DRAINING:
            return "the node is draining: it takes no new work"
        case Rule.REFUSED:
            refused = node.refused(need.env)
            assert refused is not None
            return f"the nodelet refused the last lease and is asked again soon: {refused.because}"
        case Rule.RESERVED:
            names = ", ".join(sorted(node.reserved_names))
            return f"its {names} is kept for a larger demand that has waited long"


def remedy(obstacle: Obstacle, node: Node, need: Need) -> str:
    """Say what would have to change for this rule to hold."""
    subject, spec = obstacle.subject, node.spec
    match obstacle.rule:
        case Rule.STATE if spec.health is Health.SUSPECT:
            return "the node's heartbeats must arrive again"
        case Rule.STATE:
            return "the node must be started again"
        case Rule.AFFINITY:
            return "choose this node, or make the affinity soft"
        case Rule.LABEL:
            term = need.term(subject)
            return f"start the node with a label so that {term.text} holds, or change the selector"
        case Rule.TOTAL:
            return (
                f"start the node with at least {_asked(need, subject)}, or ask for less {subject}"
            )
        case Rule.AVAILABLE:
            free = f"{_asked(need, subject)} is free{_pieces(need, subject)}"
            return f"leases on the node must end until {free}"
        case Rule.DRAINING:
            return "stop draining the node"
        case Rule.REFUSED:
            return "nothing: the nodelet is tried again by itself; its log has the cause"
        case Rule.RESERVED:
            return "the larger demand must start or leave first"


def _asked(need: Need, name: str) -> str:
    return amount_text(name, need.gpu if name == GPU else need.amount(name))


def _pieces(need: Need, name: str) -> str:
    if name != GPU:
        return ""
    return " on one device" if need.gpu < UNIT else " as wholly free devices"


def _free(node: Node, need: Need, name: str) -> str:
    if name != GPU:
        free, total = node.available.get(name, 0), node.spec.total.get(name, 0)
        return f"{amount_text(name, free)} of {amount_text(name, total)} is free"
    devices = node.devices
    if need.gpu < UNIT:
        return f"at most {amount_text(GPU, devices.largest_free)} is free on one device"
    return f"{devices.wholly_free} of {len(devices.indices)} devices are wholly free"


def _label(node: Node, label: str) -> str:
    value = node.spec.labels.get(label)
    return f"no label {label}" if value is None else f"{label}={value}"
