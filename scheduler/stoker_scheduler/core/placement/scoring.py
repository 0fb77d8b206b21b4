"""Scores of the nodes that fit: a cost, lower is better, and a tie-break that never moves.

Hybrid: nodes are filled one after the other until the scarcest resource of the demand passes a
threshold, then the least loaded is used; work without GPUs avoids nodes that have some; large
arguments pull work to the node that stores them, and compiled kernels to the node that has them.
Spread: nodes below the threshold take turns, then the least loaded is used; arguments and kernels pull
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements

GPU_NODE_COST = 2.0
"""Beats any utilisation: an overloaded CPU node is still better than a GPU node for CPU work."""
LOCALITY_GAIN = 3.0
"""Times the share of the argument bytes on the node; beats the GPU cost when most of them are there."""
LOCALITY_FLOOR_BYTES = 1 << 20
"""Less than this is fetched faster than a decision pays."""
PREFERRED_GAIN = 10.0
WARM_GAIN = 0.5
"""For a node that has compiled the kernels asked for. It decides among nodes below the default packing
threshold and among equally loaded ones; a node that would pass the threshold gains nothing by it over
one that would not."""

ScoreKey = tuple[float, int]
"""Cost, then the node's turn (spread) or its leases where that matters; the node id breaks what is left."""


@dataclass(frozen=True, slots=True)
class ScorePolicy:
    """``pack_threshold`` is the utilisation up to which nodes are filled in order."""

    pack_threshold: float = 0.5


def utilisation(node: NodeInfo, requirements: Requirements) -> float:
    """Return the scarcest demanded resource's utilisation if ``requirements`` were placed there."""
    worst, total, available = 0.0, node.spec.total, node.available
    for name, count in requirements.items:
        has = total.get(name, 0)
        if has:
            used = (has - available.get(name, 0) + count) / has
            if used > worst:
                worst = used
    if requirements.gpu and node.spec.gpus:
        has = node.devices.total_units
        worst = max(worst, (has - node.devices.free_units + requirements.gpu) / has)
    return worst


def score_key(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str = ""
) -> ScoreKey:
    """Return how good ``node`` is for ``requirements`` with ``kernels``, before locality; lower is better."""
    load = utilisation(node, requirements)
    cost = load if load > policy.pack_threshold else 0.0
    if not requirements.gpu and node.spec.gpus:
        cost += GPU_NODE_COST
    if requirements.soft and requirements.node_id == node.spec.node_id:
        cost -= PREFERRED_GAIN
    if kernels and not requirements.spread and is_warm(node, kernels):
        cost -= WARM_GAIN
    if requirements.spread:
        return cost, node.spread_turn
    # Without resources nothing tells nodes apart, and all such leases would pile up on one.
    return cost, 0 if requirements.items or requirements.gpu else len(node.leases)


def is_warm(node: NodeInfo, kernels: str) -> bool:
    """Return whether ``node`` has compiled the kernel set ``kernels``."""
    return bool(kernels) and kernels in node.spec.warm


def locality_gain(node_id: str, locality: Mapping[str, int]) -> float:
    """Return how much the arguments on ``node_id`` lower its cost."""
    here = locality.get(node_id, 0)
    if here < LOCALITY_FLOOR_BYTES:
        return 0.0
    return LOCALITY_GAIN * here / sum(locality.values())
