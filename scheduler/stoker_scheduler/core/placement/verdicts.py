"""Verdicts: what each node says to requirements, by the rules and the score that place them.

For explanations. The machine places by ``ranking``, which caches the same rules and the same score (a
property test holds the two together).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    locality_gain,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """One node's answer: the rules it breaks (none if it fits), in words; a higher score wins.

    Of a node that fits, ``detail`` says what speaks for it, or against it.
    """

    node_id: str
    fit: NodeFit
    rules: tuple[Rule, ...] = ()
    detail: str = ""
    remedy: str = ""
    score: float | None = None
    lacks: str = ""
    """The first resource of which others have too much."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Requirements to place; ``locality`` is node id -> bytes of large arguments there.

    ``kernels`` is the kernel set that the work runs, or empty.
    """

    requirements: Requirements
    locality: Mapping[str, int] = field(default_factory=dict)
    kernels: str = ""


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
        words = NODE_ORDERS[requirements.policy].words(node, requirements, policy, request.kernels)
        text = joined(words, "; ")
        return NodeVerdict(node.node_id, NodeFit.FITS, detail=text, score=round(score, 6) + 0.0)
    # What never passes is the cause; what is busy besides would have to change as well.
    return NodeVerdict(
        node.node_id,
        broken[0].fit,
        tuple(o.rule for o in broken),
        joined([detail(o, node, requirements) for o in broken], "; "),
        joined([remedy(o, node, requirements) for o in broken], "; "),
        lacks=next((o.subject for o in broken if o.rule is Rule.AVAILABLE), ""),
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
