"""The invariants of a world: what must be true after every event, and what must be left at the end (nothing).

Each check looks at the parts from outside, with counts of its own: what a part believes of itself is checked
by its own invariants, which are called here as well.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from stoker.runtime.tasks.task_spec import Phase
from stoker_gcs.state import event_log
from stoker_nodelet.core import events as node_events
from stoker_nodelet.core.commands import RefuseLease, RefuseOrder
from stoker_scheduler.core.events import LeaseRequested, LeaseStarted
from stoker_scheduler.core.leases.lease import Phase as LeasePhase
from stoker_scheduler.core.leases.lifecycle import request_id_of
from stoker_wire.messages.cluster import LeaseKind, Node, NodeState
from stoker_wire.messages.groups import GroupState, PlacementGroup
from stoker_wire.messages.work import Actor, ActorState, Job, JobState

if TYPE_CHECKING:
    from stoker_wire.messages.data import Call
    from tests.sim.world.driver import ActorCaller
    from tests.sim.world.node import Worker
    from tests.sim.world.runtime.calls import CallPlan
    from tests.sim.world.runtime.runtime import Runtime
    from tests.sim.world.world import World

SLACK = 1e-6
NOTICED_WITHIN_S = 13.0
"""A dead nodelet whose host refuses connections is known to be dead after so much time of a serving gcs."""
WAIT_LIMIT_S = 60.0
"""In calm nothing waits for longer than this, unless it says why."""
LOOK_S = 0.5
GONE_S = 4.0
"""So long a group may say that a bundle is on a node that is gone, while a gcs serves."""
VISIBLE_S = 1.0
"""Who can look for so long has looked."""
LOG_SLACK = 24
"""So many waiters, and events of readers that lag, may be kept beside the log's ring."""


class BrokenInvariantError(AssertionError):
    """What must never be."""


class CrashError(AssertionError):
    """An exception that a part let out: a bug as well, but no invariant is known to be broken."""


