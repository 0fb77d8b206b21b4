"""Dry-run placement of several requests on a snapshot of the nodes, with every node's verdict.

For ``POST /v1/plan`` and ``explain``. The machine places by ``ranking``, which caches the same rules and
the same score (a property test holds the two together).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import joined
from stoker_scheduler.core.placement.feasibility import (
    NodeFit,
    Rule,
    detail,
    first_obstacle,
    obstacles,
    remedy,
)
from stoker_scheduler.core.placement.scoring import (
    NODE_ORDERS,
    ScoreKey,
    ScorePolicy,
    is_warm,
    locality_gain,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """One node's answer: the rules it breaks (none if it fits), in words; a higher score wins.

    Of a node that fits, ``detail`` says what speaks for it besides its load.
    """

    node_id: str
    fit: NodeFit
    rules: tuple[Rule, ...] = ()
    detail: str = ""
    remedy: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Requirements to place; ``locality`` is node id -> bytes of large arguments there.

    ``kernels`` is the kernel set that the work runs, or empty.
    """

    requirements: Requirements
    locality: Mapping[str, int] = field(default_factory=dict)
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The node for a request (``node_id`` None: it would wait), and why no other."""

    node_id: str | None
    gpus: Shares
    verdicts: tuple[NodeVerdict, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One placement per request, in the order of the requests."""

    placements: tuple[Placement, ...]


def plan(
    snapshot: Iterable[NodeInfo], requests: Sequence[PlacementRequest], policy: ScorePolicy
) -> Plan:
    """Place ``requests`` one after the other on copies of the nodes; the snapshot is unchanged."""
    nodes = {node.node_id: node.copy() for node in snapshot}
    placements: list[Placement] = []
    for request in requests:
        verdicts = evaluate(nodes.values(), request, policy)
        node_id = choose(nodes.values(), request, policy)
        gpus: Shares = {}
        if node_id is not None:
            node = nodes[node_id]
            gpus = node.devices.choose(request.requirements.gpu) or {}
            node.allocate(request.requirements, gpus)
            node.leases[f"planned-{len(placements)}"] = None
            if NODE_ORDERS[request.requirements.policy].takes_turns:
                node.turn = 1 + max(other.turn for other in nodes.values())
        placements.append(Placement(node_id, gpus, verdicts))
    return Plan(tuple(placements))


def choose(nodes: Iterable[NodeInfo], request: PlacementRequest, policy: ScorePolicy) -> str | None:
    """Return the best node that fits now, by a full scan, or None."""
    fitting = (node for node in nodes if first_obstacle(node, request.requirements) is None)
    best = min((_sort_key(node, request, policy) for node in fitting), default=None)
    return None if best is None else best[2]


def evaluate(
    nodes: Iterable[NodeInfo], request: PlacementRequest, policy: ScorePolicy
) -> tuple[NodeVerdict, ...]:
    """Return every node's verdict: those that fit first, best first; then busy ones; then never."""
    verdicts = [_verdict(node, request, policy) for node in nodes]
    rank = {NodeFit.FITS: 0, NodeFit.BUSY: 1, NodeFit.NEVER: 2}
    return tuple(sorted(verdicts, key=lambda v: (rank[v.fit], -(v.score or 0.0), v.node_id)))


def _verdict(node: NodeInfo, request: PlacementRequest, policy: ScorePolicy) -> NodeVerdict:
    requirements = request.requirements
    broken = obstacles(node, requirements)
    if not broken:
        score = -_sort_key(node, request, policy)[0]
        warm = "it has compiled the kernels" if is_warm(node, request.kernels) else ""
        return NodeVerdict(node.node_id, NodeFit.FITS, detail=warm, score=round(score, 6) + 0.0)
    # What never passes is the cause; what is busy besides would have to change as well.
    return NodeVerdict(
        node.node_id,
        broken[0].fit,
        tuple(o.rule for o in broken),
        joined([detail(o, node, requirements) for o in broken], "; "),
        joined([remedy(o, node, requirements) for o in broken], "; "),
    )


def _sort_key(
    node: NodeInfo, request: PlacementRequest, policy: ScorePolicy
) -> tuple[float, int, str]:
    order = NODE_ORDERS[request.requirements.policy]
    key = order.score_key(node, request.requirements, policy, request.kernels)
    return with_locality(key, node.node_id, request.locality if order.uses_locality else {})


def with_locality(
    base: ScoreKey, node_id: str, locality: Mapping[str, int]
) -> tuple[float, int, str]:
    """Return the full sort key of a node: lowered cost, tie-break, node id."""
    gain = locality_gain(node_id, locality) if locality else 0.0
    return base[0] - gain, base[1], node_id
