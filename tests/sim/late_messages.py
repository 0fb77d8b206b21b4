"""Virtual time, and messages that come late, twice or never. Worlds of the simulations build on it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


@dataclass(frozen=True)
class Faults:
    """Probabilities of what goes wrong with a message, and mean seconds between crashes."""

    lost: float = 0.05
    doubled: float = 0.05
    slow: float = 0.05
    crash_every_s: float = 15.0
    takeover_every_s: float = 40.0
    vanish: float = 0.05


class LateMessages:
    """A clock that jumps from one thing to the next, and a network with faults until it is calm."""

    def __init__(self, random: Random, faults: Faults) -> None:
        self.random = random
        self.faults = faults
        self.calm = False
        self.at_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.at_s + delay_s, self._count, what))

    def advance(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.at_s, _, what = heapq.heappop(self._queue)
            what()
        self.at_s = until_s

    def message(self, deliver: Callable[[], None]) -> None:
        """Deliver late, and perhaps never or twice."""
        faults, random = self.faults, self.random
        slow = not self.calm and random.random() < faults.slow
        if self.calm or random.random() >= faults.lost:
            self.later(random.uniform(0.001, 5.0 if slow else 0.05), deliver)
        if not self.calm and random.random() < faults.doubled:
            self.later(random.uniform(0.001, 2.0), deliver)
