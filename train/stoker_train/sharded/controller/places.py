"""Decides which bundles a gang asks for, and which rank gets which: pure, but for the names of nodes.

Ranks are numbered as ``Plan.rank_of`` says: tensor parallelism innermost, then what talks next most. So ranks
with near numbers are on one node, and a tensor group is one bundle wherever a node has room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_train.sharded.options import amounts

if TYPE_CHECKING:
    from stoker_train.planning.strategy import Strategy

__all__ = ("Bundles", "bundles_of", "in_order")


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of a gang: ``count`` of them, for ``ranks`` ranks each."""

    count: int
    ranks: int
    resources: dict[str, float]


def bundles_of(
    strategy: Strategy, resources: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> Bundles:
    """Return the bundles for a plan: tensor groups where a node has room for one, else single ranks.

    ``nodes``: the total resources of each node. Where no node has as much as a tensor group it goes over
    several, as near to each other as can be.
    """
    group = amounts(resources, strategy.tensor)
    fits = any(all(node.get(name, 0.0) >= one for name, one in group.items()) for node in nodes)
    together = strategy.tensor if fits else 1
    return Bundles(strategy.gpus // together, together, amounts(resources, together))


def in_order(nodes: Sequence[str]) -> list[int]:
    """Return the bundles in the order in which ranks fill them: one node after the other.

    ``nodes`` are those of the bundles. Nodes with more bundles come first, so that fewer groups are cut.
    """
    counts = Counter(nodes)
    first = {node: nodes.index(node) for node in counts}
    return sorted(range(len(nodes)), key=lambda n: (-counts[nodes[n]], first[nodes[n]], n))
