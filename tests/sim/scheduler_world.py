"""A seeded world around the real scheduler core: fake nodes and owners, virtual time, and faults.

Messages between scheduler, nodes and owners are late, lost and doubled; nodes crash and come back
under a new incarnation; owners vanish; jobs end; the scheduler itself dies and its successor adopts
what the nodes hold. After every event the core's invariants are checked, and so are those that only
the world can see: no node is ever ordered to use a GPU twice, and no owner gets one lease twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.leases.lifecycle import request_id_of
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.nodes import Health, NodeSpec, make_node_spec
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.state import SchedulingPolicy, State
from tests.sim.late_messages import Faults
from tests.sim.scheduler_runtimes import KERNEL_SETS, Runtimes

START_TIMEOUT_S = 3.0


@dataclass
class FakeNode:
    """A nodelet: what it holds, and what it must refuse."""

    spec: NodeSpec
    held: dict[str, dict[int, int]] = field(default_factory=dict)
    facts: dict[str, ev.LeaseAdopted] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    epoch: int = 0
    up: bool = True


class World(Runtimes):
    """One run. ``run`` goes through chaos, then calm; ``finish`` checks that nothing is left."""

    def __init__(self, seed: int, *, faults: Faults | None = None, nodes: int = 4) -> None:
        super().__init__(Random(seed), faults or Faults())
        self.log: list[ev.Event] = []
        self.commands: list[cmd.Command] = []
        self.state = State()
        self.nodes: dict[str, FakeNode] = {}
        self.granted: dict[str, dict[str, None]] = {}
        self._wake_s = 0.0
        self._lead()
        for index in range(nodes):
            resources = self.random.choice(
                [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0, "ssd": 1.0}]
            )
            spec = make_node_spec(f"n_{index}", resources)
            self.nodes[spec.node_id] = FakeNode(spec)
            self.feed(ev.NodeJoined(at_s=0.0, spec=spec))

    # The scheduler's shell

    def _lead(self) -> None:
        self.epoch += 1
        policy = SchedulingPolicy(lease_ttl_s=5.0, infeasible_grace_s=1.0, reserve_after_s=2.0)
        self.state = State(policy=policy, term=f"{self.epoch:x}")
        self.log = []
        self.commands = []

    def take_over(self) -> None:
        """The scheduler dies; the next one asks the nodes what they hold."""
        waiting = list(self.answering.values())
        self.answering = {}
        # A lease that another request's owner claimed is known to the next leader as the first's;
        # the owner's repeated request then gets another, and this one ends unrenewed.
        self.granted = {
            request_id: {i: None for i in granted if request_id_of(i) == request_id}
            for request_id, granted in self.granted.items()
        }
        self._lead()
        for node in self.nodes.values():
            if node.up:
                node.epoch = (
                    self.epoch
                )  # fenced first, so that no late start of the old one slips in
                self.feed(ev.NodeJoined(at_s=self.at_s, spec=node.spec))
                for lease_id in node.held:
                    self.feed(node.facts[lease_id])
        for wish in waiting:
            self.later(self.random.uniform(0.0, 0.5), lambda wish=wish: self.ask(wish))

    def feed(self, event: ev.Event) -> None:
        self.log.append(event)
        out = step(self.state, event)
        self.commands.extend(out)
        self.state.check()
        for command in out:
            self._execute(command, self.epoch)

    def _execute(self, command: cmd.Command, epoch: int) -> None:
        match command:
            case cmd.StartWorker():
                self._send_start(command, epoch)
            case cmd.ReleaseLease():
                self._send_release(command, epoch)
            case cmd.WakeAt(at_s=at_s):
                self._wake_s = at_s
                self.later(max(0.0, at_s - self.at_s), lambda: self._tick(epoch, at_s))
            case cmd.Reply(request_id=request_id, lease_ids=lease_ids):
                granted = self.granted.setdefault(request_id, {})
                granted.update(dict.fromkeys(lease_ids))
                leases = self.state.leases
                living = [i for i in granted if i in leases and leases[i].phase is Phase.HELD]
                assert len(living) <= self.counts[request_id], f"{request_id} got {living}"
                wish = self.answering.pop(request_id, None)
                if wish is not None:
                    self._answer(wish, request_id, lease_ids)
            case cmd.Reject(request_id=request_id):
                wish = self.answering.pop(request_id, None)
                if wish is not None:
                    wish.count = wish.had  # given up
            case cmd.Preempt(owner_id=owner_id, lease_ids=lease_ids):
                owner = self._owner(owner_id)
                if owner is not None:
                    self.message(lambda: self._obey(owner, lease_ids))
            case cmd.Lost(owner_id=owner_id, lease_ids=lease_ids):
                owner = self._owner(owner_id)
                if owner is not None:
                    self.message(lambda: self._lose(owner, lease_ids))

    def _tick(self, epoch: int, wake_s: float) -> None:
        if epoch == self.epoch and wake_s == self._wake_s:
            self.feed(ev.Tick(at_s=self.at_s))

    def _send_start(self, command: cmd.StartWorker, epoch: int) -> None:
        lease = self.state.leases[command.lease_id]
        node = self.nodes[command.node_id]
        facts = ev.LeaseAdopted(
            at_s=self.at_s,
            lease_id=lease.lease_id,
            owner_id=lease.owner_id,
            job_id=lease.job_id,
            kind=lease.kind,
            node_id=lease.node_id,
            incarnation=lease.incarnation,
            requirements=lease.requirements,
            gpus=dict(lease.gpus),
        )
        over = [False]

        def settle(event: ev.Event) -> None:
            if not over[0] and epoch == self.epoch:
                over[0] = True
                self.feed(event)

        def answer(failure: ev.StartFailure | None) -> None:
            at_s = self.at_s
            if failure is None:
                settle(ev.LeaseStarted(at_s=at_s, lease_id=facts.lease_id))
            else:
                settle(ev.LeaseStartFailed(at_s=at_s, lease_id=facts.lease_id, failure=failure))

        def arrive() -> None:
            if node.up:
                failure = self._start_on(node, facts, epoch)
                self.message(lambda: answer(failure))

        self.message(arrive)
        self.later(START_TIMEOUT_S, lambda: answer(ev.StartFailure.NODE))

    def _start_on(
        self, node: FakeNode, facts: ev.LeaseAdopted, epoch: int
    ) -> ev.StartFailure | None:
        if (
            epoch < node.epoch
            or facts.incarnation != node.spec.incarnation
            or facts.lease_id in node.ended
            or (not self.calm and self.random.random() < 0.03)
        ):
            return ev.StartFailure.HERE
        node.epoch = epoch
        if facts.lease_id in node.held:
            return None
        used: dict[int, int] = {}
        for gpus in (*node.held.values(), facts.gpus):
            for index, units in gpus.items():
                used[index] = used.get(index, 0) + units
        assert all(units <= UNIT for units in used.values()), (
            f"{facts.lease_id} would use a GPU of {facts.node_id} that others hold: {used}"
        )
        node.held[facts.lease_id] = dict(facts.gpus)
        node.facts[facts.lease_id] = facts
        return None

    def _send_release(self, command: cmd.ReleaseLease, epoch: int) -> None:
        node = self.nodes[command.node_id]
        incarnation = node.spec.incarnation
        done = [False]

        def confirmed() -> None:
            if not done[0] and epoch == self.epoch:
                done[0] = True
                self.feed(ev.LeaseEnded(at_s=self.at_s, lease_id=command.lease_id))

        def arrive() -> None:
            if node.up and node.spec.incarnation == incarnation and epoch >= node.epoch:
                node.held.pop(command.lease_id, None)
                node.ended.add(command.lease_id)
                self.message(confirmed)

        def try_again() -> None:
            if not done[0] and epoch == self.epoch and node.spec.incarnation == incarnation:
                self.message(arrive)
                self.later(1.0, try_again)

        try_again()

    # Nodes

    def crash(self, node: FakeNode) -> None:
        """The node dies; the gcs says so later, or it registers again before that."""
        if not node.up:
            return
        node.up = False
        before = node.spec.incarnation
        node.held, node.facts = {}, {}
        back_s = self.random.uniform(0.2, 6.0)
        if self.random.random() < 0.3:
            sick = NodeSpec(**{**_fields(node.spec), "health": Health.SUSPECT})
            self.feed(ev.NodeChanged(at_s=self.at_s, spec=sick))
        if back_s > 2.0:
            lost = ev.NodeLost(at_s=self.at_s, node_id=node.spec.node_id, incarnation=before)
            self.later(2.0, lambda: self.feed(ev.NodeLost(**{**_fields(lost), "at_s": self.at_s})))
        self.later(back_s, lambda: self._back(node))

    def _back(self, node: FakeNode) -> None:
        node.spec = NodeSpec(**{**_fields(node.spec), "incarnation": node.spec.incarnation + 1})
        node.up, node.ended = True, set()
        self.feed(ev.NodeJoined(at_s=self.at_s, spec=node.spec))

    def exit_worker(self, node: FakeNode) -> None:
        """A worker dies; the gcs reports it."""
        if node.up and node.held:
            lease_id = self.random.choice(list(node.held))
            del node.held[lease_id]
            node.ended.add(lease_id)
            self.feed(ev.WorkerExited(at_s=self.at_s, lease_id=lease_id))

    def warm(self, node: FakeNode) -> None:
        """The node has compiled some kernels."""
        if node.up:
            sets = tuple(self.random.sample(KERNEL_SETS, 2))
            node.spec = NodeSpec(**{**_fields(node.spec), "warm": sets})
            self.feed(ev.NodeChanged(at_s=self.at_s, spec=node.spec))

    # The run

    def run(self, chaos_s: float = 20.0) -> None:
        """Chaos: owners come, want, vanish; jobs end; nodes and the scheduler crash."""
        random, faults = self.random, self.faults
        end_s = chaos_s
        while self.at_s < end_s:
            job = f"job_{random.randrange(4)}"
            roll = random.random()
            living = [owner for owner in self.owners if owner.alive]
            if roll < 0.3 or not living:
                if job not in self.state.finished_jobs:
                    self.wish(self.owner(job))
            elif roll < 0.75:
                self.wish(random.choice(living))
            elif roll < 0.8:
                self.block()
            elif roll < 0.8 + faults.vanish:
                random.choice(living).alive = False
            elif roll < 0.87:
                self.feed(ev.LeaseRequestCancelled(at_s=self.at_s, request_id=f"r_{self._numbers}"))
            elif roll < 0.89:
                self.finish_job(job)
            elif roll < 0.91:
                self.exit_worker(random.choice(list(self.nodes.values())))
            elif roll < 0.93:
                self.warm(random.choice(list(self.nodes.values())))
            step_s = random.expovariate(3.0)
            if random.random() < step_s / faults.crash_every_s:
                self.crash(random.choice(list(self.nodes.values())))
            if random.random() < step_s / faults.takeover_every_s:
                self.take_over()
            self.advance(self.at_s + step_s)

    def finish_job(self, job_id: str) -> None:
        for owner in self.owners:
            if owner.job_id == job_id:
                owner.alive = False
        self.feed(ev.JobFinished(at_s=self.at_s, job_id=job_id))

    def finish(self, patience_s: float = 240.0) -> None:
        """Calm: everything asked for must be served, given back, and gone."""
        self.calm = True
        end_s = self.at_s + patience_s
        while self.at_s < end_s and not self._over():
            self.advance(self.at_s + 5.0)
        open_wishes = [
            (wish.owner.owner_id, wish.requirements.text, wish.had, wish.count)
            for wish in self.wishes
            if wish.owner.alive and wish.had < wish.count
        ]
        assert not open_wishes, f"never served: {open_wishes}"
        assert not self.state.leases, f"leases left: {list(self.state.leases)}"
        assert not self.state.pending and not self.state.queue.subqueues, "requests left"
        assert not self.state.usage, f"accounts still charged: {self.state.usage}"
        for node in self.nodes.values():
            assert not node.held, f"{node.spec.node_id} still holds {list(node.held)}"
            seen = self.state.nodes[node.spec.node_id]
            assert seen.available == node.spec.total, f"{node.spec.node_id}: {seen.available}"

    def _over(self) -> bool:
        served = all(not w.owner.alive or w.had >= w.count for w in self.wishes)
        back = all(node.up for node in self.nodes.values())
        return served and back and not self.state.leases and not self.state.pending


def _fields(value: object) -> dict[str, object]:
    names = [*type(value).__dataclass_fields__]  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}