class Checks:
    """The invariants of one world, with what they remember."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: dict[str, str] = {}
        self._epochs: dict[int, int] = {}
        self._asked: dict[str, int] = {}
        self._began: dict[str, set[int]] = {}
        self._gone_s: dict[str, float] = {}
        self._unnoticed_s: dict[str, float] = {}
        self._visible_s: dict[str, float] = {}
        """For how long every gcs has been able to look at the processes of each host."""
        self._last_seq = 0

    def _require(self, holds: object, text: str) -> None:
        """Note what is broken, and raise: the product's loops catch what is raised in them."""
        if not holds:
            self._broken(text)

    def _broken(self, text: str) -> None:
        self._world.fail(BrokenInvariantError(text))

    # Nodelets

    def nodelet_stepped(self, state: Any, event: Any, before: Any, commands: Any) -> None:
        """Check a nodelet after an event of its lease machine; ``before`` is what it held."""
        broken = state.violations()
        self._require(not broken, f"nodelet: {broken[:1]}")
        epoch = getattr(event, "epoch", None)
        if epoch is not None:
            seen = self._epochs.get(id(state), 0)
            if epoch < seen:
                after = (set(state.leases), set(state.bundles))
                refused = all(isinstance(one, RefuseLease | RefuseOrder) for one in commands)
                self._require(before == after and refused, "a zombie leader changed a node")
            self._epochs[id(state)] = max(seen, epoch)
        if isinstance(event, node_events.LeaseRequested | node_events.BundlesRequested):
            self._world.loop.at_turn_end = self._turn_ended

    def _turn_ended(self) -> None:
        """Check the nodes after a turn of the loop in which one was given a lease."""
        with contextlib.suppress(BrokenInvariantError):  # it is noted
            for node in self._world.nodes:
                self._check_capacity(node)

    def _check_capacity(self, node: Any) -> None:
        used: dict[str, float] = {}
        for lease in node.held():
            if lease.kind is not LeaseKind.BUNDLE and lease.group_id:
                continue
            for name, amount in lease.resources.items():
                if name == "CPU" and lease.lease_id in self._world.blocked_leases:
                    continue  # others have it while it waits
                used[name] = used.get(name, 0.0) + amount
        for name, amount in used.items():
            self._require(
                amount <= node.resources.get(name, 0.0) + SLACK,
                f"{node.node_id} has leases of {amount} {name}",
            )

    def worker_leased(self, worker: Worker, gpus: dict[int, float]) -> None:
        """Check that no other living process of the host has the GPUs of a lease."""
        for index, share in gpus.items():
            total = share + sum(
                other.gpus.get(index, 0.0)
                for other in self._world.workers.values()
                if other is not worker
                and not other.process.dead
                and other.node.host == worker.node.host
            )
            self._require(total <= 1.0 + SLACK, f"GPU {index} of {worker.node.host} is held twice")

    # The scheduler

    def scheduler_stepped(self, state: Any, event: Any) -> None:
        """Check that no request has more leases than it asked for."""
        if isinstance(event, LeaseRequested):
            count = max(event.count, len(event.indices), self._asked.get(event.request_id, 0))
            self._asked[event.request_id] = count
        if not isinstance(event, LeaseRequested | LeaseStarted):
            return
        granted: dict[str, int] = {}
        for lease_id, lease in state.leases.items():
            # One of the leader before may have been replaced while its node was away.
            if lease.phase is LeasePhase.HELD and lease_id.split(".")[-2] == state.term:
                request_id = request_id_of(lease_id)
                granted[request_id] = granted.get(request_id, 0) + 1
        for request_id, has in granted.items():
            wanted = self._asked.get(request_id, has)
            self._require(has <= wanted, f"{request_id} wants {wanted} leases and has {has}")

    # Calls

    def call_began(self, worker: Worker, call: Call, plan: CallPlan) -> None:
        """Check the start of a call."""
        task_id = call.task_id
        attempts = self._began.setdefault(task_id, set())
        self._require(
            plan.retries != 0 or not attempts, f"{task_id} ran twice, and may not be retried"
        )
        self._require(
            call.attempt not in attempts, f"attempt {call.attempt} of {task_id} ran twice"
        )
        attempts.add(call.attempt)
        lease, owner_id = worker.lease, plan.owner.address.peer_id
        if lease is not None and lease.kind is LeaseKind.TASK:
            self._require(
                lease.owner_id == owner_id,
                f"{task_id} of {owner_id} ran at a worker leased to {lease.owner_id}",
            )

    def settled(self, task_id: str, how: str, *, known: bool) -> None:
        """Check that a call is settled once, and that one that did not run is not done."""
        self._require(known, f"{task_id} was settled twice")
        self._require(how != "done" or task_id in self._began, f"{task_id} is done and never ran")

    # The sdk

    def runtime_stepped(self, runtime: Runtime) -> None:
        """Check the queues, leases and actors' calls of a runtime or worker after an event of it."""
        places: dict[str, str] = {}
        for key, queue in runtime.tasks.queues.items():
            self._check_queue(runtime, key, queue, places)
        for lease_id, (key, _) in runtime.tasks.leases._granted.items():
            has_slot = lease_id in runtime.tasks.queues[key].slots
            self._require(
                has_slot, f"sdk: {runtime.address.peer_id} holds {lease_id} and cannot use it"
            )
        for caller in runtime.callers.values():
            self._check_order(caller)

    def _check_queue(
        self, runtime: Runtime, key: bytes, queue: Any, places: dict[str, str]
    ) -> None:
        """Check a queue; a text is made only where it is needed, as this runs at each step of an sdk."""
        broken, leases, by_id = self._broken, runtime.tasks.leases, runtime.pending.by_id
        waiting = list(queue.ready)
        if len(waiting) != len(queue.ready):
            broken("sdk: the count of waiting calls is wrong")
        for task in waiting:
            if task.task_id in places:
                broken(f"sdk: {task.task_id} is queued twice")
            places[task.task_id] = "the queue"
            if task.phase is not Phase.QUEUED or task.slot is not None:
                broken(f"sdk: {task.task_id} waits and is {task.phase}")
            if task.task_id not in by_id:
                broken(f"sdk: {task.task_id} is settled and waits")
        for lease_id, slot in queue.slots.items():
            if not slot.closing and not leases._closing:
                if lease_id not in leases._granted:
                    holder = runtime.address.peer_id
                    broken(f"sdk: {holder} uses {lease_id}, which it does not hold")
                if slot.channel.closed:
                    holder = runtime.address.peer_id
                    broken(f"sdk: {holder} uses {lease_id}, whose worker is gone")
            costs_s = sum(slot._costs.values())
            is_sum = slot._costs.keys() == slot.inflight.keys()
            if not is_sum or abs(slot.load_s - costs_s) > SLACK * max(1.0, costs_s):
                broken(f"sdk: the load of {lease_id} is not that of its calls")
            for task_id, task in slot.inflight.items():
                if task_id in places:
                    broken(f"sdk: {task_id} is at {lease_id} and in {places[task_id]}")
                places[task_id] = lease_id
                if task.phase is not Phase.ENDED and task.slot is not slot:
                    broken(f"sdk: {task_id} is at {lease_id} and {task.phase}")

    def _check_order(self, caller: ActorCaller) -> None:
        """Check that each call is in one place, and that none is sent before an earlier one."""
        order, sent, require = caller.order, caller._sent, self._require
        unsent = list(order)
        known = sent.keys() | {call.task_id for call in unsent}
        require(
            len(unsent) == len(order) and len(known) == len(sent) + len(unsent),
            f"sdk: a call of {caller.actor_id} is in two places",
        )
        require(known == caller.calls.keys(), f"sdk: a call of {caller.actor_id} is lost")
        first_sent = [_number(i) for i, call in sent.items() if not call.attempt]
        first_unsent = [_number(one.task_id) for one in unsent if not one.attempt]
        require(
            max(first_sent, default=-1) < min(first_unsent, default=math.inf),
            f"sdk: a call of {caller.actor_id} overtook an earlier one",
        )
        require(first_unsent == sorted(first_unsent), f"sdk: {caller.actor_id} has no order")
        for calls in order._blocked_groups.values():
            for call in calls:
                require(not call.attempt, f"sdk: the retry of {call.task_id} waits for others")

    # The database

    def committed(self) -> None:
        """Check the records after each commit, and add its events to the hash of the run."""
        world, database = self._world, self._world.database
        for event in database.newer(self._last_seq):
            world.record_event(event)
            self._last_seq = event.seq
        jobs = database._tables["jobs"]
        for job_id in world.jobs:
            self._require((job_id,) in jobs, f"accepted job {job_id} has vanished")
        actors = database._tables["actors"]
        for actor_id in world.actors:
            self._require((actor_id,) in actors, f"accepted actor {actor_id} has vanished")
        for kind, rows in (("job", jobs), ("actor", actors)):
            for key, row in rows.items():
                state, was = row["state"], self._ended.get(key[0])
                self._require(was in (None, state), f"{kind} {key[0]} was {was} and is {state}")
                if state in _TERMINAL and was is None:
                    self._ended[key[0]] = state
                    if kind == "job":
                        self._job_ended(key[0], state)

    def has_succeeded(self, job_id: str) -> bool:
        """Return whether a job has ended in good order; what is left of it ends with it."""
        return self._ended.get(job_id) == JobState.SUCCEEDED

    def _job_ended(self, job_id: str, state: str) -> None:
        driver = self._world.drivers_by_job.get(job_id)
        if state != JobState.FAILED or driver is None or driver.process.dead:
            return
        # Only then can anybody tell that its process lives.
        if self._visible_s.get(driver.process.host, 0.0) >= VISIBLE_S:
            message = next(
                job.message
                for job in self._world.database.rows("jobs", Job)
                if job.job_id == job_id
            )
            self._require(False, f"the driver of {job_id} lives, and its job failed: {message}")

    # As time passes

    def look(self) -> None:
        """Check what depends on time, twice a second."""
        world = self._world
        world.refs.check()
        serving = [g for g in world.gcs if g.serves and not world.database.trouble.kind]
        for gcs in serving:
            self._check_bounds(gcs.app)
        records = {n.node_id: n for n in world.database.rows("nodes", Node)}
        if len(serving) == len(world.gcs) and not (world.network.cuts or world.network.faults.loss):
            self._look_at_groups(records)
        self._look_at_hosts(records)
        for node in world.nodes:
            record = records.get(node.node_id)
            reached = any(world.network.reaches(g.process.host, node.host) for g in serving)
            if (
                record is None
                or record.state is NodeState.DEAD
                or not node.process.dead
                or node.host in world.network.down
            ):
                self._unnoticed_s.pop(node.node_id, None)
            elif reached:
                lost_s = self._unnoticed_s.get(node.node_id, 0.0) + LOOK_S
                self._unnoticed_s[node.node_id] = lost_s
                self._require(
                    lost_s < NOTICED_WITHIN_S,
                    f"{node.node_id} is dead for {lost_s} s in which a gcs served, and {record.state}",
                )

    def _look_at_hosts(self, records: dict[str, Node]) -> None:
        """Note how long drivers' processes can be looked at."""
        network, gcs = self._world.network, self._world.gcs
        before, self._visible_s = self._visible_s, {}
        for node in self._world.nodes:
            record = records.get(node.node_id)
            if (
                record is not None
                and record.state is NodeState.ALIVE
                and not (node.process.dead or node.process.frozen or network.faults.loss)
                and all(network.reaches(one.process.host, node.host) for one in gcs)
            ):
                self._visible_s[node.host] = before.get(node.host, -LOOK_S) + LOOK_S

    def _look_at_groups(self, nodes: dict[str, Node]) -> None:
        """Check that a group's bundles are not for long on nodes that are gone."""
        gone_s, self._gone_s = self._gone_s, {}
        for group in self._world.database.rows("placement_groups", PlacementGroup):
            for index, place in group.placements.items():
                node = nodes.get(place.node_id)
                if node is None or (
                    (node.state is not NodeState.DEAD)
                    and node.incarnation == place.node_incarnation
                ):
                    continue
                key = f"bundle {index} of {group.group_id}"
                self._gone_s[key] = lost_s = gone_s.get(key, 0.0) + LOOK_S
                self._require(lost_s < GONE_S, f"{key} is on {node.node_id}, which is gone")

    def _check_bounds(self, app: Any) -> None:
        log = app.state.log
        for name, value in vars(log).items():
            if hasattr(value, "__len__"):
                size = sum(
                    len(one) if hasattr(one, "__len__") else 1
                    for one in (value.values() if isinstance(value, dict) else value)
                )
                limit = event_log.RING_SIZE + LOG_SLACK
                self._require(size <= limit, f"the event log keeps {size} things in {name}")
        for link in self._world.network.links:
            for end in (link, link.other):
                self._require(len(end._arrived) <= 2000, "a connection keeps more than it may")

    # At the end

    def left(self) -> list[str]:
        """Return what has not ended, or is not given back."""
        world, left = self._world, []
        for job in world.database.rows("jobs", Job):
            if not job.state.terminal:
                left.append(f"job {job.job_id} is {job.state} ({job.message})")
        for actor in world.database.rows("actors", Actor):
            if actor.state is not ActorState.DEAD:
                left.append(f"actor {actor.actor_id} is {actor.state} ({actor.pending_reason})")
        for group in world.database.rows("placement_groups", PlacementGroup):
            if group.state is not GroupState.REMOVED:
                left.append(f"group {group.group_id} is {group.state} ({group.reason})")
        left += [f"row of lease {key[0]}" for key in world.database._tables["leases"]]
        for driver in world.drivers:
            if not driver.process.dead:
                waits = driver.in_use or driver.runtime.left()
                left.append(f"driver {driver.name} of {driver.job_id} has not ended: {waits}")
        left += world.refs.left()
        for node in world.nodes:
            left += [f"{node.node_id} has {one.object_id}" for one in node.objects.homes()]
            state = node.workers.state
            left += [
                f"{node.node_id} has {lease_id}" for lease_id in (*state.leases, *state.bundles)
            ]
            left += [
                f"{node.node_id} has {one.worker_id} of {one.lease_id}"
                for one in state.workers.values()
                if one.gpus or (one.lease_id and one.lease_id not in state.leases)
            ]
        leader = world.leader()
        if leader is None or leader.state is None:
            left.append("no scheduler leads")
        else:
            core = leader.state
            left += [f"the scheduler has {i} {one.phase}" for i, one in core.leases.items()]
            left += [f"the scheduler waits with {request_id}" for request_id in core.pending]
            left += [f"usage of {account}" for account in core.usage]
            left += [f"the scheduler knows group {group_id}" for group_id in core.groups]
            for node in world.nodes:
                if node.node_id not in core.nodes:
                    left.append(f"the scheduler does not know {node.node_id}")
        return left


def _number(task_id: str) -> int:
    """Return the place of a call among those of its driver."""
    return int(task_id.rpartition("-")[2])


_TERMINAL = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, ActorState.DEAD, GroupState.REMOVED}
)
