"""Fake replicas of an elastic job: what the product's do at each message, without a model or a process.

Their histories are real: a replica's state is the list of the steps that it was trained by, so that a
sample lost or doubled anywhere shows in what rank 0 has at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.ledger import Entry
from stoker_train.elastic.core.membership import (
    Commit,
    Membership,
    Order,
    Resize,
    Restore,
    SetBatch,
    Stop,
    Suspend,
)

if TYPE_CHECKING:
    from tests.sim.training.world import World

Steps = tuple[Entry, ...]


@dataclass(slots=True)
class Group:
    """The process group of a generation, and which of its ranks have come to its rendezvous."""

    membership: Membership
    joined: dict[int, Replica] = field(default_factory=dict)
    formed: bool = False
    broken: bool = False
    since_s: float = 0.0

    @property
    def number(self) -> int:
        return self.membership.generation

    @property
    def ranks(self) -> list[Replica]:
        return [self.joined[one.incarnation] for one in self.membership.members]


@dataclass(slots=True)
class Training:
    """The state of a model: the steps that made it. ``batch`` is M from here on."""

    steps: Steps = ()
    batch: int = 8

    def at(self, length: int) -> tuple[int, int]:
        """Return epoch and first sample of the next step."""
        if not self.steps:
            return 0, 0
        last = self.steps[-1]
        end = last.first + last.count
        return (last.epoch + 1, 0) if end >= length else (last.epoch, end)


class Replica:
    """One replica process. The world calls it; it reports by the world's links."""

    def __init__(self, world: World, worker: int, slot: ev.Slot) -> None:
        self.world, self.worker, self.slot = world, worker, slot
        self.alive, self.stopped = True, False
        self.life = "starting"
        self.code = world.code_of(slot)
        self.training = Training()
        self.commits: dict[int, Training] = {}
        self.group: Group | None = None
        self.generation = 0
        self.rank = 0
        self.known = self.base = self.done = 0
        self.orders: dict[int, Order] = {}
        self.form: ev.Form | None = None
        self.void = 0
        self.newcomer = True

    @property
    def step(self) -> int:
        return len(self.training.steps)

    def report(self, event: ev.Event) -> None:
        self.world.report(self, event)

    # What the controller tells.

    def ready(self) -> None:
        self.life = "waiting"
        self.report(ev.Ready(0.0, self.worker, f"a{self.worker}", self.slot.node_id, self.code))
        self.look()

    def put_order(self, order: Order) -> None:
        if order.number > self.base:
            self.orders.setdefault(order.number, order)
            self.count()

    def count(self) -> None:
        while self.known + 1 in self.orders:
            self.known += 1

    def put_form(self, form: ev.Form) -> None:
        if form.membership.generation > self.void:
            self.form = form
            self.look()

    def interrupt(self, generation: int) -> None:
        self.void = max(self.void, generation)
        if self.form is not None and self.form.membership.generation <= self.void:
            self.form = None
        if self.life == "joining":
            assert self.group is not None
            self.world.later(0.05, lambda group=self.group: self.give_up(group))

    # Generations.

    def look(self) -> None:
        """Join the generation that is to be formed, if it waits for one."""
        form = self.form
        if self.life != "waiting" or form is None:
            return
        if form.membership.generation <= max(self.generation, self.void):
            return
        self.form = None
        if form.membership.rank_of(self.worker) is None:
            self.leave()
            return
        self.join(form.membership, form.restore, form.after_order)

    def join(self, membership: Membership, restore: Restore, after_order: int) -> None:
        self.life, self.generation = "joining", membership.generation
        self.restore, self.after_order = restore, after_order
        self.report(ev.Joining(0.0, self.worker, membership.generation))
        self.group = self.world.rendezvous(membership)
        self.group.joined[self.worker] = self
        self.world.later(self.world.limits.form_s, lambda group=self.group: self.give_up(group))
        self.world.try_form(self.group)

    restore = Restore()
    after_order = 0

    def give_up(self, group: Group) -> None:
        """Leave a rendezvous that was interrupted, or took too long."""
        if self.alive and self.life == "joining" and self.group is group and not group.formed:
            group.joined.pop(self.worker, None)
            self.broken("the rendezvous was given up")

    def begin(self, rank: int) -> None:
        """Go on, in a group that has formed and with its state."""
        self.life, self.rank, self.newcomer = "training", rank, False
        self.base = self.known = self.done = self.after_order
        self.orders = {n: one for n, one in self.orders.items() if n > self.base}
        self.count()
        if not self.commits:
            self.commit()
        assert self.group is not None
        self.report(ev.Formed(0.0, self.worker, self.group.number, self.step))
        if rank == 0:
            self.world.progress(self, self.training.steps)

    def commit(self) -> None:
        self.commits[self.step] = Training(self.training.steps, self.training.batch)
        while len(self.commits) > 2:
            del self.commits[next(iter(self.commits))]

    def broken(self, why: str) -> None:
        """Tell that the group is lost, and wait for another."""
        self.group, self.life = None, "waiting"
        self.report(
            ev.Broken(0.0, self.worker, self.generation, self.step, tuple(self.commits), why)
        )
        self.look()

    def leave(self) -> None:
        self.life, self.group = "gone", None
        self.world.exits(self)

    # Steps.

    def take_step(self) -> bool:
        """Make one step; returns whether it ended the epoch."""
        length = self.world.length
        epoch, first = self.training.at(length)
        batch = self.training.batch
        entry = Entry(
            epoch, self.step, first, min(batch, length - first), self.generation, batch, 0.1
        )
        self.training = Training((*self.training.steps, entry), batch)
        ends = first + entry.count >= length
        if ends or self.step % self.world.commit_every == 0:
            self.commit()
        if self.rank == 0:
            self.world.progress(self, (entry,))
            if self.step % self.world.save_every == 0:
                self.world.save(self)
        return ends

    def apply(self, due: int) -> None:
        """Do the orders that all ranks know."""
        orders = [self.orders.pop(n) for n in sorted(self.orders) if self.done < n <= due]
        self.base, self.done = max(self.base, due), max(self.done, due)
        for order in orders:
            if order.generation == self.generation and self.life == "training":
                self.do(order)

    def do(self, order: Order) -> None:
        match order.action:
            case Resize(membership):
                if membership.rank_of(self.worker) is None:
                    self.report(ev.Left(0.0, self.worker, membership.generation))
                    self.leave()
                else:
                    self.group = None
                    self.join(membership, Restore(), order.number)
            case Suspend():
                if self.rank == 0:
                    self.world.save(self, at_once=True)
                self.report(ev.Left(0.0, self.worker, self.generation))
                self.leave()
            case Stop():
                self.returned(stopped=True)
            case SetBatch(batch=batch):
                self.training = Training(self.training.steps, batch)
            case Commit():
                self.commit()
                if self.rank == 0:
                    self.world.save(self)
            case _:
                pass

    def returned(self, *, stopped: bool = False) -> None:
        if self.rank == 0:
            self.world.progress(self, self.training.steps)
            self.world.final = self.training.steps
            self.world.stopped = stopped
        self.report(ev.Returned(0.0, self.worker, self.generation, self.step, stopped))
        self.leave()
