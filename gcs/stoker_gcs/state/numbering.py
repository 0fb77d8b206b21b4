"""The numbering of the event log: it only rises, and after a restore it goes on far beyond.

Processes that ran on when a database was restored have seen numbers that its log does not have. Those are
never given again: the numbers between the last event of the backup and the first one after the restore are
a gap, which a row of ``meta`` records. Whoever asks for what came after a number within a gap has seen what
never happened in this log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GAP = "gap:"
"""The rows of ``meta`` that record gaps: ``gap:LAST`` has the number that followed ``LAST``."""
NUMBERS_PER_S = 1_000_000
"""More events than a cluster has: so a number made of the time of a restore is beyond all that were seen."""
EPOCHS_PER_S = 1
"""The same for the epochs of leaders."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The numbers between ``last`` and ``following``, both of which may be those of events."""

    last: int
    following: int


class Numbering:
    """The numbers of the events of a log, as far as there are any; ``gaps`` in any order."""

    def __init__(self, gaps: Iterable[Gap] = ()) -> None:
        self._gaps = sorted(gaps, key=lambda gap: gap.last)

    def skips(self, number: int) -> bool:
        """Return whether no event has, or will have, this number."""
        return any(gap.last < number < gap.following for gap in self._gaps)

    def count(self, after: int, upto: int) -> int:
        """Return how many numbers there are with ``after < number <= upto``."""
        skipped = (
            min(upto, gap.following - 1) - max(after, gap.last)
            for gap in self._gaps
            if gap.last < upto and gap.following - 1 > after
        )
        return max(0, upto - after) - sum(skipped)

    def ahead(self, number: int, count: int) -> int:
        """Return the number that follows ``count - 1`` others after this one."""
        for gap in self._gaps:
            if number < gap.following - 1:
                if number + count <= gap.last:
                    break
                count -= max(0, gap.last - number)
                number = gap.following - 1
        return number + count

    def back(self, number: int, count: int) -> int:
        """Return the number after which there are ``count`` until this one; below 0 if there are fewer."""
        for gap in reversed(self._gaps):
            if number > gap.last:
                after = max(0, number - (gap.following - 1))
                if count <= after:
                    break
                count -= after
                number = min(number, gap.last)
        return number - count


def gap_of(name: str, value: str) -> Gap:
    """Return the gap that a row of ``meta`` records."""
    return Gap(last=int(name.removeprefix(GAP)), following=int(value))
