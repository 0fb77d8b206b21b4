"""Scores of the nodes that fit: a cost, lower is better, and a tie-break that never moves.

The cost is the sum of named, weighted terms; each policy says which count (:data:`NODE_ORDERS`). Hybrid:
nodes are filled one after the other until the scarcest resource of the demand passes a threshold, then the
least loaded is used; work without GPUs avoids nodes that have some; large arguments pull work to the node
that stores them, and compiled kernels to the node that has them. Spread: nodes below the threshold take
turns, then the least loaded is used; arguments and kernels pull nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.requirements import PlacementPolicy, Requirements
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.model.taints import DISCOURAGING, untolerated
from stoker_scheduler.core.model.topology import FARTHEST, NEAREST

GPU_NODE_COST = 2.0
"""Beats any utilisation: an overloaded CPU node is still better than a GPU node for CPU work."""
LOCALITY_GAIN = 3.0
"""Times the share of the argument bytes on the node; beats the GPU cost when most of them are there."""
LOCALITY_FLOOR_BYTES = 1 << 20
"""Less than this is fetched faster than a decision pays."""
PREFERRED_GAIN = 10.0
TAINT_COST = 5.0
"""Beats load, GPUs and arguments: a node with a PreferNoSchedule taint is taken when no other fits."""
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


def load_cost(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str = ""
) -> float:
    """Return the utilisation of the scarcest resource asked for, with the lease; 0 up to the threshold.

    It is infinite where the node lacks some of ``requirements.items``.
    """
    load, spec, available = 0.0, node.spec, node.available
    total = spec.total
    for name, count in requirements.items:
        free = available.get(name, 0)
        if free < count:
            return math.inf
        has = total[name]
        used = (has - free + count) / has
        if used > load:
            load = used
    if spec.gpus and requirements.needs_gpu:
        devices, has = node.devices, node.devices.total_units
        taken = devices.typical_units(requirements.gpu, requirements.gpu_memory)
        load = max(load, (has - devices.free_units + taken) / has)
    return load if load > policy.pack_threshold else 0.0


def gpu_node(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> float:
    """Return 1 for a node that has GPUs."""
    return 1.0 if node.spec.gpus else 0.0


def preferred(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> float:
    """Return 1 for the node of a soft affinity."""
    return 1.0 if requirements.node_id == node.spec.node_id else 0.0


def extenders(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> float:
    """Return the gain that the extenders give the node."""
    answer = node.answers.get(requirements)
    return answer.gains.get(node.node_id, 0.0) if answer is not None else 0.0


def compiled_kernels(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> float:
    """Return 1 for a node that has compiled the kernels."""
    return 1.0 if is_warm(node, kernels) else 0.0


def gpu_topology(
    node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
) -> float:
    """Return how near each other the GPUs are that would be given, as :func:`nearness` does."""
    return nearness(node, requirements.gpu // UNIT)


def nearness(node: NodeInfo, count: int) -> float:
    """Return how near each other the ``count`` GPUs are that would be given: 0 (not known) to 1 (NVLink)."""
    spread = node.devices.spread(count)
    if spread is None:
        return 0.0
    pairs = count * (count - 1) // 2
    return (FARTHEST * pairs - spread) / ((FARTHEST - NEAREST) * pairs)


Value = Callable[[NodeInfo, Requirements, ScorePolicy, str], float]


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a cost: ``weight`` times ``value``; for requirements that it does not count for, 0.

    ``words`` is what it says of a node, with the value in it.
    """

    weight: float
    value: Value
    counts_for: Callable[[Requirements, str], bool]
    words: str


