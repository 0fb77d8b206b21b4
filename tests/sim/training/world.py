"""An elastic job in virtual time: the real generation machine and ledger, fake replicas, faults.

``simulate(seed)`` is the entry. Messages between controller and replicas keep their order on each link, as
the product's do; they are late, doubled, or cut off, which ends the replica. Processes freeze and die at any
moment, nodes and the controller too. After every event the invariants of :meth:`World.check` hold.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core import machine
from stoker_train.elastic.core.ledger import Entry, Ledger
from stoker_train.elastic.core.membership import Membership, Slot
from stoker_train.elastic.core.phases import OVER, Life, Limits, Phase, State
from stoker_train.elastic.core.places import avoided, unwanted
from stoker_train.elastic.core.replacing import spares
from tests.sim.training.faults import Faults
from tests.sim.training.records import Records
from tests.sim.training.replicas import Group, Replica, Steps, Training
from tests.sim.training.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_S = 0.1
TICK_S = 0.2
SILENT_S = 3.0
"""A replica that says nothing for so long is ended by its controller."""
END_S = 3000.0
"""No job takes so long, once the faults are over."""


class BrokenInvariantError(AssertionError):
    """A promise of the product that did not hold in a world."""


@dataclass(slots=True)
class Outcome:
    """What one world saw: messages, faults by kind, transitions, and how it ended."""

    messages: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    transitions: set[tuple[str, str]] = field(default_factory=set)
    phase: str = ""
    error: str = ""
    steps: int = 0
    generations: int = 0


class World:
    """One job, from its start to its end."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.now_s, self._count = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self.outcome = Outcome()
        self.log: list[str] | None = None
        self.nodes = [f"n{i}" for i in range(rng.randint(1, 4))]
        places = [Slot("g", i, rng.choice(self.nodes)) for i in range(rng.randint(2, 8))]
        self.fatal = rng.random() < 0.2
        """Whether the loop may raise, the memory be too small, or another controller come."""
        self.limits = Limits(
            min_replicas=rng.choice([1, 1, 1, 2]),
            start_s=20.0,
            settle_s=9.0,
            form_s=6.0,
            max_replicas=len(places),
            replace_s=rng.choice([2.0, 10.0, 30.0]),
            max_start_failures=6 if rng.random() < 0.7 else 2,
            max_breaks=10_000,
        )
        self.length, self.epochs = rng.randint(40, 400), rng.randint(1, 3)
        self.commit_every = rng.choice([1, 2, 5, 10])
        self.save_every = rng.choice([5, 10, 40])
        self.delay_s = rng.choice([0.005, 0.05, 0.5])
        self.noise = rng.choice([0.0, 0.02, 0.1])
        """How often a message is sent twice."""
        self.faults_until_s = rng.choice([0.0, 20.0, 60.0, 120.0])
        self.bad_slot = rng.choice(places) if rng.random() < 0.2 and len(places) > 3 else None
        self.bad_until_s = rng.choice([END_S, 30.0, 90.0])
        """No replica starts in the bad slot before."""
        self.odd_node = (
            rng.choice(self.nodes) if rng.random() < 0.1 and len(self.nodes) > 2 else None
        )
        self.write_s = 3.0 if seed % 4 == 0 else 0.05
        """The longest that the gcs takes for a record."""
        if self.odd_node:
            self.limits = replace(self.limits, min_replicas=1)
        elif self.bad_slot and self.bad_until_s < END_S and rng.random() < 0.5:
            # It is needed, and to be tried again for longer than it is bad.
            self.limits = replace(self.limits, min_replicas=len(places), max_chances=10)
        self.scheduler, self.faults = Scheduler(self, places), Faults(self)
        # What lives outside of the controller.
        self.record: Membership | None = None
        self.records = Records(self)
        self.checkpoints: list[Training] = []
        self.replicas: dict[int, Replica] = {}
        self.groups: dict[int, Group] = {}
        self.final: Steps | None = None
        self.stopped = False
        self.begun: set[int] = set()
        """Generations whose rank 0 has said that it begins."""
        self.newest_step_by = 0
        """The newest generation that has made a step."""
        # The controller.
        self.attempt = 0
        self.state: State | None = None
        self.ledger = Ledger()
        self.newest = 0
        self._links: dict[tuple[str, int], float] = {}
        self.heard: dict[int, float] = {}
        self.replaced: dict[int, float] = {}
        """Replicas that somebody wants to have replaced, and since when."""
        self.over = False

    # Time and messages.

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call))

    def send(self, link: tuple[str, int], call: Callable[[], None]) -> None:
        """Deliver a message: late, after those before it on its link, perhaps twice."""
        delay = self.random.expovariate(1 / self.delay_s)
        at_s = max(self._links.get(link, 0.0), self.now_s + delay)
        for _ in range(2 if self.random.random() < self.noise else 1):
            self.at(at_s, call)
        self._links[link] = at_s
        self.outcome.messages += 1

    def report(self, replica: Replica, event: ev.Event) -> None:
        attempt = self.attempt

        def come() -> None:
            # What is on the way comes, even from one that has died since.
            if attempt == self.attempt and self.state is not None:
                if replica.worker in self.heard:
                    self.heard[replica.worker] = self.now_s
                self.step(replace(event, at_s=self.now_s))

        self.send(("up", replica.worker), come)

    def run(self) -> Outcome:
        self.start_controller()
        self.scheduler.run()
        self.tick()
        self.train()
        if self.faults_until_s:
            self.faults.run()
        while not self.over:
            if not self._heap:
                self.breaks("nothing happens any more")
            self.now_s, _, call = heapq.heappop(self._heap)
            if self.now_s > END_S:
                self.breaks("the job does not end")
            call()
        self.end()
        return self.outcome

    # The controller.

    def start_controller(self) -> None:
        self.attempt += 1
        generation = self.record.generation if self.record is not None else 0
        self.state = machine.begin(
            "job",
            self.limits,
            generation=generation,
            first_worker=self.attempt * 1000 + 1,
            has_trained=generation > 0,
            at_s=self.now_s,
        )
        self.ledger = self.records.take(self.attempt)
        self.newest = 0
        self.final = None  # of what was said to a controller that is gone
        self.heard = {}
        if self.scheduler.granted:
            self.step(ev.Granted(self.now_s, self.scheduler.granted))

    def tick(self) -> None:
        if self.state is not None:
            for worker, heard_s in list(self.heard.items()):
                known = self.state.workers.get(worker)
                if known is None or known.life is Life.STARTING:
                    continue
                if self.now_s - heard_s > SILENT_S:
                    self.kill(worker)
                    self.step(ev.Died(self.now_s, worker, "it said nothing"))
            self.step(ev.Tick(self.now_s))
        for replica in self.replicas.values():
            if replica.alive and not replica.stopped:
                self.beat(replica)
        if not self.over:
            self.later(TICK_S, self.tick)

    def beat(self, replica: Replica) -> None:
        def come() -> None:
            if replica.worker in self.heard:
                self.heard[replica.worker] = self.now_s

        self.send(("up", replica.worker), come)

    def step(self, event: ev.Event) -> None:
        if self.state is None or self.over or self.state.phase in OVER:
            return
        self.state, commands = machine.step(self.state, event)
        if self.log is not None:
            self.log.append(f"{self.now_s:.2f} {self.state.phase} {event}")
        for command in commands:
            if self.log is not None:
                self.log.append(f"{self.now_s:.2f}   {command}")
            self.do(command)
        if isinstance(event, ev.Formed):
            self.check_ledger_goes_on(event)
        self.check()
        self.scheduler.hear(unwanted(self.state), spares(self.state), avoided(self.state))

    def do(self, command: ev.Command) -> None:
        match command:
            case ev.Launch():
                self.launch(command.worker, command.slot)
            case ev.Kill():
                self.kill(command.worker)
            case ev.WriteMembership():
                self.write(command)
            case ev.Send():
                for worker in command.workers:
                    self.tell(worker, lambda one, o=command.order: one.put_order(o))
            case ev.Form():
                for worker in command.workers:
                    self.tell(worker, lambda one, form=command: one.put_form(form))
            case ev.Interrupt():
                for worker in command.workers:
                    self.tell(worker, lambda one, g=command.generation: one.interrupt(g))
            case ev.Accept():
                self.scheduler.accept(command.number)
            case ev.Void():
                self.newest = max(self.newest, command.generation)
                self.ledger.truncate(command.step)
            case ev.Turn():
                self.outcome.transitions.add((command.before, command.after))
            case ev.Say():
                pass
            case ev.End():
                self.outcome.error = command.error
                self.over = True

    def launch(self, worker: int, slot: Slot) -> None:
        self.heard[worker] = self.now_s
        if self.occupied(slot):
            self.breaks(f"two replicas in {slot}")
        replica = self.replicas[worker] = Replica(self, worker, slot)
        if slot not in self.scheduler.held:  # it was taken while the controller did not know
            self.die(replica)
            return
        starts_s = self.random.uniform(0.2, 4.0)
        if slot == self.bad_slot and self.now_s < self.bad_until_s:
            self.later(starts_s, lambda: self.cannot_start(replica))
        else:
            self.later(starts_s, lambda: replica.alive and replica.ready())

    def occupied(self, slot: Slot) -> bool:
        state = self.state
        known = state.workers if state is not None else {}
        return (
            any(
                one.alive and one.slot == slot and one.worker in known
                for one in self.replicas.values()
            )
            and sum(one.slot == slot for one in known.values()) > 1
        )

    def cannot_start(self, replica: Replica) -> None:
        if replica.alive:
            replica.report(ev.Failed(0.0, replica.worker, "ImportError: no module", "start"))

    def code_of(self, slot: Slot) -> str:
        return "odd" if slot.node_id == self.odd_node else "code"

    def kill(self, worker: int) -> None:
        self.heard.pop(worker, None)
        replica = self.replicas.get(worker)
        if replica is not None and replica.alive:
            self.later(self.random.uniform(0.0, 0.1), lambda: self.die(replica, told=False))

    def tell(self, worker: int, call: Callable[[Replica], None]) -> None:
        replica = self.replicas.get(worker)
        if replica is None:
            return

        def come() -> None:
            if not replica.alive:
                return
            if replica.stopped:  # its sockets keep what comes
                self.later(0.5, come)
                return
            call(replica)

        self.send(("down", worker), come)

    def write(self, command: ev.WriteMembership) -> None:
        """Write the record by compare-and-set, and answer a moment later."""
        self.check_newcomers_come_first(command.membership)
        present = self.record.generation if self.record is not None else 0
        fits = present == command.after
        if fits:
            self.record = command.membership
        number, attempt = command.membership.generation, self.attempt
        answer = ev.Wrote if fits else ev.Fenced

        def come() -> None:
            if attempt == self.attempt and self.state is not None:
                self.step(answer(self.now_s, number))

        self.later(self.random.uniform(0.0, self.write_s), come)

    def progress(self, replica: Replica, steps: Steps) -> None:
        """Add what rank 0 has done to the ledger, as the controller's accounts do."""
        generation, attempt = replica.generation, self.attempt

        def come() -> None:
            if attempt == self.attempt and generation >= self.newest:
                self.newest = generation
                self.ledger.extend(steps)
                if self.random.random() < 0.5:
                    self.records.keep(self.ledger)

        self.send(("up", replica.worker), come)

    # Replicas together.

    def rendezvous(self, membership: Membership) -> Group:
        group = self.groups.get(membership.generation)
        if group is None:
            group = self.groups[membership.generation] = Group(membership, since_s=self.now_s)
        elif group.membership != membership:
            self.breaks(f"generation {membership.generation} has two memberships")
        return group

    def try_form(self, group: Group) -> None:
        """Form a group once all its ranks are there; bring its state."""
        members = group.membership.members
        if len(group.joined) < len(members) or any(
            not one.alive or one.stopped for one in group.joined.values()
        ):
            return
        group.formed = True
        ranks, source = group.ranks, group.ranks[0]
        restore = source.restore
        if restore.step is not None:
            if restore.step not in source.commits:
                self.breaks(f"rank 0 has no commit of step {restore.step}")
            state = source.commits[restore.step]
        elif restore.durable:
            state = self.checkpoints[-1] if self.checkpoints else Training()
        else:
            old = [one for one in ranks if not one.newcomer]
            if any(one.training != old[0].training for one in old):
                self.breaks(f"survivors differ at the start of generation {group.number}")
            state = source.training
        for rank, one in enumerate(ranks):
            one.training = Training(state.steps, state.batch)
            if restore.step is None or one.newcomer:
                one.commits = {n: c for n, c in one.commits.items() if n <= len(state.steps)}
            one.commits = {n: c for n, c in one.commits.items() if c.steps == state.steps[:n]}
            one.begin(rank)

    def train(self) -> None:
        """Have every group that is whole make a step."""
        for group in list(self.groups.values()):
            if group.formed and not group.broken:
                self.group_step(group)
        if not self.over:
            self.later(STEP_S, self.train)

    def group_step(self, group: Group) -> None:
        ranks = [one for one in group.ranks if one.group is group]
        if not ranks:
            group.broken = True
            return
        whole = len(ranks) == len(group.membership.members)
        if not whole or any(not one.alive for one in ranks):
            self.break_group(group, ranks)
            return
        if any(one.stopped for one in ranks):
            return  # all wait for it
        if any(one.void >= group.number for one in ranks):  # the controller has given it up
            group.broken = True
            for one in ranks:
                self.later(
                    self.random.uniform(0.0, 0.5), lambda one=one: self.see_broken(one, group)
                )
            return
        if group.number < self.newest_step_by:
            self.breaks(f"generation {group.number} trains after {self.newest_step_by}")
        self.newest_step_by = group.number
        if len({one.training.steps for one in ranks}) > 1:
            self.breaks(f"the ranks of generation {group.number} differ")
        self.boundary(ranks, ranks)

    def boundary(self, ranks: list[Replica], through: list[Replica]) -> None:
        """Make a step, and do what all ranks were ordered; ``through`` are those who come to its end."""
        due = min(one.known for one in ranks)
        epoch_ends = False
        for one in through:
            epoch_ends = one.take_step()
        if epoch_ends and len(through) < len(ranks):
            return  # they wait in the epoch's barrier
        for one in through:
            if epoch_ends and one.training.at(self.length)[0] >= self.epochs:
                one.returned()
            else:
                one.apply(due)

    def break_group(self, group: Group, ranks: list[Replica]) -> None:
        """Some ranks are gone: those that are left see it, perhaps after some have ended the step."""
        group.broken = True
        alive = [one for one in ranks if one.alive]
        if len(ranks) == len(group.membership.members) and self.random.random() < 0.5:
            self.boundary(ranks, [one for one in alive if self.random.random() < 0.5])
        for one in alive:
            if one.group is group:
                slow = self.limits.form_s if self.random.random() < 0.1 else 0.5
                self.later(
                    self.random.uniform(0.0, slow),
                    lambda one=one: self.see_broken(one, group),
                )

    def see_broken(self, one: Replica, group: Group) -> None:
        if one.alive and one.group is group and one.life == "training":
            one.broken("Connection closed by peer")

    def save(self, replica: Replica, *, at_once: bool = False) -> None:
        """Write a checkpoint; it is there a moment later, or never."""
        state = Training(replica.training.steps, replica.training.batch)

        def there() -> None:
            if replica.alive or at_once:
                self.checkpoints.append(state)
                # By generation, as the product's are by number of writing: the newest counts.

        if at_once:
            there()
        else:
            self.later(self.random.uniform(0.0, 1.0), there)

    def exits(self, replica: Replica) -> None:
        self.later(0.05, lambda: self.die(replica))

    def die(self, replica: Replica, *, told: bool = True) -> None:
        if not replica.alive:
            return
        replica.alive = False
        attempt = self.attempt
        group = replica.group
        if group is not None and not group.formed:
            group.joined.pop(replica.worker, None)

        def come() -> None:
            if attempt == self.attempt and self.heard.pop(replica.worker, None) is not None:
                self.step(ev.Died(self.now_s, replica.worker, "its process is gone"))

        if told:
            self.send(("up", replica.worker), come)

    # Promises.

    def breaks(self, what: str) -> None:
        raise BrokenInvariantError(f"at {self.now_s:.2f} s: {what}")

    def check(self) -> None:
        state = self.state
        assert state is not None
        slots = Counter(one.slot for one in state.workers.values())
        twice = [slot for slot, count in slots.items() if count > 1]
        if twice:
            self.breaks(f"two replicas in {twice[0]}")
        live = [
            group.number
            for group in self.groups.values()
            if group.formed
            and not group.broken
            and all(one.group is group for one in group.ranks)
            # One that was ended may be alive for another moment: what it says does not count.
            and any(one.alive and one.worker in self.heard for one in group.ranks)
        ]
        if len(live) > 1:
            self.breaks(f"generations {live} live together")
        numbers = [one.generation for one in (state.membership, state.pending) if one is not None]
        if sorted(set(numbers)) != numbers:
            self.breaks(f"generation {numbers[1]} comes after {numbers[0]}")
        problems = self.ledger.verify()
        if problems:
            self.breaks(f"the ledger: {problems[0]}")

    def check_ledger_goes_on(self, event: ev.Formed) -> None:
        """Rank 0 begins where the ledger ends, or later: what was gone back behind is void."""
        assert self.state is not None
        one = self.replicas[event.worker]
        known = (self.state.pending, self.state.membership)
        counts = any(m is not None and m.generation == event.generation for m in known)
        if counts and one.rank == 0 and event.generation not in self.begun:
            self.begun.add(event.generation)
            if self.ledger.next_step > event.step:
                self.breaks(
                    f"the ledger has {self.ledger.next_step} steps as rank 0 begins at {event.step}"
                )

    def check_newcomers_come_first(self, membership: Membership) -> None:
        """A rank that is to be replaced stays until its newcomer is in, or for as long as was promised."""
        state = self.state
        assert state is not None
        if state.phase is not Phase.DRAINING:
            return
        wanted = state.offer.slots if state.offer is not None else state.slots
        left = [
            number
            for number, one in state.workers.items()
            if one.life is Life.MEMBER and one.slot in wanted and membership.rank_of(number) is None
        ]
        early = [
            number
            for number in left
            if self.now_s - self.replaced.get(number, self.now_s) <= self.limits.replace_s
        ]
        newcomers = sum(not one.survivor for one in membership.members)
        is_less = len(membership.members) < min(state.share, len(wanted))
        if len(early) > newcomers and is_less and len(wanted) < self.limits.max_replicas:
            self.breaks(f"{early} leave before {newcomers} newcomers")
        self.outcome.faults["newcomer first"] += min(len(early), newcomers)

    def end(self) -> None:
        assert self.state is not None
        out, state = self.outcome, self.state
        out.phase, out.generations = str(state.phase), state.generation
        # What was on the way to the accounts is read before the result is made.
        while self._heap:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
        if any(one.alive for one in self.replicas.values()):
            self.breaks("a replica is left")
        if state.workers:
            self.breaks("the machine still knows replicas")
        if state.has_trained and "could start" in state.error:
            self.breaks(f"a job that has trained fails of places: {state.error}")
        if state.phase is Phase.FINISHED:
            self.check_samples()
        out.steps = len(self.ledger)

    def check_samples(self) -> None:
        """Compare what the model was trained by with the ledger, and that with the epochs."""
        assert self.state is not None
        if self.faults.returned_early or (self.final is None and self.state.stopping is not None):
            return  # nothing is promised of a loop that ends early, or was stopped while nobody trained
        if self.final is None:
            self.breaks("no rank 0 has returned")
            return
        entries = self.ledger.entries
        if tuple(_essence(one) for one in entries) != tuple(_essence(one) for one in self.final):
            pairs = zip(entries, self.final, strict=False)
            differ = next((pair for pair in pairs if _essence(pair[0]) != _essence(pair[1])), None)
            self.breaks(
                f"the ledger has {len(entries)} steps, the model {len(self.final)}: {differ}"
            )
        for epoch in range(self.epochs):
            self.ledger.set_length(epoch, self.length)
        if not self.stopped:
            self.ledger.finish()
        problems = self.ledger.verify()
        if problems:
            self.breaks(f"the ledger: {problems[0]}")


def _essence(entry: Entry) -> tuple[int, ...]:
    return entry.epoch, entry.step, entry.first, entry.count, entry.generation


def simulate(seed: int) -> Outcome:
    """Run one world; BrokenInvariantError names the seed and what was broken."""
    world = World(seed)
    try:
        return world.run()
    except AssertionError as error:
        raise BrokenInvariantError(f"seed {seed}: {error}") from error
