"""One turn of the generation machine: the state as it becomes, the commands so far, and what both ask for.

The rules themselves are in :mod:`.places`, :mod:`.replacing` and :mod:`.machine`, which begins a turn
for each event. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.membership import Action, Order
from stoker_train.elastic.core.phases import TRANSITIONS, Life, Phase, State, Worker

__all__ = ("Turn",)


class Turn:
    """The state as it becomes, and the commands so far."""

    def __init__(self, state: State, at_s: float) -> None:
        self.s = state
        self.at_s = at_s
        self.commands: list[ev.Command] = []

    def do(self, *commands: ev.Command) -> None:
        self.commands += commands

    def go(self, phase: Phase, why: str) -> None:
        """Change the phase; a change that the table lacks is a bug."""
        before = self.s.phase
        if phase == before:
            return
        assert phase in TRANSITIONS[before], f"{before} -> {phase}: {why}"
        self.s.phase, self.s.since_s = phase, self.at_s
        world = len(self.s.membership.members) if self.s.membership else 0
        self.do(ev.Turn(self.at_s, self.s.generation, str(before), str(phase), why, world))

    def fail(self, error: str, kind: str = "") -> None:
        """End the job with an error: all replicas end."""
        self.s.error = error
        self._end_all("the job has failed")
        self.go(Phase.FAILED, error.partition("\n")[0])
        self.do(ev.End(error, kind))

    def _end_all(self, why: str) -> None:
        for number in list(self.s.workers):
            self.kill(number, why)

    def kill(self, number: int, why: str) -> None:
        if self.s.workers.pop(number, None) is not None:
            self.do(ev.Kill(number, why))

    def change(self, worker: Worker, **values: object) -> Worker:
        then = replace(worker, **values)  # type: ignore[arg-type]
        self.s.workers[worker.number] = then
        return then

    def _in(self, *lives: Life) -> list[Worker]:
        return [one for one in self.s.workers.values() if one.life in lives]

    def _is_in(self, number: int) -> bool:
        return any(
            one is not None and one.rank_of(number) is not None
            for one in (self.s.membership, self.s.pending)
        )

    def _any_alive(self) -> bool:
        return any(w.life is not Life.STARTING for w in self.s.workers.values())

    def _is_pending(self, generation: int) -> bool:
        return self.s.pending is not None and self.s.pending.generation == generation

    def _is_in_pending(self, number: int) -> bool:
        return self.s.pending is not None and self.s.pending.rank_of(number) is not None

    def _send(self, action: Action, workers: tuple[int, ...]) -> None:
        membership = self.s.membership
        generation = membership.generation if membership is not None else 0
        order = Order(self.s.next_order, generation, action)
        self.s.next_order += 1
        self.do(ev.Send(order, workers))

    def _newcomers_in_pending(self) -> tuple[int, ...]:
        if self.s.pending is None or not self.s.written:
            return ()
        return tuple(
            m.incarnation
            for m in self.s.pending.members
            if (w := self.s.workers.get(m.incarnation)) is not None and w.life is Life.READY
        )