LOAD = Term(
    1.0,
    load_cost,
    lambda requirements, kernels: bool(requirements.names),
    "{:.0%} of what is scarcest would be in use",
)
GPU_NODE = Term(
    GPU_NODE_COST,
    gpu_node,
    lambda requirements, kernels: not requirements.needs_gpu,
    "it has GPUs, which are not asked for",
)
PREFERRED = Term(
    -PREFERRED_GAIN, preferred, lambda requirements, kernels: requirements.soft, "it is preferred"
)
EXTENDERS = Term(
    -1.0,
    extenders,
    lambda requirements, kernels: bool(requirements.extenders),
    "extenders give it {:.2g}",
)
KERNELS = Term(
    -WARM_GAIN,
    compiled_kernels,
    lambda requirements, kernels: bool(kernels),
    "it has compiled the kernels",
)
TOPOLOGY = Term(
    -TOPOLOGY_GAIN,
    gpu_topology,
    lambda requirements, kernels: requirements.gpu > UNIT,
    "its GPUs are {:.0%} as near as by NVLink",
)

COMMON_TERMS = (LOAD, GPU_NODE, PREFERRED, EXTENDERS)
"""Those that count under every policy."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A tie-break between nodes of equal cost, the least first; 0 for requirements that it is not for."""

    value: Callable[[NodeInfo], int]
    counts_for: Callable[[Requirements], bool]


FEWEST_LEASES = Tie(lambda node: len(node.leases), lambda requirements: not requirements.names)
"""Without resources nothing tells nodes apart, and all such leases would pile up on one."""
LONGEST_AGO = Tie(lambda node: node.turn, lambda requirements: True)


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Order of the nodes under one policy: by the sum of ``terms``, then by ``tie``; lower is better.

    With ``uses_locality`` large arguments pull work to their node. With ``takes_turns`` a node that gets a
    lease goes behind the others (``NodeInfo.turn``).
    """

    terms: tuple[Term, ...]
    tie: Tie
    uses_locality: bool
    takes_turns: bool

    def score_key(
        self, node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
    ) -> ScoreKey:
        """Return how good a node is for requirements that run a set of kernels (or none, ``""``)."""
        terms = terms_for(self.terms, requirements, kernels)
        tie = self.tie.value(node) if self.tie.counts_for(requirements) else 0
        return cost_of(terms, node, requirements, policy, kernels) + taint_cost(
            node, requirements
        ), tie

    def words(
        self, node: NodeInfo, requirements: Requirements, policy: ScorePolicy, kernels: str
    ) -> list[str]:
        """Return what speaks for a node, or against it."""
        counting = [term for term in self.terms if term.counts_for(requirements, kernels)]
        values = [(term, term.value(node, requirements, policy, kernels)) for term in counting]
        found = [term.words.format(value) for term, value in values if value]
        shunned = untolerated(node.spec.taints, requirements.tolerations, DISCOURAGING)
        return found + [f"it has the taint {taint.text}" for taint in shunned]


@lru_cache(maxsize=4096)
def terms_for(
    terms: tuple[Term, ...], requirements: Requirements, kernels: str
) -> tuple[tuple[float, Value], ...]:
    """Return weight and value of the ``terms`` that can be other than 0."""
    return tuple((one.weight, one.value) for one in terms if one.counts_for(requirements, kernels))


def cost_of(
    terms: Sequence[tuple[float, Value]],
    node: NodeInfo,
    requirements: Requirements,
    policy: ScorePolicy,
    kernels: str = "",
) -> float:
    """Return the sum of ``terms`` (from :func:`terms_for`); infinite where the node lacks resources."""
    cost = 0.0
    for weight, value in terms:
        cost += weight * value(node, requirements, policy, kernels)
    return cost


def taint_cost(node: NodeInfo, requirements: Requirements) -> float:
    """Return the cost of a node's PreferNoSchedule taints, 0 if there are none that count."""
    if not node.spec.shunned:
        return 0.0
    return TAINT_COST * len(untolerated(node.spec.taints, requirements.tolerations, DISCOURAGING))


NODE_ORDERS: Mapping[PlacementPolicy, NodeOrder] = {
    PlacementPolicy.HYBRID: NodeOrder(
        (*COMMON_TERMS, KERNELS, TOPOLOGY), FEWEST_LEASES, uses_locality=True, takes_turns=False
    ),
    PlacementPolicy.SPREAD: NodeOrder(
        COMMON_TERMS, LONGEST_AGO, uses_locality=False, takes_turns=True
    ),
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
