"""The generation machine of an elastic job: who is in the next generation, and when it begins. Pure.

:func:`step` takes a state and an event, and returns the next state with the commands to be done; the
controller (:mod:`stoker_train.elastic.controller`) does them and decides nothing. So a simulation may lose,
double and delay every message, and see all that can happen. The rules of an event change what is known; then
:func:`_settle` compares that with what is wanted, so that no message needs to come at a certain moment.
"""

from __future__ import annotations

import copy

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.membership import (
    Action,
    Member,
    Membership,
    Resize,
    Restore,
    SetBatch,
    SetLr,
    SetSync,
    Stop,
    Suspend,
)
from stoker_train.elastic.core.phases import (
    OVER,
    Life,
    Limits,
    Phase,
    State,
    Worker,
)
from stoker_train.elastic.core.replacing import Replacing

__all__ = ("begin", "step")


def begin(
    job_id: str,
    limits: Limits,
    *,
    generation: int = 0,
    first_worker: int = 1,
    has_trained: bool = False,
    at_s: float = 0.0,
) -> State:
    """Return the state of a controller that starts; ``generation`` is the last one in the gcs."""
    return State(
        job_id,
        limits,
        generation=generation,
        next_worker=first_worker,
        has_trained=has_trained,
        since_s=at_s,
    )


def step(state: State, event: ev.Event) -> tuple[State, list[ev.Command]]:
    """Return what the state becomes by an event, and what is to be done. ``state`` itself stays as it is."""
    then = copy.copy(state)
    then.workers = dict(state.workers)
    then.failures = dict(state.failures)
    then.quarantined = dict(state.quarantined)
    then.chances = dict(state.chances)
    then.replaced = dict(state.replaced)
    then.returned = dict(state.returned)
    turn = _Turn(then, event.at_s)
    if then.phase not in OVER:
        turn.take(event)
        if then.phase not in OVER:
            turn.settle()
    return then, turn.commands


def _within(action: Action, local: int) -> Action:
    """Return an action that asks for no larger pass than fits into memory."""
    if isinstance(action, SetBatch):
        return SetBatch(action.batch, min(action.local, local), action.lr_scale)
    return action


