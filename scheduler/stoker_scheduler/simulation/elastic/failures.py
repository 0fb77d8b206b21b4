"""Nodes that fail and come back, at times that are drawn from a seed: the same ones for every policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that is away, from ``at_s`` until ``until_s``."""

    node_id: str
    at_s: int
    until_s: int


class Failures:
    """The failures of some nodes: up for exponentially distributed times, then away for ``repair_s``."""

    def __init__(self, nodes: Iterable[str], mean_up_s: float, repair_s: float, seed: int) -> None:
        self._mean_up_s, self._repair_s = mean_up_s, repair_s
        self._random = {node_id: Random(f"{seed} {node_id}") for node_id in nodes}
        self._next: dict[str, Failure] = {}
        if mean_up_s:
            self._next = {node_id: self._draw(node_id, 0) for node_id in self._random}
        self._away: dict[str, int] = {}

    def before(self, end_s: int) -> list[Failure]:
        """Return those before ``end_s`` that were not returned yet, by node."""
        failed = [one for one in self._next.values() if one.at_s < end_s]
        for one in failed:
            self._away[one.node_id] = one.until_s
            self._next[one.node_id] = self._draw(one.node_id, one.until_s)
        return failed

    def up(self, nodes: Mapping[str, int], now_s: int) -> Mapping[str, int]:
        """Return the nodes that are there."""
        self._away = {node_id: until for node_id, until in self._away.items() if until > now_s}
        if not self._away:
            return nodes
        return {node_id: gpus for node_id, gpus in nodes.items() if node_id not in self._away}

    def _draw(self, node_id: str, up_from_s: int) -> Failure:
        at_s = up_from_s + round(self._random[node_id].expovariate(1 / self._mean_up_s))
        return Failure(node_id, at_s, at_s + max(1, round(self._repair_s)))
