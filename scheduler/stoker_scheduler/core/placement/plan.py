"""Placement of several requests on a snapshot, tried and not done, with every node's verdict.

``POST /v1/plan`` and ``explain`` call this; the machine places through ``ranking``, which is the
same judge and the same score with a memory (a property test holds the two together).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.devices import Shares
from stoker_scheduler.core.model.requirements import Need
from stoker_scheduler.core.model.resources import joined
from stoker_scheduler.core.placement.feasibility import (
    Fit,
    Rule,
    detail,
    first_obstacle,
    obstacles,
    remedy,
)
from stoker_scheduler.core.placement.scoring import Key, ScorePolicy, is_warm, key, locality_gain

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import Node


@dataclass(frozen=True, slots=True)
class Verdict:
    """One node's answer: the rules it breaks (none if it fits), in words; a higher score wins.

    Of a node that fits, ``detail`` says what speaks for it besides its load.
    """

    node_id: str
    fit: Fit
    rules: tuple[Rule, ...] = ()
    detail: str = ""
    remedy: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A need to place; ``locality`` is node id -> bytes of large arguments there.

    ``kernels`` is the kernel set that the work runs, or empty.
    """

    need: Need
    locality: Mapping[str, int] = field(default_factory=dict)
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request would go (``node_id`` None: it would wait), and why not elsewhere."""

    node_id: str | None
    gpus: Shares
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One placement per request, in the order of the requests."""

    placements: tuple[Placement, ...]


def plan(snapshot: Iterable[Node], requests: Sequence[PlanRequest], policy: ScorePolicy) -> Plan:
    """Place ``requests`` one after the other on copies of the nodes; the snapshot is unchanged."""
    nodes = {node.node_id: node.copy() for node in snapshot}
    placements: list[Placement] = []
    for request in requests:
        verdicts = judge(nodes.values(), request, policy)
        node_id = choose(nodes.values(), request, policy)
        gpus: Shares = {}
        if node_id is not None:
            node = nodes[node_id]
            gpus = node.devices.choose(request.need.gpu) or {}
            node.take(request.need, gpus)
            node.leases[f"planned-{len(placements)}"] = None
            if request.need.spread:
                node.turn = 1 + max(other.turn for other in nodes.values())
        placements.append(Placement(node_id, gpus, verdicts))
    return Plan(tuple(placements))


def choose(nodes: Iterable[Node], request: PlanRequest, policy: ScorePolicy) -> str | None:
    """Return the best node that fits now, by a full scan, or None."""
    fitting = (node for node in nodes if first_obstacle(node, request.need) is None)
    best = min((_ordered(node, request, policy) for node in fitting), default=None)
    return None if best is None else best[2]


def judge(nodes: Iterable[Node], request: PlanRequest, policy: ScorePolicy) -> tuple[Verdict, ...]:
    """Return every node's verdict: those that fit first, best first; then busy ones; then never."""
    verdicts = [_verdict(node, request, policy) for node in nodes]
    rank = {Fit.FITS: 0, Fit.BUSY: 1, Fit.NEVER: 2}
    return tuple(sorted(verdicts, key=lambda v: (rank[v.fit], -(v.score or 0.0), v.node_id)))


def _verdict(node: Node, request: PlanRequest, policy: ScorePolicy) -> Verdict:
    need = request.need
    found = obstacles(node, need)
    if not found:
        score = -_ordered(node, request, policy)[0]
        warm = "it has compiled the kernels" if is_warm(node, request.kernels) else ""
        return Verdict(node.node_id, Fit.FITS, detail=warm, score=round(score, 6) + 0.0)
    # What never passes is the cause; what is busy besides would have to change as well.
    return Verdict(
        node.node_id,
        found[0].fit,
        tuple(o.rule for o in found),
        joined([detail(o, node, need) for o in found], "; "),
        joined([remedy(o, node, need) for o in found], "; "),
    )


def _ordered(node: Node, request: PlanRequest, policy: ScorePolicy) -> tuple[float, int, str]:
    cost, tie = key(node, request.need, policy, request.kernels)
    locality = {} if request.need.spread else request.locality
    return with_locality((cost, tie), node.node_id, locality)


def with_locality(base: Key, node_id: str, locality: Mapping[str, int]) -> tuple[float, int, str]:
    """Return the full sort key of a node: lowered cost, tie-break, node id."""
    gain = locality_gain(node_id, locality) if locality else 0.0
    return base[0] - gain, base[1], node_id
