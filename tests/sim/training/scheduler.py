"""Fake scheduler of an elastic job: it offers slots, takes them back, and preempts who does not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_train.elastic.core import events as ev

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Slot
    from tests.sim.training.world import World

GRACE_S = 10.0


class Scheduler:
    """The scheduler of a world: which of its ``places`` the job has, and the open offer."""

    def __init__(self, world: World, places: list[Slot]) -> None:
        self.world, self.places = world, places
        self.granted: tuple[Slot, ...] = ()
        self.offer: ev.Offered | None = None
        self.number = 0
        self.unwanted: tuple[Slot, ...] = ()
        self.spares = 0
        self.avoided: frozenset[str] = frozenset()

    def hear(self, unwanted: tuple[Slot, ...], spares: int, avoided: frozenset[str]) -> None:
        """Hear what the job gives back, how many places more it asks for, and which nodes it avoids.

        What follows comes a while later, as by hints.
        """
        if avoided - self.avoided:
            self.world.later(self.world.random.uniform(0.5, 3.0), self.move_away)
        self.avoided = avoided
        if unwanted and unwanted != self.unwanted:
            self.world.later(self.world.random.uniform(0.0, 2.0), lambda: self.take_back(unwanted))
        if spares > self.spares:
            self.world.later(self.world.random.uniform(0.0, 1.5), self.lend)
        self.unwanted, self.spares = unwanted, spares

    def take_back(self, slots: tuple[Slot, ...]) -> None:
        """Take places that the job gave back."""
        gone = set(slots) & set(self.granted)
        if not gone or self.offer is not None:
            self.unwanted = ()  # heard again
            return
        for one in self.world.replicas.values():
            if one.alive and one.slot in gone and one.worker in self.world.heard and one.group:
                self.world.breaks(f"{one.slot} was given back while {one.worker} trains")
        self.world.outcome.faults["given back"] += len(gone)
        self.take_slots(gone)

    def move_away(self) -> None:
        """Offer other places for those on nodes that the job avoids, where there are enough."""
        if self.world.over or self.offer is not None or self.world.state is None:
            return
        keep = [one for one in self.granted if one.node_id not in self.avoided]
        free = [one for one in self.places if one not in self.granted]
        free = [one for one in free if one.node_id not in self.avoided]
        missing = len(self.granted) - len(keep)
        if 0 < missing <= len(free):
            self.world.outcome.faults["moved away"] += missing
            self.make_offer((*keep, *free[:missing]))

    def lend(self) -> None:
        """Offer places for newcomers of ranks that are to be replaced."""
        free = [one for one in self.places if one not in self.granted]
        if not self.spares or not free or self.world.over:
            return
        if self.offer is None and self.world.state is not None:
            self.make_offer((*self.granted, *free[: self.spares]))
        else:
            self.world.later(0.5, self.lend)

    @property
    def held(self) -> set[Slot]:
        """The slots that nobody else can have."""
        return set(self.granted) | set(self.offer.slots if self.offer is not None else ())

    def run(self) -> None:
        """Offer more or fewer slots, again and again."""
        if self.world.over:
            return
        if self.offer is None and self.world.state is not None:
            calm = self.world.now_s > self.world.faults_until_s + 20
            count = len(self.places) if calm else self.world.random.randint(0, len(self.places))
            slots = tuple(
                self.world.random.sample(self.places, max(count, self.world.limits.min_replicas))
            )
            keep = [one for one in self.granted if one in slots]
            slots = (*keep, *(one for one in slots if one not in keep))
            if set(slots) != set(self.granted):
                self.make_offer(slots)
        self.world.later(self.world.random.uniform(0.5, 12.0), self.run)

    def make_offer(self, slots: tuple[Slot, ...]) -> None:
        self.number += 1
        withdraws = not set(self.granted) <= set(slots)
        offer = self.offer = ev.Offered(
            self.world.now_s, self.number, slots, withdraws, self.world.now_s + GRACE_S
        )
        self.world.send(("scheduler", 0), lambda: self.tell_offer(offer))
        self.world.later(GRACE_S, lambda: self.offer_is_late(offer))

    def tell_offer(self, offer: ev.Offered) -> None:
        if self.world.state is not None and self.offer is offer:
            self.world.step(replace(offer, at_s=self.world.now_s))

    def offer_is_late(self, offer: ev.Offered) -> None:
        if self.offer is not offer:
            return
        self.offer = None
        self.world.send(
            ("scheduler", 0),
            lambda: (
                self.world.state and self.world.step(ev.Withdrawn(self.world.now_s, offer.number))
            ),
        )
        if offer.withdraws:
            self.world.outcome.faults["preempted"] += 1
            self.take_slots(set(self.granted))

    def accept(self, number: int) -> None:
        if self.offer is None or self.offer.number != number:
            return
        offer, self.offer = self.offer, None
        left = set(self.granted) - set(offer.slots)
        self.granted = offer.slots
        for one in self.world.replicas.values():
            if one.alive and one.slot in left:
                if (
                    one.worker in self.world.heard
                    and one.group is not None
                    and one.life == "training"
                ):
                    self.world.breaks(f"{one.slot} was given back while its replica trained")
                self.world.later(
                    self.world.random.uniform(0.0, 0.5), lambda one=one: self.world.die(one)
                )

    def take_slots(self, slots: set[Slot]) -> None:
        """Take slots away: what runs there ends, and the job is told."""
        self.granted = tuple(one for one in self.granted if one not in slots)
        for one in self.world.replicas.values():
            if one.alive and one.slot in slots:
                self.world.die(one)
        left = self.granted
        self.world.send(
            ("scheduler", 0),
            lambda: self.world.state and self.world.step(ev.Granted(self.world.now_s, left)),
        )
