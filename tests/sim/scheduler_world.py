"""A seeded world around the real scheduler core: fake nodes and owners, virtual time, and faults.

Messages between scheduler, nodes and owners are late, lost and doubled; nodes crash and come back
under a new incarnation; owners vanish; jobs end; the scheduler itself dies and its successor adopts
what the nodes hold. After every event the core's invariants are checked, and so are those that only
the world can see: no node is ever ordered to use a GPU twice, and no owner gets one lease twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import request_id_of
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.extenders import ExtenderAnswer
from stoker_scheduler.core.model.nodes import Health, NodeSpec, make_node_spec
from stoker_scheduler.core.model.topology import make_topology
from stoker_scheduler.core.state import SchedulingPolicy, State
from tests.sim.late_messages import Faults
from tests.sim.scheduler_groups import Groups
from tests.sim.scheduler_nodes import check_gpus, check_open, must_empty, openness
from tests.sim.scheduler_preemptions import CheckedPreemptions
from tests.sim.scheduler_queues import check_limits, random_queues
from tests.sim.scheduler_runtimes import KERNEL_SETS, UNCONFIRMED_S, Owner

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements

START_TIMEOUT_S = 3.0
_PAIRS = make_topology({0: {1: "nvlink", 2: "numa"}, 2: {3: "nvlink"}})
PREPARED_TTL_S = 4.0


@dataclass
class FakeNode:
    """A nodelet: what it holds, and what it must refuse."""

    spec: NodeSpec
    held: dict[str, dict[int, int]] = field(default_factory=dict)
    facts: dict[str, ev.LeaseAdopted] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    """Bundles that are held only until they are committed, or for too long."""
    ended: set[str] = field(default_factory=set)
    epoch: int = 0
    up: bool = True


class World(Groups):
    """One run. ``run`` goes through chaos, then calm; ``finish`` checks that nothing is left."""

    def __init__(self, seed: int, *, faults: Faults | None = None, nodes: int = 4) -> None:
        super().__init__(Random(seed), faults or Faults())
        self.log: list[ev.Event] = []
        self.events = 0
        self.commands: list[cmd.Command] = []
        self.state = State(preemptions=CheckedPreemptions())
        self.nodes: dict[str, FakeNode] = {}
        self.granted: dict[str, dict[str, None]] = {}
        self._wake_s = 0.0
        self.stops = 0
        self.queues = random_queues(self.random) if self.random.random() < 0.7 else ()
        self._lead()
        for index in range(nodes):
            resources = self.random.choice(
                [
                    {"CPU": 4.0},
                    {"CPU": 8.0, "GPU": 2.0},
                    {"CPU": 8.0, "GPU": 4.0},
                    {"CPU": 2.0, "GPU": 1.0, "ssd": 1.0},
                ]
            )
            spec = make_node_spec(
                f"n_{index}",
                resources,
                device_indices=(0, 1, 2, 3),
                device_memory={0: 16 << 30, 1: 40 << 30},
                topology=self.random.choice((None, _PAIRS)),
                labels={"rack": f"r{self.random.randrange(2)}"},
            )
            self.nodes[spec.node_id] = FakeNode(spec)
            self.feed(ev.NodeJoined(at_s=0.0, spec=spec))

    # The scheduler's shell

    def _lead(self) -> None:
        self.epoch += 1
        policy = SchedulingPolicy(
            lease_ttl_s=5.0,
            unconfirmed_ttl_s=UNCONFIRMED_S,
            infeasible_grace_s=1.0,
            reserve_after_s=2.0,
            remember_slow_ranks_s=3.0,
        )
        self.state = State(policy=policy, term=f"{self.epoch:x}", preemptions=CheckedPreemptions())
        self.log = []
        self.commands = []
        self.feed(ev.QueuesChanged(at_s=self.at_s, queues=self.queues))

    def take_over(self) -> None:
        """The scheduler dies; the next one asks the nodes what they hold."""
        waiting = list(self.answering.values())
        self.answering = {}
        # A lease that another request's owner claimed is known to the next leader as the first's;
        # the owner's repeated request then gets another, and this one ends as it is not listed.
        self.granted = {
            request_id: {i: None for i in granted if request_id_of(i) == request_id}
            for request_id, granted in self.granted.items()
        }
        self._lead()
        for group in self.groups:
            if not group.removed:
                self.feed(self.added(group))
        for node in self.nodes.values():
            if node.up:
                node.epoch = (
                    self.epoch
                )  # fenced first, so that no late start of the old one slips in
                self.feed(ev.NodeJoined(at_s=self.at_s, spec=node.spec))
                bundles_first = sorted(
                    node.held, key=lambda lease_id: node.facts[lease_id].kind is not ev.Kind.BUNDLE
                )
                for lease_id in bundles_first:
                    if lease_id in node.prepared:
                        given_up = cmd.ReleaseLease(
                            lease_id=lease_id, node_id=node.spec.node_id, kill=True
                        )
                        self._send_release(given_up, self.epoch)
                    else:
                        self.feed(node.facts[lease_id])
        for wish in waiting:
            self.later(self.random.uniform(0.0, 0.5), lambda wish=wish: self.ask(wish))
        for owner in self.owners:
            if not owner.alive:
                self.report_lost(owner)

    def feed(self, event: ev.Event) -> None:
        self.log.append(event)
        self.events += 1
        out = step(self.state, event)
        self.commands.extend(out)
        self.state.check()
        for command in out:
            self._execute(command, self.epoch)

    def _execute(self, command: cmd.Command, epoch: int) -> None:
        match command:
            case cmd.StartWorker():
                self._check_quarantine(command.lease_id)
                check_limits(self.state, self.state.leases[command.lease_id])
                self._check_extenders(self.state.leases[command.lease_id])
                self._send_start(command, epoch)
            case cmd.HoldBundles():
                for lease_id in command.lease_ids:
                    self._check_quarantine(lease_id)
                    check_limits(self.state, self.state.leases[lease_id])
                    self._check_extenders(self.state.leases[lease_id])
                self._send_hold(command, epoch)
            case cmd.CommitBundles():
                self._send_commit(command, epoch)
            case cmd.ReleaseLease():
                if command.lease_id in self.state.leases:
                    self.check_kept(self.state.leases[command.lease_id], command.reason)
                self._send_release(command, epoch)
            case cmd.AskExtenders(requirements=requirements):
                self.later(
                    self.random.uniform(0.0, 1.0),
                    lambda: self._answer_extenders(requirements, epoch),
                )
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
                self.group_answered(
                    request_id,
                    {
                        leases[i].bundle: (i, leases[i].node_id, leases[i].incarnation)
                        for i in lease_ids
                        if leases[i].kind is ev.Kind.BUNDLE
                    },
                )
            case cmd.Reject(request_id=request_id):
                self.group_refused(request_id)
                wish = self.answering.pop(request_id, None)
                if wish is not None:
                    wish.count = wish.had  # given up
            case cmd.Preempt(owner_id=owner_id, lease_ids=lease_ids):
                owner = self._owner(owner_id)
                if owner is not None:
                    self.message(lambda: self._obey(owner, lease_ids))
            case cmd.PreemptGroup(group_id=group_id, lease_id=lease_id):
                self.later(0.1, lambda: self.preempt_group(group_id, lease_id))
            case cmd.StopLease():
                lease = self.state.leases[command.lease_id]
                group = self.state.groups.get(lease.group_id)
                must_leave = self.state.nodes[lease.node_id].spec.evicts
                is_closing = group is not None and group.closing
                assert lease.preemptible or is_closing or must_leave, lease.lease_id
                self.stops += 1
                self._send_stop(command, epoch)
            case cmd.Lost(owner_id="gcs", lease_ids=lease_ids):
                for lease_id in lease_ids:
                    self.later(0.1, lambda lease_id=lease_id: self.lease_lost(lease_id))
            case cmd.Lost(owner_id=owner_id, lease_ids=lease_ids):
                owner = self._owner(owner_id)
                if owner is not None:
                    self.message(lambda: self._lose(owner, lease_ids))

    def _check_quarantine(self, lease_id: str) -> None:
        """No lease gets a GPU that the scheduler knows to be quarantined, nor a node that is closed to it."""
        lease = self.state.leases[lease_id]
        check_open(self.state.nodes[lease.node_id].spec, lease)
        quarantined = self.state.nodes[lease.node_id].spec.gpu_facts.quarantined
        assert quarantined.keys().isdisjoint(lease.gpus), f"{lease_id} got {lease.gpus}"

    def _check_extenders(self, lease: LeaseState) -> None:
        """Check that the extenders admit the node of a lease that starts, by an answer that holds."""
        if lease.requirements.extenders:
            answer = self.state.extender_answers[lease.requirements]
            assert lease.node_id in answer.gains, f"{lease.lease_id} is on a node that was refused"
            assert answer.valid_until_s >= self.at_s, f"{lease.lease_id}: an old answer"

    def _answer_extenders(self, requirements: Requirements, epoch: int) -> None:
        """An extender admits some nodes, in calm all of them, and gives them points."""
        if epoch != self.epoch:
            return
        random, nodes = self.random, list(self.state.nodes)
        gains = {n: random.uniform(0.0, 1.0) for n in nodes if self.calm or random.random() < 0.6}
        answer = ExtenderAnswer(
            gains=gains,
            refusals={n: "refused" for n in nodes if n not in gains and random.random() < 0.8},
            valid_until_s=self.at_s + random.uniform(0.0, 2.0),
        )
        self.feed(ev.ExtendersAnswered(at_s=self.at_s, requirements=requirements, answer=answer))

    def _tick(self, epoch: int, wake_s: float) -> None:
        if epoch == self.epoch and wake_s == self._wake_s:
            self.feed(ev.Tick(at_s=self.at_s))

    def _facts(self, lease_id: str) -> ev.LeaseAdopted:
        lease = self.state.leases[lease_id]
        return ev.LeaseAdopted(
            at_s=self.at_s,
            lease_id=lease.lease_id,
            owner_id=lease.owner_id,
            job_id=lease.job_id,
            kind=lease.kind,
            node_id=lease.node_id,
            incarnation=lease.incarnation,
            requirements=lease.requirements,
            gpus=dict(lease.gpus),
            group_id=lease.group_id,
            bundle=lease.bundle,
            user=lease.account.user,
            queue=lease.account.queue,
            priority=lease.priority,
            preemptible=lease.preemptible,
            preemption_grace_s=lease.preemption_grace_s,
        )

    def _send_start(self, command: cmd.StartWorker, epoch: int) -> None:
        node, facts = self.nodes[command.node_id], self._facts(command.lease_id)
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

    def _send_hold(self, command: cmd.HoldBundles, epoch: int) -> None:
        node, lease_ids = self.nodes[command.node_id], command.lease_ids
        bundles = [self._facts(lease_id) for lease_id in lease_ids]
        done = [False]

        def answer(failure: ev.StartFailure | None) -> None:
            if done[0] or epoch != self.epoch:
                return
            done[0] = True
            at_s = self.at_s
            if failure is None:
                self.feed(ev.BundlesHeld(at_s=at_s, lease_ids=lease_ids))
                return
            for lease_id in lease_ids:
                self.feed(ev.LeaseStartFailed(at_s=at_s, lease_id=lease_id, failure=failure))

        def arrive() -> None:
            if not node.up:
                return
            for facts in bundles:
                new = facts.lease_id not in node.held
                failure = self._start_on(node, facts, epoch)
                if failure is not None:
                    break
                if command.prepare and new:
                    node.prepared.add(facts.lease_id)
                    self.later(PREPARED_TTL_S, lambda i=facts.lease_id: self._expire(node, i))
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
        if facts.kind is not ev.Kind.BUNDLE and not facts.gpus.keys().isdisjoint(
            node.spec.gpu_facts.quarantined
        ):
            return ev.StartFailure.HERE
        node.held[facts.lease_id] = dict(facts.gpus)
        node.facts[facts.lease_id] = facts
        if facts.kind is ev.Kind.BUNDLE:
            self.bundle_held(facts.group_id, node.spec.node_id)
        check_gpus(node, facts)
        return None

    def _expire(self, node: FakeNode, lease_id: str) -> None:
        """A bundle that was never committed is given up by its nodelet."""
        if lease_id in node.prepared and lease_id in node.held:
            self._drop(node, lease_id)

    def _drop(self, node: FakeNode, lease_id: str) -> None:
        node.held.pop(lease_id, None)
        node.prepared.discard(lease_id)
        node.ended.add(lease_id)

    def _send_commit(self, command: cmd.CommitBundles, epoch: int) -> None:
        node = self.nodes[command.node_id]
        incarnation = node.spec.incarnation
        done = [False]

        def answer(held: tuple[str, ...], lost: tuple[str, ...]) -> None:
            if not done[0] and epoch == self.epoch:
                done[0] = True
                self.feed(ev.BundlesLost(at_s=self.at_s, lease_ids=lost))
                self.feed(ev.BundlesCommitted(at_s=self.at_s, lease_ids=held))

        def arrive() -> None:
            if node.up and node.spec.incarnation == incarnation and epoch >= node.epoch:
                held = tuple(i for i in command.lease_ids if i in node.held)
                lost = tuple(i for i in command.lease_ids if i not in node.held)
                node.prepared -= set(held)
                self.message(lambda: answer(held, lost))

        def try_again() -> None:
            if not done[0] and epoch == self.epoch and node.spec.incarnation == incarnation:
                self.message(arrive)
                self.later(1.0, try_again)

        try_again()

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
                self._drop(node, command.lease_id)
                self.message(confirmed)

        def try_again() -> None:
            if not done[0] and epoch == self.epoch and node.spec.incarnation == incarnation:
                self.message(arrive)
                self.later(1.0, try_again)

        try_again()

    def _send_stop(self, command: cmd.StopLease, epoch: int) -> None:
        node, lease_id = self.nodes[command.node_id], command.lease_id

        def end() -> None:
            if node.up and lease_id in node.held:
                self._drop(node, lease_id)
                self.later(0.05, lambda: self.preempted(lease_id))
                exited = lambda: ev.WorkerExited(at_s=self.at_s, lease_id=lease_id)  # noqa: E731
                self.later(0.1, lambda: self.feed(exited()))

        def arrive() -> None:
            if node.up and epoch >= node.epoch:
                self.later(command.grace_s, end)

        self.message(arrive)

    # Nodes

    def crash(self, node: FakeNode) -> None:
        """The node dies; the gcs says so later, or it registers again before that."""
        if not node.up:
            return
        node.up = False
        before = node.spec.incarnation
        node.held, node.facts, node.prepared = {}, {}, set()
        back_s = self.random.uniform(0.2, 6.0)
        if self.random.random() < 0.3:
            sick = replace(node.spec, health=Health.SUSPECT)
            self.feed(ev.NodeChanged(at_s=self.at_s, spec=sick))
        if back_s > 2.0:
            lost = ev.NodeLost(at_s=self.at_s, node_id=node.spec.node_id, incarnation=before)
            self.later(2.0, lambda: self._lost(lost))
        self.later(back_s, lambda: self._back(node))

    def _lost(self, lost: ev.NodeLost) -> None:
        self.feed(_at(lost, self.at_s))
        self.bundles_lost(lost.node_id, lost.incarnation + 1)

    def _back(self, node: FakeNode) -> None:
        node.spec = replace(node.spec, incarnation=node.spec.incarnation + 1)
        node.up, node.ended = True, set()
        self.feed(ev.NodeJoined(at_s=self.at_s, spec=node.spec))
        self.bundles_lost(node.spec.node_id, node.spec.incarnation)

    def exit_worker(self, node: FakeNode) -> None:
        """A worker dies; the gcs reports it."""
        workers = [i for i in node.held if node.facts[i].kind is not ev.Kind.BUNDLE]
        if node.up and workers:
            lease_id = self.random.choice(workers)
            del node.held[lease_id]
            node.ended.add(lease_id)
            self.feed(ev.WorkerExited(at_s=self.at_s, lease_id=lease_id))

    def warm(self, node: FakeNode) -> None:
        """The node has compiled some kernels."""
        if node.up:
            sets = tuple(self.random.sample(KERNEL_SETS, 2))
            node.spec = replace(node.spec, warm=sets)
            self.feed(ev.NodeChanged(at_s=self.at_s, spec=node.spec))

    def close(self, node: FakeNode, *, calm: bool = False) -> None:
        """An operator cordons, taints or drains the node, or opens it again."""
        node.spec = replace(node.spec, **openness(self.random, self.at_s, calm=calm))
        if must_empty(node.spec):
            self.emptied.add(node.spec.node_id)
        if node.up:
            self.feed(ev.NodeChanged(at_s=self.at_s, spec=node.spec))

    def quarantine(self, node: FakeNode, *, none: bool = False) -> None:
        """Another set of the node's GPUs is quarantined; the scheduler hears of it later."""
        gpus = [index for index in node.spec.gpus if not none and self.random.random() < 0.4]
        facts = replace(node.spec.gpu_facts, quarantined=dict.fromkeys(gpus, "it is stuck"))
        node.spec = replace(node.spec, gpu_facts=facts)
        incarnation = node.spec.incarnation

        def heard() -> None:
            if node.up and node.spec.incarnation == incarnation:
                self.feed(ev.NodeChanged(at_s=self.at_s, spec=node.spec))

        self.later(self.random.uniform(0.0, 1.0), heard)

    # The run

    def run(self, chaos_s: float = 20.0, events: int = 0) -> None:
        """Chaos for so long, and so many events: owners, jobs and nodes come and go, leaders change."""
        random, faults = self.random, self.faults
        end_s = chaos_s
        while self.at_s < end_s or self.events < events:
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
                self.vanish(random.choice(living))
            elif roll < 0.87:
                self.feed(ev.LeaseRequestCancelled(at_s=self.at_s, request_id=f"r_{self._numbers}"))
            elif roll < 0.89:
                self.finish_job(job)
            elif roll < 0.91:
                self.exit_worker(random.choice(list(self.nodes.values())))
            elif roll < 0.93:
                self.warm(random.choice(list(self.nodes.values())))
            elif roll < 0.935:
                node_id = random.choice(list(self.nodes))
                self.feed(ev.RankSlow(at_s=self.at_s, node_id=node_id, rank=job))
            elif roll < 0.945 and self.queues:
                self.change_queues()
            elif roll < 0.97:
                self.quarantine(random.choice(list(self.nodes.values())))
            elif roll < 0.985:
                self.close(random.choice(list(self.nodes.values())))
            self._groups_go_on(job, living)
            step_s = random.expovariate(3.0)
            if random.random() < step_s / faults.crash_every_s:
                self.crash(random.choice(list(self.nodes.values())))
            if random.random() < step_s / faults.takeover_every_s:
                self.take_over()
            self.advance(self.at_s + step_s)

    def change_queues(self, *, calm: bool = False) -> None:
        """An operator changes the queues."""
        self.queues = random_queues(self.random, calm=calm)
        self.feed(ev.QueuesChanged(at_s=self.at_s, queues=self.queues))

    def _groups_go_on(self, job: str, living: list[Owner]) -> None:
        """Now and then a placement group is made, used or removed."""
        roll, groups = self.random.random(), [group for group in self.groups if not group.removed]
        if roll < 0.05 and job not in self.state.finished_jobs:
            self.make_group(job)
        elif roll < 0.25 and living and groups:
            self.wish_in_group(self.random.choice(living), self.random.choice(groups))
        elif roll < 0.27 and groups:
            self.remove_group(self.random.choice(groups))

    def finish_job(self, job_id: str) -> None:
        for owner in self.owners:
            if owner.job_id == job_id:
                owner.alive = False
        self.feed(ev.JobFinished(at_s=self.at_s, job_id=job_id))
        for group in self.groups:
            if group.job_id == job_id:
                self.later(0.2, lambda group=group: self.remove_group(group))

    def finish(self, patience_s: float = 240.0) -> None:
        """Calm: everything asked for must be served, given back, and gone."""
        self.calm = True
        for node in self.nodes.values():
            self.quarantine(node, none=True)
            self.close(node, calm=True)
        if self.queues:
            self.change_queues(calm=True)
        for group in self.groups:
            self.later(60.0, lambda group=group: self.remove_group(group))
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
        assert not self.state.groups, f"groups left: {list(self.state.groups)}"
        assert not self.state.usage, f"accounts still charged: {self.state.usage}"
        for node in self.nodes.values():
            assert not node.held, f"{node.spec.node_id} still holds {list(node.held)}"
            seen = self.state.nodes[node.spec.node_id]
            assert seen.available == node.spec.total, f"{node.spec.node_id}: {seen.available}"

    def _over(self) -> bool:
        served = all(not w.owner.alive or w.had >= w.count for w in self.wishes)
        back = all(node.up for node in self.nodes.values())
        removed = all(group.removed for group in self.groups)
        return served and back and removed and not self.state.leases and not self.state.pending


def _at(event: ev.Event, at_s: float) -> ev.Event:
    return msgspec.structs.replace(event, at_s=at_s)
