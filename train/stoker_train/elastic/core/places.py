"""The places of a job's replicas: where one starts, where none can, and what goes back to the scheduler.

A slot whose replicas do not start is in *quarantine*, with the reason. It goes back to the scheduler while
enough others are left; where too few are left to ever train again, it is tried again, a bounded number of
times. The rules of generations are in :mod:`.machine`, which builds on these. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.phases import Life, Phase, State, Worker
from stoker_train.elastic.core.turns import Turn

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Slot

__all__ = ("Places", "avoided", "unwanted")


def unwanted(state: State) -> tuple[Slot, ...]:
    """Return the slots that the job gives back: nothing of it is there, nor will be.

    Not another one of a node where some work: the scheduler would offer a place there again, for ever.
    """
    if not _has_enough(state):
        return ()
    busy = {worker.slot for worker in state.workers.values()}
    nodes = avoided(state)
    times = Counter(one.node_id for one in state.quarantined)
    return tuple(
        one
        for one in state.slots
        if one not in busy
        and (
            one in state.given_up
            or (one in state.quarantined and (one.node_id in nodes or times[one.node_id] == 1))
        )
    )


def avoided(state: State) -> frozenset[str]:
    """Return the nodes on which no replica starts, while there are enough others: none is wanted there."""
    if not _has_enough(state):
        return frozenset()
    works = {worker.slot.node_id for worker in state.workers.values()}
    works |= {one.node_id for one in state.slots if not _is_out(state, one)}
    return frozenset(one.node_id for one in state.quarantined) - works


def _has_enough(state: State) -> bool:
    usable = [one for one in state.slots if not _is_out(state, one)]
    return len(usable) >= state.limits.min_replicas


def _is_out(state: State, slot: Slot) -> bool:
    return slot in state.quarantined or slot in state.given_up


def _where(slot: Slot) -> str:
    return f"{slot.group_id}/{slot.bundle} on {slot.node_id}"


class Places(Turn):
    """A turn's rules of slots."""

    @property
    def _offered_slots(self) -> tuple[Slot, ...]:
        return self.s.offer.slots if self.s.offer is not None else self.s.slots

    @property
    def _desired(self) -> tuple[Slot, ...]:
        return tuple(one for one in self._offered_slots if not _is_out(self.s, one))

    def _end_unwanted(self) -> None:
        """Replicas that start or wait in slots that are not wanted any more end."""
        desired = set(self._desired)
        for number, worker in list(self.s.workers.items()):
            idle = worker.life in (Life.STARTING, Life.READY)
            if idle and worker.slot not in desired and not self._is_in_pending(number):
                self.kill(number, "its slot is not wanted any more")

    def _launch(self) -> None:
        if self.s.stopping is not None:
            return
        taken = {worker.slot for worker in self.s.workers.values()}
        trains = self.s.phase in (Phase.RUNNING, Phase.DRAINING, Phase.RESIZING)
        for slot in self._desired:
            count, last_s, _ = self.s.failures.get(slot, (0, 0.0, ""))
            pause_s = self.s.limits.retry_s * count * 2.0 ** self.s.chances.get(slot, 0)
            if slot in taken or (count and self.at_s - last_s < pause_s):
                continue
            number = self.s.next_worker
            self.s.next_worker += 1
            self.s.workers[number] = Worker(number, slot, Life.STARTING, self.at_s)
            self.do(ev.Launch(number, slot, rehearse=trains))

    def _start_failed(self, worker: Worker, why: str) -> None:
        count = self.s.failures.get(worker.slot, (0, 0.0, ""))[0] + 1
        self.s.failures[worker.slot] = (count, self.at_s, why)
        if count >= self.s.limits.max_start_failures:
            self._quarantine(worker.slot, why)

    def _quarantine(self, slot: Slot, why: str) -> None:
        self.s.quarantined[slot] = why
        self.do(ev.Say(f"{_where(slot)} is quarantined: {why}"))
        usable = [one for one in self.s.slots if one not in self.s.quarantined]
        if not usable and not self.s.has_trained and not self._any_alive():
            self.fail(f"no replica could start\n{why}", "start")

    def _try_again(self) -> None:
        """Have slots out of quarantine without which the job could never train again."""
        if self.s.phase not in (Phase.FORMING, Phase.RESTORING) or self.s.stopping is not None:
            return
        least, slots = self.s.limits.min_replicas, self._offered_slots
        if len(slots) < least or len(self._desired) >= least:
            return
        self.s.given_up = frozenset()  # slow is better than none
        missing = least - len(self._desired)
        if missing <= 0:
            return
        left = [
            one
            for one in slots
            if one in self.s.quarantined and self.s.chances.get(one, 0) < self.s.limits.max_chances
        ]
        if len(left) < missing:
            reasons = "\n".join(
                f"{_where(one)}: {self.s.quarantined[one]}"
                for one in slots
                if one in self.s.quarantined
            )
            self.fail(
                f"scaling.min_replicas: {least} replicas at least, and too few of {len(slots)} "
                f"could start\n{reasons}",
                "start",
            )
            return
        for slot in left:
            why = self.s.quarantined.pop(slot)
            self.s.chances[slot] = self.s.chances.get(slot, 0) + 1
            # One more failure, and it is in quarantine again.
            self.s.failures[slot] = (self.s.limits.max_start_failures - 1, self.at_s, why)
            self.do(ev.Say(f"{_where(slot)} is tried again, as too few others are left: {why}"))
