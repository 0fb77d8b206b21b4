"""Slow ranks and slow nodes, by the time that they compute: not by steps, which wait for the slowest.

The controller adds every step's table; what it answers goes to policies and, for a node, to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats
    from stoker_train.elastic.optimization.table import StepTable


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank, or every rank of a node, that computes slower than the others, for some windows already."""

    kind: Literal["rank", "node"]
    ranks: tuple[int, ...]
    node: str
    ratio: float
    """Its seconds per sample, by the median of the others'."""
    windows: int


class Stragglers:
    """The ranks with over ``ratio`` times the median of the others' seconds per sample, ``windows`` long.

    A window is ``steps`` steps, and a rank's time in it the median of these. A node whose ranks (two or
    more) are all slow beside the other nodes is one event, and its ranks are none. Each is told once, until
    it has been as fast as the others for a window. ``nodes`` is the node of each rank; another membership
    begins anew.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        ratio: float = 1.5,
        windows: int = 3,
        steps: int = 10,
    ) -> None:
        if not ratio > 1.0:
            raise ValueError(f"ratio is {ratio}: it must be more than 1")
        for name, value in (("windows", windows), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        self.nodes, self.ratio, self.windows, self.steps = tuple(nodes), ratio, windows, steps
        self._window: list[Floats] = []
        self._last: Floats | None = None
        self._runs: dict[tuple[str, str], int] = {}
        self.slow: tuple[Slow, ...] = ()
        """What is slow now, and has been for ``windows``, told already or not."""

    def add(self, table: StepTable) -> tuple[Slow, ...]:
        """Add a step; returns what is found to be slow at the end of a window, once each."""
        if table.replicas != len(self.nodes):
            raise ValueError(
                f"the table has {table.replicas} ranks, not {len(self.nodes)}: "
                f"another membership has Stragglers of its own"
            )
        share, compute = table.column("share"), table.column("compute_s")
        works = (share > 0) & (compute > 0)
        self._window.append(np.where(works, compute / np.where(works, share, 1.0), np.nan))
        if len(self._window) < self.steps:
            return ()
        window, self._window = np.stack(self._window), []
        with np.errstate(all="ignore"):
            self._last = np.array([_median(column) for column in window.T])
        return self._judge(self._last)

    @property
    def sample_s(self) -> Floats | None:
        """Seconds per sample of each rank in the last whole window, NaN for one without samples."""
        return self._last

    def weights(self) -> tuple[float, ...] | None:
        """Return the shares with which all ranks end together: inverse to seconds per sample; their sum is 1.

        None before a whole window. A rank that was not measured counts as a median one.
        """
        if self._last is None or np.isnan(self._last).all():
            return None
        seconds = np.where(np.isnan(self._last), np.nanmedian(self._last), self._last)
        speed = 1.0 / seconds
        return tuple(float(one) for one in speed / speed.sum())

    def _judge(self, times: Floats) -> tuple[Slow, ...]:
        found: list[Slow] = []
        now: list[Slow] = []
        slow_nodes = self._slow_nodes(times)
        slow: dict[tuple[str, str], tuple[tuple[int, ...], float]] = {
            ("node", node): (self._ranks(node), ratio) for node, ratio in slow_nodes.items()
        }
        fit = [rank for rank, node in enumerate(self.nodes) if node not in slow_nodes]
        for rank in fit:
            others = _median(times[[other for other in fit if other != rank]])
            if times[rank] > self.ratio * others:
                slow["rank", str(rank)] = ((rank,), float(times[rank] / others))
        self._runs = {key: self._runs.get(key, 0) + 1 for key in slow}
        for key, (ranks, ratio) in slow.items():
            if self._runs[key] >= self.windows:
                kind: Literal["rank", "node"] = "node" if key[0] == "node" else "rank"
                now.append(Slow(kind, ranks, self.nodes[ranks[0]], ratio, self._runs[key]))
            if self._runs[key] == self.windows:
                found.append(now[-1])
        self.slow = tuple(now)
        return tuple(found)

    def _slow_nodes(self, times: Floats) -> dict[str, float]:
        """Return the nodes of two or more ranks that are all slow beside the median rank of the others."""
        slow = {}
        for node in sorted(set(self.nodes)):
            mine = np.array([other == node for other in self.nodes])
            measured, others = times[mine & ~np.isnan(times)], _median(times[~mine])
            if mine.sum() > 1 and len(measured) and (measured > self.ratio * others).all():
                slow[node] = _median(measured) / others
        return slow

    def _ranks(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, other in enumerate(self.nodes) if other == node)


def _median(values: Floats) -> float:
    """Return the median of what is no NaN; NaN for none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