class _Turn(Replacing):
    """One step: what an event says, and what is then wanted."""

    # What an event says.

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Offered():
                self._offered(event)
            case ev.Withdrawn():
                if self.s.offer is not None and self.s.offer.number == event.number:
                    self.s.offer = None
            case ev.Granted():
                self.s.slots = event.slots
            case ev.Wrote():
                self._wrote(event)
            case ev.Fenced():
                self.fail(
                    f"generation {event.generation} is held by another controller of this job\n"
                    "only the newest attempt goes on",
                    "fenced",
                )
            case ev.Died():
                self._died(event.worker, event.why)
            case ev.Asked():
                self._asked(event.action)
            case ev.Tick():
                pass
            case _:
                worker = self.s.workers.get(event.worker)
                if worker is not None:
                    self._of_worker(worker, event)

    def _of_worker(self, worker: Worker, event: ev.Event) -> None:
        match event:
            case ev.Ready():
                self._ready(worker, event)
            case ev.Joining():
                if self._is_pending(event.generation) and self.s.phase is Phase.DRAINING:
                    self.go(Phase.RESIZING, f"generation {event.generation} is at its boundary")
            case ev.Formed():
                self._formed(worker, event)
            case ev.Left():
                if worker.life in (Life.MEMBER, Life.RETURNED):
                    self.change(worker, life=Life.LEFT)
            case ev.Broken():
                self._broken(worker, event)
            case ev.Failed():
                self._failed(worker, event)
            case ev.Returned():
                self._returned(worker, event)
            case ev.Waiting():
                self._waiting(worker, event)
            case ev.OutOfMemory():
                self._out_of_memory(worker, event)
            case ev.Replaced():
                self._replace(worker)
            case _:
                raise AssertionError(f"no rule for {event!r}")

    def _out_of_memory(self, worker: Worker, event: ev.OutOfMemory) -> None:
        """Go on with smaller passes, without this process: its memory may be in pieces."""
        if event.lower is None:
            self.fail(
                f"scaling.local_batch: a pass of {event.local} samples does not fit in memory\n"
                "lower both of its numbers",
                "out_of_memory",
            )
            return
        local = self.s.local = min(event.lower, self.s.local or event.lower)
        self.s.decided = tuple(_within(one, local) for one in self.s.decided)
        self.do(ev.Say(f"out of memory with {event.local} samples: now {self.s.local} at most"))
        self.kill(worker.number, "it ran out of memory")
        if worker.life is not Life.STARTING and self._is_in(worker.number):
            self._lose("a rank ran out of memory")

    def _offered(self, offer: ev.Offered) -> None:
        if offer.withdraws and self._in(Life.MEMBER, Life.BROKEN, Life.RETURNED):
            self.s.offer = offer
            return
        # Of more there is nothing to leave first: the slots are the job's while its newcomers start.
        self.s.slots, self.s.offer = offer.slots, None
        self.do(ev.Accept(offer.number))

    def _wrote(self, event: ev.Wrote) -> None:
        pending = self.s.pending
        if pending is None or pending.generation != event.generation or self.s.written:
            return
        self.s.written, self.s.written_s = True, self.at_s
        newcomers = tuple(m.incarnation for m in pending.members if not m.survivor)
        if self.s.phase is Phase.DRAINING:
            present = tuple(n for n, w in self.s.workers.items() if w.life is Life.MEMBER)
            self._send(Resize(pending), present)
            if newcomers:
                restore = Restore(local=self.s.local)
                self.do(ev.Form(pending, restore, newcomers, self.s.next_order - 1))
            return
        everyone = tuple(m.incarnation for m in pending.members)
        restore = self.s.pending_restore
        if restore.step is not None:
            self.do(ev.Void(restore.step, pending.generation))
        self.do(ev.Form(pending, restore, everyone, self.s.next_order - 1))
        for number in everyone:
            worker = self.s.workers[number]
            self.change(worker, life=Life.MEMBER, since_s=self.at_s)

    def _ready(self, worker: Worker, event: ev.Ready) -> None:
        if worker.life is not Life.STARTING:
            return
        if self.s.code and event.code != self.s.code:
            self.kill(worker.number, "another version of the code")
            self._quarantine(
                worker.slot, f"node {worker.slot.node_id} has another version of the code"
            )
            return
        self.s.code = event.code
        self.s.failures.pop(worker.slot, None)
        self.change(
            worker,
            life=Life.READY,
            since_s=self.at_s,
            actor_id=event.actor_id,
            node_id=event.node_id,
        )

    def _formed(self, worker: Worker, event: ev.Formed) -> None:
        if self._is_pending(event.generation):
            rank = self.s.pending.rank_of(worker.number) if self.s.pending else None
            if rank is not None and worker.number not in self.s.formed:
                if rank == 0 and self.s.pending_restore.durable:
                    self.do(
                        ev.Void(event.step, event.generation)
                    )  # what came after the checkpoint is done again
                self.s.formed |= {worker.number}
                self.change(worker, life=Life.MEMBER, has_state=True, last_rank=rank)

    def _broken(self, worker: Worker, event: ev.Broken) -> None:
        """A rank has lost its group. Of a generation that is past it says nothing new."""
        if worker.life in (Life.BROKEN, Life.READY, Life.LEFT, Life.STARTING):
            if worker.life is Life.BROKEN:
                self.change(worker, committed=event.committed)
            return
        if event.generation < self._newest_told:
            return
        if not worker.has_state and not event.committed:
            self.change(worker, life=Life.READY, since_s=self.at_s)
        else:
            self.change(worker, life=Life.BROKEN, committed=event.committed, has_state=True)
        self.s.why_broken = event.why
        if self.s.phase is Phase.FORMING and self.s.pending is not None:
            # The first word on this generation: nobody is known to have died, it could not begin.
            self.s.false_starts += 1
            if self.s.false_starts > self.s.limits.max_breaks:
                self.fail(f"no generation could begin\n{event.why}", "broken")
                return
        self._lose(f"a rank lost its group: {event.why.partition(chr(10))[0]}")

    @property
    def _newest_told(self) -> int:
        """The generation that the present members were last told to form: a word on an older one is late."""
        pending = self.s.pending
        if (
            pending is not None
            and self.s.written
            and self.s.phase in (Phase.FORMING, Phase.RESTORING)
        ):
            return pending.generation
        return self.s.membership.generation if self.s.membership is not None else 0

    def _died(self, number: int, why: str) -> None:
        worker = self.s.workers.pop(number, None)
        if worker is None:
            return
        self._forget_replaced(number)
        if worker.life is Life.STARTING:
            self._start_failed(worker, why)
        elif self._is_in(number) and worker.life is not Life.LEFT:
            rank = worker.last_rank if worker.last_rank >= 0 else "new"
            if worker.life is Life.RETURNED:
                return
            unknown = self.s.phase is Phase.RESTORING and not self.s.written
            if unknown and self._is_in_pending(number):
                self.s.pending = None  # nobody was told of it: another follows
                return
            if self.s.returned:  # the others have ended, or see for themselves that a rank is gone
                self._end_if_all_returned()
                return
            if worker.life is Life.READY and self.s.phase is Phase.DRAINING and not self.s.written:
                self.s.pending = None  # nobody was told of the generation that it was to be in
                self.go(Phase.RUNNING, "a newcomer was lost")
                return
            self.do(ev.Say(f"rank {rank} on {worker.slot.node_id} is lost: {why}"))
            self._lose(f"rank {rank} is lost: {why.partition(chr(10))[0]}")

    def _lose(self, why: str) -> None:
        """The generation is broken: whoever is still in it shall say so, and go back."""
        if self.s.phase is Phase.RESTORING and not self.s.written:
            self.s.pending = None  # it is not known to anyone: another follows
            return
        # Ranks and newcomers that wait for one that is gone are told not to.
        members = tuple(n for n, w in self.s.workers.items() if w.life is Life.MEMBER)
        waits = self._newcomers_in_pending()
        self.do(ev.Interrupt(self.s.generation, members + waits))
        self.s.pending, self.s.written, self.s.formed = None, False, frozenset()
        self.s.suspending, self.s.swapped = False, frozenset()
        has_state = any(w.has_state for w in self.s.workers.values())
        if self.s.phase is Phase.RESTORING or (self.s.phase is Phase.FORMING and not has_state):
            self.s.since_s = self.at_s
        else:
            self.go(Phase.RESTORING, why)

    def _failed(self, worker: Worker, event: ev.Failed) -> None:
        if event.stage == "start" or worker.life is Life.STARTING:
            self.kill(worker.number, "it could not start")
            self._start_failed(worker, event.why)
            return
        rank = worker.last_rank if worker.last_rank >= 0 else 0
        self.fail(f"rank {rank} on {worker.slot.node_id} raised\n{event.why}", "loop")

    def _returned(self, worker: Worker, event: ev.Returned) -> None:
        if worker.life is not Life.MEMBER:
            return
        live = self.s.membership
        past = live is None or event.generation < live.generation
        if past and not self._is_pending(event.generation):
            return
        self.s.returned[worker.last_rank] = event.step
        self.change(worker, life=Life.RETURNED)
        self._end_if_all_returned()

    def _end_if_all_returned(self) -> None:
        """End the job once no rank is left in its loop: all had committed the end before one returned."""
        if not self.s.returned or self._in(Life.MEMBER, Life.BROKEN):
            return
        if 0 in self.s.returned:
            self._end_all("the training is over")
            self.go(Phase.FINISHED, "every rank has returned")
            self.do(ev.End(""))
            return
        # What rank 0 had to say at the end, and its checkpoint, are lost with it.
        self._end_all("it goes on from the checkpoint")
        self.s.returned, self.s.pending, self.s.written = {}, None, False
        self.go(Phase.FORMING, "rank 0 was lost as the others returned")

    def _waiting(self, worker: Worker, event: ev.Waiting) -> None:
        if not self.s.returned or event.waited_s < self.s.limits.waiting_s:
            return
        if worker.life is not Life.MEMBER:
            return
        early, steps = next(iter(self.s.returned.items()))
        self.fail(
            f"rank {early} returned from the loop after {steps} steps, while others go on\n"
            f"rank {worker.last_rank} waits for it at {event.line or 'a step'}: "
            "let all ranks do the same steps",
            "early_return",
        )

    def _asked(self, action: Action) -> None:
        if isinstance(action, Stop):
            self.s.stopping = action.reason
        kind = type(action)
        kept = tuple(one for one in self.s.asked if type(one) is not kind)
        self.s.asked = (*kept, action)

    # What is wanted, and the way there.

    def settle(self) -> None:
        """Compare what is with what is wanted, and order the next step."""
        self._end_overdue()
        if self.s.phase in OVER:
            return
        self._end_unwanted()
        self._try_again()
        if self.s.phase in OVER:
            return
        self._launch()
        match self.s.phase:
            case Phase.FORMING:
                self._form_first()
            case Phase.RUNNING:
                self._run()
            case Phase.DRAINING | Phase.RESIZING:
                self._suspended() if self.s.suspending else self._resized()
            case Phase.RESTORING:
                self._restore()
            case _:
                pass
        if self.s.phase in (Phase.FORMING, Phase.RESTORING):
            self._resized()

    def _end_overdue(self) -> None:
        limits = self.s.limits
        for number, worker in list(self.s.workers.items()):
            if worker.life is Life.STARTING and self.at_s - worker.since_s > limits.start_s:
                self.kill(number, "it was not ready in time")
                self._start_failed(worker, f"it was not ready within {limits.start_s:g} s")
                if self.s.phase in OVER:
                    return
        late_s = self.at_s - self.s.since_s
        if self.s.phase is Phase.RESIZING and late_s > limits.form_s:
            self._lose("the generation did not form in time")
        unsettled = self.s.phase in (Phase.RESTORING, Phase.FORMING) and not self.s.written
        if unsettled and late_s > limits.settle_s:
            for number, worker in list(self.s.workers.items()):
                if worker.life is Life.MEMBER:
                    self.do(
                        ev.Say(f"rank {worker.last_rank} does not say that its group is broken")
                    )
                    self.kill(number, "it did not leave its broken group")
        elif (
            self.s.phase in (Phase.RESTORING, Phase.FORMING)
            and self.s.written
            and self.at_s - self.s.written_s > limits.settle_s + limits.form_s
        ):
            self._lose("the generation did not form in time")
            self.s.since_s = self.at_s

    def _may_begin(self, workers: list[Worker]) -> bool:
        """Whether those who are there are enough, and the ones that start were waited for."""
        if len(workers) < self.s.limits.min_replicas:
            least = self.s.limits.min_replicas
            if not self.s.said_waiting and self.s.has_trained:
                self.s.said_waiting = True
                self.do(
                    ev.Say(
                        f"{len(workers)} replicas are there, of {least} at least "
                        "(scaling.min_replicas): the training waits for more"
                    )
                )
            return False
        if not self._in(Life.STARTING):
            return True
        waits_s = self.at_s - min(one.since_s for one in workers)
        return waits_s > self.s.limits.gather_s

    def _form_first(self) -> None:
        ready = self._in(Life.READY)
        if self.s.pending is not None or self._in(Life.MEMBER):  # members of one that did not form
            return
        self._accept()
        if self.s.stopping is not None:
            self._end_all("the training is over")
            self.go(Phase.FINISHED, f"stopped while nobody trained: {self.s.stopping}")
            self.do(ev.End(""))
            return
        if not ready or not self._may_begin(ready):
            return
        self._propose([], ready, Restore(durable=True))

    def _propose(self, survivors: list[Worker], newcomers: list[Worker], restore: Restore) -> None:
        """Have the next membership written."""
        after = self.s.generation
        self.s.generation += 1
        order = {slot: index for index, slot in enumerate(self._desired)}
        newcomers = sorted(newcomers, key=lambda one: order.get(one.slot, len(order)))
        members = tuple(
            Member(rank, one.actor_id, one.node_id, one.number, rank < len(survivors))
            for rank, one in enumerate([*survivors, *newcomers])
        )
        self.s.pending = Membership(self.s.job_id, self.s.generation, members)
        self.s.pending_restore = Restore(restore.step, restore.durable, self.s.local)
        self.s.written, self.s.formed = False, frozenset()
        self.s.said_waiting = False
        self.do(ev.WriteMembership(self.s.pending, after))

    def _run(self) -> None:
        for action in self.s.asked:
            if isinstance(action, Suspend):
                self._suspend("asked for")
                return
            present = tuple(one.number for one in self._in(Life.MEMBER))
            self._send(action, present)
            if isinstance(action, SetBatch | SetLr | SetSync):
                kept = tuple(one for one in self.s.decided if type(one) is not type(action))
                self.s.decided = (*kept, action)
        self.s.asked = ()
        members = self._in(Life.MEMBER)
        if self.s.returned or self.s.stopping is not None:
            return
        desired = set(self._desired)
        newcomers = [one for one in self._in(Life.READY) if one.slot in desired]
        leavers = self._leavers(members, newcomers)
        staying = [one for one in members if one.slot in desired and one.number not in leavers]
        leave = len(members) - len(staying)
        if not leave and not newcomers:
            self._accept()
            return
        if not self._is_time(newcomers, leave):
            return
        if not staying or len(staying) + len(newcomers) < self.s.limits.min_replicas:
            self._suspend("nobody stays" if not staying else "fewer than min_replicas stay")
            return
        staying.sort(key=lambda one: one.last_rank)
        world = len(staying) + len(newcomers)
        self._propose(staying, newcomers, Restore())
        how = "".join(f"; {one}" for one in leavers.values())
        self.go(Phase.DRAINING, f"{len(members)} ranks become {world}{how}")

    def _is_time(self, newcomers: list[Worker], leave: int) -> bool:
        """Whether to resize now, rather than wait for newcomers that start."""
        desired = set(self._desired)
        if not any(one.slot in desired for one in self._in(Life.STARTING)):
            return True
        if self.s.offer is not None:
            began_s = min((one.since_s for one in self._in(Life.STARTING)), default=self.at_s)
            return self.at_s > began_s + 0.4 * (self.s.offer.by_s - began_s)
        if leave:
            return True
        oldest_s = min((one.since_s for one in newcomers), default=self.at_s)
        return self.at_s - oldest_s > self.s.limits.gather_s

    def _suspend(self, why: str) -> None:
        self.s.asked = tuple(one for one in self.s.asked if not isinstance(one, Suspend))
        self.s.suspending = True
        self._send(Suspend(), tuple(one.number for one in self._in(Life.MEMBER)))
        self.go(Phase.DRAINING, f"to a checkpoint: {why}")

    def _suspended(self) -> None:
        if self._in(Life.MEMBER):
            return
        for one in self._in(Life.LEFT):
            self.kill(one.number, "it goes on from the checkpoint")
        self.s.suspending = False
        self.s.pending = None
        self.s.code = ""  # nobody is left of the old version: the next ones may have another
        self._accept()
        self.go(Phase.FORMING, "all ranks have saved and left")
        self._launch()

    def _accept(self) -> None:
        """Take the offer whose slots were left."""
        offer = self.s.offer
        if offer is not None:
            self.s.slots, self.s.offer = offer.slots, None
            self.do(ev.Accept(offer.number))

    def _resized(self) -> None:
        """Begin the pending generation, once all its ranks are in."""
        pending = self.s.pending
        if pending is None or not self.s.written:
            return
        if any(member.incarnation not in self.s.formed for member in pending.members):
            return
        self.s.membership, self.s.pending, self.s.written = pending, None, False
        self.s.has_trained, self.s.false_starts = True, 0
        for number, worker in list(self.s.workers.items()):
            outside = pending.rank_of(number) is None
            if worker.life is Life.LEFT or (worker.life in (Life.MEMBER, Life.BROKEN) and outside):
                self.kill(number, "it has left the training")
                self._forget_replaced(number)
                if number in self.s.swapped:
                    self.s.given_up |= {worker.slot}
        self.s.swapped = frozenset()
        self.go(Phase.RUNNING, f"generation {pending.generation}: {pending.world_size} ranks")
        if self.s.offer is not None and {one.slot for one in self._in(Life.MEMBER)} <= set(
            self.s.offer.slots
        ):
            self._accept()
        if self.s.pending_restore.step is not None or self.s.pending_restore.durable:
            # Of before the state with which it begins, perhaps: asked again, it is as it was decided.
            self.s.asked = (*self.s.decided, *self.s.asked)
        if self.s.stopping is not None:
            self.s.asked = (Stop(self.s.stopping),)
        self._run()

    def _restore(self) -> None:
        if self.s.pending is not None:
            return
        if self._in(Life.MEMBER):
            return
        survivors = self._in(Life.BROKEN)
        for one in self._in(Life.LEFT):
            self.kill(one.number, "it has left the training")
        if not any(one.committed for one in survivors):
            for one in survivors:
                self.kill(one.number, "it has no commit")
            self.s.code = ""
            self.go(Phase.FORMING, "nobody survived with a commit")
            self.s.said_waiting = False
            self._launch()
            return
        newcomers = self._in(Life.READY)
        few = len(survivors) < self.s.limits.min_replicas and self.s.stopping is None
        if few and not self._may_begin([*survivors, *newcomers]):
            return
        step_ = max(max(one.committed, default=-1) for one in survivors)
        self.s.breaks = self.s.breaks + 1 if step_ == self.s.broke_at else 1
        self.s.broke_at = step_
        if self.s.breaks > self.s.limits.max_breaks:
            self.fail(
                f"the group broke {self.s.breaks} times after step {step_}\n{self.s.why_broken}",
                "broken",
            )
            return
        survivors.sort(key=lambda one: (step_ not in one.committed, one.last_rank))
        self._propose(survivors, newcomers, Restore(step=step_))
