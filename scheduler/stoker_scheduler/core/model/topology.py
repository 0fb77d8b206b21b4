"""The distances between the GPUs of a node, and the choice of GPUs that are near each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

DISTANCES = {"nvlink": 1, "pcie": 4, "numa": 8, "system": 16}
"""The distance of two GPUs by the path between them: two of one kind cost no more than one of the next."""
NEAREST, FARTHEST = min(DISTANCES.values()), max(DISTANCES.values())
EXACT_DEVICES = 8
"""Up to so many free devices, all sets are looked at; of more, one for each device to begin with."""
MAX_REMEMBERED = 4096

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The distances within one node; ``pairs`` are ordered, and those that are missing are the farthest.

    Nodes with equal topology share one (``make_topology``), and with it what it remembers.
    """

    pairs: tuple[tuple[int, int, int], ...]
    """Two devices, the lower index first, and their distance."""
    _chosen: dict[tuple[Indices, int], tuple[Indices, int]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Free devices and a count -> those that are nearest, and the sum of their distances."""

    @cached_property
    def _distances(self) -> dict[tuple[int, int], int]:
        return {(one, other): distance for one, other, distance in self.pairs}

    def spread(self, indices: Indices) -> int:
        """Return the sum of the distances between ``indices``, which are ordered."""
        distances = self._distances
        return sum(distances.get(pair, FARTHEST) for pair in combinations(indices, 2))

    def nearest(self, free: Indices, count: int) -> tuple[Indices, int]:
        """Return the ``count`` of ``free`` that are nearest to each other, and the sum of their distances.

        All are ordered by index. Of equal sets it is the one that leaves others near each other, then that
        of the lowest indices.
        """
        known = self._chosen.get((free, count))
        if known is None:
            if len(self._chosen) >= MAX_REMEMBERED:
                self._chosen.clear()
            if len(free) <= EXACT_DEVICES:
                sets = list(combinations(free, count))
            else:
                sets = [self._grown(first, free, count) for first in free]
            best = min(sets, key=lambda indices: self._rank(indices, free))
            known = self._chosen[free, count] = best, self.spread(best)
        return known

    def _rank(self, indices: Indices, free: Indices) -> tuple[int, int, Indices]:
        rest = tuple(index for index in free if index not in indices)
        return self.spread(indices), self.spread(rest), indices

    def _grown(self, first: int, free: Indices, count: int) -> Indices:
        """Return a set that begins with one device and takes the nearest, again and again."""
        distances = self._distances
        added = dict.fromkeys((index for index in free if index != first), 0)
        chosen, last = [first], first
        while len(chosen) < count:
            for index in added:
                pair = (index, last) if index < last else (last, index)
                added[index] += distances.get(pair, FARTHEST)
            last = min(added, key=lambda index: (added[index], index))
            del added[last]
            chosen.append(last)
        return tuple(sorted(chosen))


_known: dict[tuple[tuple[int, int, int], ...], Topology] = {}
_MAX_KNOWN = 256


def make_topology(links: Mapping[int, Mapping[int, str]]) -> Topology | None:
    """Return the topology of devices with these paths to the others, or None if none is known."""
    pairs = tuple(
        sorted(
            (one, other, DISTANCES.get(link, FARTHEST))
            for one, others in links.items()
            for other, link in others.items()
            if one < other
        )
    )
    if not pairs:
        return None
    topology = _known.get(pairs)
    if topology is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        topology = _known[pairs] = Topology(pairs)
    return topology
