"""The places of a job's replicas: where one starts, where none can, and what goes back to the scheduler.

A slot whose replicas do not start is in *quarantine*, with the reason. It goes back to the scheduler while
enough others are left. Where too few are left to train, it is tried again after a pause, and the scheduler is
asked for another node once that has failed too. A job that has trained never fails of it: it waits. The rules
of generations are in :mod:`.machine`, which builds on these. Pure.
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
    """Return the nodes on which no replica starts: none is wanted there, wherever others have room.

    While too few slots are left, only those where another chance has failed: a first one may help.
    """
    bad, doubtful = set(state.quarantined), _doubtful(state)
    if not _has_enough(state):
        bad = {one for one in bad if state.chances.get(one, 0)}
    works = {worker.slot for worker in state.workers.values()}
    works |= {one for one in state.slots if not _is_out(state, one)}
    sound = {one.node_id for one in works - doubtful}
    return frozenset(one.node_id for one in bad | doubtful) - sound


def _has_enough(state: State) -> bool:
    doubtful = _doubtful(state)
    usable = [one for one in state.slots if not _is_out(state, one) and one not in doubtful]
    return len(usable) >= state.limits.min_replicas


def _doubtful(state: State) -> frozenset[Slot]:
    """Return the slots that are tried again though a chance has failed: not yet known to be better."""
    starts = {one.slot for one in state.workers.values() if one.life is not Life.STARTING}
    return frozenset(
        one
        for one in state.slots
        if state.chances.get(one, 0) > 1 and one not in state.quarantined and one not in starts
    )


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
            if slot in taken or (count and self.at_s - last_s < self.s.limits.retry_s * count):
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
        self.s.failures[slot] = (self.s.limits.max_start_failures, self.at_s, why)
        self.do(ev.Say(f"{_where(slot)} is quarantined: {why}"))
        usable = [one for one in self.s.slots if one not in self.s.quarantined]
        if not usable and not self.s.has_trained and not self._any_alive():
            reasons = "\n".join(dict.fromkeys(self.s.quarantined.values()))
            self.fail(f"no replica could start\n{reasons}", "start")

    def _try_again(self) -> None:
        """Have slots out of quarantine, each after its pause, without which the job cannot train."""
        if self.s.phase not in (Phase.FORMING, Phase.RESTORING) or self.s.stopping is not None:
            return
        limits, slots = self.s.limits, self._offered_slots
        if len(slots) < limits.min_replicas:
            self._forgive(set(slots))
            return
        if len(self._desired) < limits.min_replicas:
            self.s.given_up = frozenset()  # slow is better than none
        missing = limits.min_replicas - len(self._desired)
        if missing <= 0:
            return
        ever_ready = self.s.has_trained or bool(self.s.code)
        if not ever_ready and self._in(Life.STARTING):
            return  # one that is ready says that it is not the loop
        out = [one for one in slots if one in self.s.quarantined]
        left = [one for one in out if ever_ready and self._has_chance(one)]
        if len(left) < missing:
            reasons = "\n".join(f"{_where(one)}: {self.s.quarantined[one]}" for one in out)
            self.fail(
                f"scaling.min_replicas: {limits.min_replicas} replicas at least, and too few of "
                f"{len(slots)} could start\n{reasons}",
                "start",
            )
            return
        for slot in left:
            if self.at_s - self.s.failures[slot][1] >= self._pause_s(slot):
                self._give_chance(slot)

    def _has_chance(self, slot: Slot) -> bool:
        """Whether a slot is tried again: for ever, once the job has trained, as its state is worth it."""
        return self.s.has_trained or self.s.chances.get(slot, 0) < self.s.limits.max_chances

    def _pause_s(self, slot: Slot) -> float:
        limits = self.s.limits
        doublings = min(self.s.chances.get(slot, 0) + 1, limits.max_chances)
        pause_s = limits.retry_s * max(1, limits.max_start_failures - 1) * 2.0**doublings
        return min(pause_s, limits.longest_pause_s)

    def _give_chance(self, slot: Slot) -> None:
        why = self.s.quarantined.pop(slot)
        self.s.chances[slot] = self.s.chances.get(slot, 0) + 1
        # One more failure, and it is in quarantine again.
        last_s = self.s.failures[slot][1]
        self.s.failures[slot] = (self.s.limits.max_start_failures - 1, last_s, why)
        self.do(ev.Say(f"{_where(slot)} is tried again, as too few others are left: {why}"))

    def _forgive(self, present: set[Slot]) -> None:
        """Forget, after the longest pause, why slots that are gone were bad: the job has too few others.

        Else the scheduler would have to avoid their nodes for ever, where no others have room.
        """
        for slot in [one for one in self.s.quarantined if one not in present]:
            if self.at_s - self.s.failures[slot][1] >= self.s.limits.longest_pause_s:
                del self.s.quarantined[slot], self.s.failures[slot]
                self.s.chances.pop(slot, None)
                self.do(ev.Say(f"node {slot.node_id} is no longer avoided, as no other has room"))
