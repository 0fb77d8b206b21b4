"""Scores of the nodes that fit: a cost, lower is better, and a tie-break that never moves.

Hybrid: nodes are filled one after the other until the scarcest resource of the demand passes a
threshold, then the least loaded is used; work without GPUs avoids nodes that have some; large
arguments pull work to the node that stores them, and compiled kernels to the node that has them.
Spread: nodes below the threshold take turns, then the least loaded is used; arguments and kernels pull
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.requirements import PlacementPolicy, Requirements
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.model.topology import FARTHEST, NEAREST

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

TOPOLOGY_GAIN = 1.0
"""For a node that would give GPUs which are all joined by NVLink; in part for those that are less near.
It beats any utilisation: a set of GPUs is as fast as its slowest path. Nothing where paths are not known."""

ScoreKey = tuple[float, int]
"""Cost, then the node's turn (spread) or its leases where that matters; the node id breaks what is left."""


@dataclass(frozen=True, slots=True)
class ScorePolicy:
    """``pack_threshold`` is the utilisation up to which nodes are filled in order."""

    pack_threshold: float = 0.5


def base_cost(node: NodeInfo, requirements: Requirements, policy: ScorePolicy) -> float:
    """Return the cost that counts under every policy.

    It is the utilisation, above the threshold, of the scarcest demanded resource if ``requirements``
    were placed there; a price for taking a GPU node without need; gains for the preferred node, and
    those that extenders give.
    """
    load, total, available = 0.0, node.spec.total, node.available
    for name, count in requirements.items:
        has = total.get(name, 0)
        if has:
            used = (has - available.get(name, 0) + count) / has
            if used > load:
                load = used
    cost = 0.0
    if node.spec.gpus:
        if requirements.needs_gpu:
            devices, has = node.devices, node.devices.total_units
            taken = devices.typical_units(requirements.gpu, requirements.gpu_memory)
            load = max(load, (has - devices.free_units + taken) / has)
        else:
            cost = GPU_NODE_COST
    if load > policy.pack_threshold:
        cost += load
    if requirements.soft and requirements.node_id == node.spec.node_id:
        cost -= PREFERRED_GAIN
    if requirements.extenders:
        answer = node.answers.get(requirements)
        cost -= answer.gains.get(node.node_id, 0.0) if answer is not None else 0.0
    return cost


def _hybrid_key(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> ScoreKey:
    cost = base_cost(node, requirements, policy)
    if kernels and is_warm(node, kernels):
        cost -= WARM_GAIN
    if requirements.gpu > UNIT:
        cost -= TOPOLOGY_GAIN * nearness(node, requirements.gpu // UNIT)
    # Without resources nothing tells nodes apart, and all such leases would pile up on one.
    return cost, 0 if requirements.names else len(node.leases)


def nearness(node: NodeInfo, count: int) -> float:
    """Return how near each other the ``count`` GPUs are that would be given: 0 (not known) to 1 (NVLink)."""
    spread = node.devices.spread(count)
    if spread is None:
        return 0.0
    pairs = count * (count - 1) // 2
    return (FARTHEST * pairs - spread) / ((FARTHEST - NEAREST) * pairs)


def _spread_key(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> ScoreKey:
    return base_cost(node, requirements, policy), node.turn


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Order of the nodes under one policy.

    ``score_key`` says how good a node is for requirements that run a set of kernels (or none, ``""``),
    before locality; lower is better. With ``uses_locality`` large arguments pull work to their node.
    With ``takes_turns`` a node that gets a lease goes behind the others (``NodeInfo.turn``).
    """

    score_key: Callable[[NodeInfo, Requirements, ScorePolicy, str], ScoreKey]
    uses_locality: bool
    takes_turns: bool


NODE_ORDERS: Mapping[PlacementPolicy, NodeOrder] = {
    PlacementPolicy.HYBRID: NodeOrder(_hybrid_key, uses_locality=True, takes_turns=False),
    PlacementPolicy.SPREAD: NodeOrder(_spread_key, uses_locality=False, takes_turns=True),
}
"""Every policy's order: a new policy is a member of the enum, a row here and its name in ``wire_types``."""


def is_warm(node: NodeInfo, kernels: str) -> bool:
    """Return whether ``node`` has compiled the kernel set ``kernels``."""
    return bool(kernels) and kernels in node.spec.warm


def locality_gain(node_id: str, locality: Mapping[str, int]) -> float:
    """Return how much the arguments on ``node_id`` lower its cost."""
    here = locality.get(node_id, 0)
    if here < LOCALITY_FLOOR_BYTES:
        return 0.0
    return LOCALITY_GAIN * here / sum(locality.values())
