"""The runtimes of a simulated cluster: they ask for leases, poll, obey preemptions and give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.wire_types import node_filter_of
from tests.sim.late_messages import Faults, LateMessages
from tests.sim.scheduler_queues import QUEUES, USERS

if TYPE_CHECKING:
    from random import Random

    from stoker_scheduler.core.leases.lease import LeaseState

KERNEL_SETS = ("k0", "k1", "k2", "k3")
FILTERS = tuple(
    (node_filter_of(text),)
    for text in (
        "slow_ranks = 0",
        "free.cpu >= 2",
        "free.gpu < 2 or free.cpu >= 2",
        "free.gpu in (0, 1, 2, 3, 4)",
    )
)
"""Conditions that idle nodes meet."""
POLL_S = 1.0
ASK_WAIT_S = 2.0
BUSY_S = 15.0
UNCONFIRMED_S = 40.0


@dataclass
class Wish:
    """One demand of an owner: ``count`` leases to be had, held for a while and given back."""

    owner: Owner
    requirements: Requirements
    count: int
    hold_s: float
    priority: int
    kernels: str = ""
    preemptible: bool = False
    request_id: str = ""
    had: int = 0


@dataclass
class Owner:
    """A runtime: asks, polls, obeys preemptions, releases."""

    owner_id: str
    job_id: str
    held: dict[str, float] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    wishes: dict[str, Wish] = field(default_factory=dict)
    """The wish that each lease serves."""
    alive: bool = True
    polling: bool = False
    polls: int = 0
    heard: int = 0
    """The number of its newest poll, and of the newest that has arrived."""
    busy_until_s: float = 0.0
    """Until when it says nothing: its interpreter is busy, or stopped."""


class Runtimes(LateMessages, ABC):
    """All runtimes of a world, and what was promised to them."""

    def __init__(self, random: Random, faults: Faults) -> None:
        super().__init__(random, faults)
        self.owners: list[Owner] = []
        self.wishes: list[Wish] = []
        self.answering: dict[str, Wish] = {}
        self.counts: dict[str, int] = {}
        self.grants = 0
        self.grants_in_groups = 0
        self.epoch = 0
        self._numbers = 0

    @abstractmethod
    def feed(self, event: ev.Event) -> None:
        """Hand an event to the scheduler."""

    def owner(self, job_id: str) -> Owner:
        owner = Owner(f"p_{len(self.owners)}", job_id)
        self.owners.append(owner)
        return owner

    def wish(self, owner: Owner) -> Wish:
        """Have ``owner`` want something at random."""
        random = self.random
        resources = random.choice(
            [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 4.0}, {"GPU": 1.0}, {"GPU": 0.5}, {"GPU": 0.3},
             {"CPU": 1.0, "GPU": 2.0}, {"ssd": 1.0}, {"CPU": 64.0}, {"gpu_memory": 6.0 * 2**30}, {}]
        )  # fmt: skip
        background = random.random() < 0.15
        wish = Wish(
            owner,
            make_requirements(
                resources,
                policy=PlacementPolicy.SPREAD if random.random() < 0.2 else PlacementPolicy.HYBRID,
                extenders=("x",) if random.random() < 0.2 else (),
                node_filters=random.choice(FILTERS) if random.random() < 0.3 else (),
                background=background,
            ),
            random.choice([1, 1, 2, 6]),
            random.uniform(0.05, 3.0),
            random.choice([0, 0, 0, 1]),
            random.choice(["", *KERNEL_SETS]),
            background or random.random() < 0.5,
        )
        self.wishes.append(wish)
        self.ask(wish)
        return wish

    def ask(self, wish: Wish) -> None:
        if not wish.owner.alive or wish.had >= wish.count:
            return
        if not wish.request_id:
            self._numbers += 1
            wish.request_id = f"r_{self._numbers}"
        self._send_ask(wish, wish.request_id)

    def _send_ask(self, wish: Wish, request_id: str) -> None:
        count = self.counts.setdefault(request_id, wish.count - wish.had)

        def arrive() -> None:
            self.answering[request_id] = wish
            self.feed(
                ev.LeaseRequested(
                    at_s=self.at_s,
                    request_id=request_id,
                    owner_id=wish.owner.owner_id,
                    job_id=wish.owner.job_id,
                    requirements=wish.requirements,
                    class_key=f"{wish.requirements!r}/{wish.priority}/{wish.preemptible}",
                    count=count,
                    deadline_s=self.at_s + ASK_WAIT_S,
                    priority=wish.priority,
                    kernels=wish.kernels,
                    user=USERS[wish.owner.job_id],
                    queue=QUEUES[wish.owner.job_id],
                    preemptible=wish.preemptible,
                    preemption_grace_s=0.5,
                )
            )

        def again() -> None:
            if wish.owner.alive and wish.request_id == request_id:
                self._send_ask(wish, request_id)

        if wish.had < wish.count:
            self.message(arrive)
            self.later(ASK_WAIT_S + 5.5, again)

    def _answer(self, wish: Wish, request_id: str, lease_ids: tuple[str, ...]) -> None:
        owner = wish.owner

        def arrive() -> None:
            if wish.request_id != request_id or not owner.alive:
                return
            wish.request_id = ""
            for lease_id in lease_ids:
                if lease_id in owner.ever:
                    # Only a new leader may not know which request got it in the end.
                    granted_by = int(lease_id.rsplit(".", 2)[1], 16)
                    assert granted_by < self.epoch, f"{lease_id} was granted twice"
                    continue
                owner.ever.add(lease_id)
                owner.held[lease_id] = self.at_s
                owner.wishes[lease_id] = wish
                self.grants += 1
                self.grants_in_groups += bool(wish.requirements.group_id)
                wish.had += 1
                self.later(wish.hold_s, lambda i=lease_id: self._done(owner, i))
            if not owner.polling:
                owner.polling = True
                self._poll(owner)
            self.ask(wish)

        self.message(arrive)

    def _done(self, owner: Owner, lease_id: str) -> None:
        """Work on a lease is over: it idles for a while, or goes back at once."""
        if lease_id not in owner.held or not owner.alive:
            return
        if not self.calm and self.random.random() < 0.3:
            owner.idle.add(lease_id)
            self.later(2.0, lambda: self._give_back(owner, lease_id))
        else:
            self._give_back(owner, lease_id)

    def _give_back(self, owner: Owner, lease_id: str) -> None:
        if lease_id in owner.held and owner.alive:
            del owner.held[lease_id]
            owner.idle.discard(lease_id)
            released = (lease_id,)
            self.message(lambda: self.feed(ev.LeaseReleased(at_s=self.at_s, lease_ids=released)))

    def _poll(self, owner: Owner) -> None:
        if not owner.alive:
            return
        if self.at_s < owner.busy_until_s:
            self.later(POLL_S, lambda: self._poll(owner))
            return
        if not self.calm and self.random.random() < 0.02:
            owner.busy_until_s = self.at_s + self.random.uniform(1.0, BUSY_S)
        lease_ids = tuple(owner.held)
        idle = tuple(i for i in lease_ids if i in owner.idle)
        owner.polls = number = owner.polls + 1

        def polled() -> None:
            if number > owner.heard:
                owner.heard = number
                polled = ev.OwnerPolled(
                    at_s=self.at_s,
                    owner_id=owner.owner_id,
                    lease_ids=lease_ids,
                    idle_lease_ids=idle,
                )
                self.feed(polled)

        self.message(polled)
        self.later(POLL_S, lambda: self._poll(owner))

    def vanish(self, owner: Owner) -> None:
        """The owner dies; its nodelet or the gcs reports it."""
        owner.alive = False
        self.report_lost(owner)

    def report_lost(self, owner: Owner) -> None:
        """Tell the present leader that an owner ended."""
        lost = lambda: ev.OwnerLost(at_s=self.at_s, owner_id=owner.owner_id)  # noqa: E731
        self.later(self.random.uniform(0.0, 2.0), lambda: self.feed(lost()))

    def check_kept(self, lease: LeaseState, reason: str) -> None:
        """Check that no owner that lives loses what it has because it is silent."""
        holders = [o for o in self.owners if o.owner_id == lease.owner_id and o.alive]
        kept = holders and lease.lease_id in holders[0].held and not lease.preempted
        assert not (kept and reason.startswith("its owner")), f"{lease.lease_id}: {reason}"

    def _obey(self, owner: Owner, lease_ids: tuple[str, ...]) -> None:
        for lease_id in lease_ids:
            if lease_id in owner.idle and self.at_s >= owner.busy_until_s:
                self._give_back(owner, lease_id)

    def _lose(self, owner: Owner, lease_ids: tuple[str, ...]) -> None:
        for lease_id in lease_ids:
            owner.held.pop(lease_id, None)
            owner.idle.discard(lease_id)

    def preempted(self, lease_id: str) -> None:
        """Its owner sees that a worker has ended, and that it is to try again."""
        for owner in self.owners:
            if owner.alive and lease_id in owner.held:
                self._lose(owner, (lease_id,))
                wish = owner.wishes[lease_id]
                wish.had -= 1
                self.ask(wish)

    def block(self) -> None:
        """Some held lease's worker waits in get for a while."""
        held = [i for owner in self.owners if owner.alive for i in owner.held]
        if held:
            lease_id = self.random.choice(held)
            self.message(lambda: self.feed(ev.LeaseBlocked(at_s=self.at_s, lease_id=lease_id)))
            self.later(
                self.random.uniform(0.0, 2.0),
                lambda: self.message(
                    lambda: self.feed(ev.LeaseUnblocked(at_s=self.at_s, lease_id=lease_id))
                ),
            )

    def _owner(self, owner_id: str) -> Owner | None:
        return next((o for o in self.owners if o.owner_id == owner_id and o.alive), None)
