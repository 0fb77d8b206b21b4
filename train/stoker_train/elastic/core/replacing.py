"""The replacing of ranks: the newcomer comes first, then the rank leaves and its place goes back.

A newcomer needs a place more than the job has. The scheduler is asked for one (:func:`spares`); where the job
may have no more, or none comes in time, the rank leaves first and another starts in its place, which is said.
The machine (:mod:`.machine`) builds on these rules. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.phases import Life, State, Worker
from stoker_train.elastic.core.places import Places

__all__ = ("Replacing", "spares")


def spares(state: State) -> int:
    """Return how many places more than its share the job asks for, for newcomers."""
    waiting = sum(
        number in state.replaced and worker.life is Life.MEMBER
        for number, worker in state.workers.items()
    )
    return min(waiting, max(0, state.limits.max_replicas - state.share))


class Replacing(Places):
    """A turn's rules of ranks that are to be replaced."""

    def _replace(self, worker: Worker) -> None:
        if worker.life is not Life.MEMBER or worker.number in self.s.replaced:
            return
        known = {n: since_s for n, since_s in self.s.replaced.items() if n in self.s.workers}
        if not known:
            self.s.share = len(self.s.slots)
        self.s.replaced = {**known, worker.number: self.at_s}

    def _forget_replaced(self, number: int) -> None:
        self.s.replaced.pop(number, None)

    def _leavers(self, members: Sequence[Worker], newcomers: Sequence[Worker]) -> dict[int, str]:
        """Return who leaves at the next boundary to be replaced, and how, in words.

        First come those for whom a newcomer is there beyond the job's share: see :attr:`State.swapped`.
        """
        desired = set(self._desired)
        present = [one for one in members if one.slot in desired]
        waiting = [one for one in present if one.number in self.s.replaced]
        if not waiting:
            return {}
        waiting.sort(key=lambda one: (self.s.replaced[one.number], one.number))
        self.s.share = min(self.s.share, len(desired))
        more = max(0, len(present) + len(newcomers) - self.s.share)
        found = {
            one.number: f"rank {one.last_rank} leaves, as another is there"
            for one in waiting[:more]
        }
        self.s.swapped = frozenset(found)
        stay = len(present) + len(newcomers) - len(found)
        for one in waiting[more:]:
            why = self._why_first(one)
            if not why:
                continue
            if stay - 1 < max(1, self.s.limits.min_replicas):
                self._forget_replaced(one.number)
                self.do(
                    ev.Say(
                        f"rank {one.last_rank} is not replaced: {why}, and without it fewer than "
                        f"{self.s.limits.min_replicas} replicas (scaling.min_replicas) would train"
                    )
                )
                continue
            stay -= 1
            found[one.number] = f"rank {one.last_rank} leaves before another comes: {why}"
        return found

    def _why_first(self, worker: Worker) -> str:
        """Return why a rank leaves before its newcomer is there; empty while that may come."""
        limits = self.s.limits
        if self.s.share >= limits.max_replicas:
            return f"the job may have {limits.max_replicas} replicas (scaling.max_replicas)"
        starts = any(one.slot in self._desired for one in self._in(Life.STARTING))
        if starts or self.at_s - self.s.replaced[worker.number] <= limits.replace_s:
            return ""
        return f"the cluster had no other place for it within {limits.replace_s:g} s"
