"""Jobs that are driven by profiles: with what they are given, so much progress in so many seconds.

The rules are those of the simulator study of Pollux (OSDI 2021, section 5.3): a change of the allocation
stalls a job, a step takes as long as it was measured, and is worth AdaScale's gain of its epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from stoker_goodput.batches import Batch, divide
from stoker_goodput.fitting import Observation
from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Hints, Oracle, replicas_of
from stoker_scheduler.simulation.elastic.agent import Agent
from stoker_scheduler.simulation.elastic.profiles import Model, tightest
from stoker_scheduler.simulation.elastic.workloads import WorkloadJob


@dataclass(slots=True)
class SimulatedJob:
    """A job of a workload as it goes. A ``tuned`` one runs with the replicas and batch of its user.

    ``noise`` is the relative error of what it measures; its restarts cost ``restart_s`` each, its start
    ``start_s``, by default the same. It commits its progress every ``commit_s``, and before it restarts.
    """

    row: WorkloadJob
    agent: Agent
    restart_s: float
    start_s: float | None = None
    tuned_batch: int = 0
    noise: float = 0.0
    commit_s: float = 600.0
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Node -> how many times as fast as those of the profiles its GPUs compute; empty where all are equal."""
    declares: bool = False
    """Whether it says what part of its epochs is done."""
    random: Random = field(default_factory=Random)
    allocation: Allocation = ()
    batch: Batch = field(default_factory=lambda: Batch(0, 0))
    epoch: int = 0
    progress: float = 0.0
    service_gpu_s: float = 0.0
    restarts: int = 0
    started_s: float | None = None
    finished_s: float | None = None
    _stall_s: float = 0.0
    _committed: tuple[int, float] = (0, 0.0)
    """The epoch and the progress of its last commit."""
    _committed_s: float = 0.0
    _step_s: tuple[float, ...] = ()

    @property
    def model(self) -> Model:
        """The profile by which it goes."""
        return self.row.model

    def set_allocation(self, allocation: Allocation, now_s: float) -> None:
        """Give it GPUs from now on; any other ones than it has stall it."""
        if allocation == self.allocation:
            return
        self.allocation = allocation
        self._commit(now_s)
        if not allocation:
            return
        if self.started_s is None:
            self.started_s = now_s
            self._stall_s = self.restart_s if self.start_s is None else self.start_s
        else:
            self.restarts += 1
            self._stall_s = self.restart_s
        self._choose_batch()

    def advance(self, now_s: float, seconds: int, slowdown: float = 0.0) -> None:
        """Let it run for an interval that begins at ``now_s``, ``slowdown`` slower than alone."""
        if not self.allocation or self.finished_s is not None:
            return
        if now_s - self._committed_s >= self.commit_s:
            self._commit(now_s)
        self.service_gpu_s += seconds * replicas_of(self.allocation)
        stalled_s = min(self._stall_s, seconds)
        self._stall_s -= stalled_s
        left_s = seconds - stalled_s
        while left_s > 0 and self.finished_s is None:
            left_s -= self._run(now_s + seconds - left_s, left_s, slowdown)

    def fail(self, now_s: float, seconds: int, failed_s: float, slowdown: float = 0.0) -> None:
        """Let a node of it fail at ``failed_s``, in an interval: it holds its GPUs to the end, for nothing.

        What it did since its last commit is lost. One that finishes before has finished.
        """
        before_s = max(0, round(failed_s - now_s))
        self.advance(now_s, before_s, slowdown)
        if self.finished_s is not None:
            return
        self.service_gpu_s += (seconds - before_s) * replicas_of(self.allocation)
        self.epoch, self.progress = self._committed
        self.allocation = ()

    def _commit(self, now_s: float) -> None:
        self._committed, self._committed_s = (self.epoch, self.progress), now_s

    def _run(self, now_s: float, most_s: float, slowdown: float) -> float:
        """Run to the end of the epoch, or for ``most_s``; return the seconds."""
        model, batch = self.model, self.batch
        placement = tuple(count for _, count in self.allocation)
        replicas = sum(placement)
        speed = self._speed()
        times = model.step_time(placement, batch.local).at_speed(speed)
        total = batch.total(replicas)
        noise = model.noise(self.epoch, total)
        gain = float(noise.gain(total / model.limits.min_batch))
        rate = gain / times.whole_s(batch.accumulated) * (1.0 - slowdown)
        observation = Observation(
            len(placement),
            replicas,
            batch.local,
            times.accumulation_s * self._error(),
            times.step_s * self._error(),
        )
        self.agent.measured(observation, noise, speed)
        goal = float(model.goals[self.epoch])
        if self.progress + rate * most_s < goal:
            self.progress += rate * most_s
            taken_s = most_s
        else:
            taken_s = round((goal - self.progress) / rate)
            self.progress = goal
            self.epoch += 1
            if self.epoch == model.epochs:
                self.finished_s = now_s + taken_s
                return taken_s
        self._choose_batch()
        return taken_s

    def _choose_batch(self) -> None:
        replicas = replicas_of(self.allocation)
        if self.tuned_batch:
            self.batch = divide(self.tuned_batch, replicas, self.model.limits)
        else:
            self.agent.refit()
            self.batch = self.agent.choose(len(self.allocation), replicas, self._speed())

    def _speed(self) -> float:
        """Return the speed of its slowest GPU, by which all go."""
        if not self.speeds:
            return 1.0
        return min(self.speeds[node_id] for node_id, _ in self.allocation)

    def _error(self) -> float:
        return max(0.1, 1.0 + self.random.gauss(0.0, self.noise)) if self.noise else 1.0

    def standing(self, *, fixed_replicas: bool, max_replicas: int) -> ElasticJob:
        """Return what a policy may know of it, but for its hints."""
        return ElasticJob(
            job_id=self.row.name,
            submitted_s=self.row.submitted_s,
            allocation=self.allocation,
            service_gpu_s=self.service_gpu_s,
            restarts=self.restarts,
            replicas=self.row.replicas if fixed_replicas else 0,
            max_replicas=max_replicas,
        )

    def hints(self, oracle: Oracle | None = None) -> Hints:
        """Return what it says of itself."""
        agent = self.agent
        return Hints(
            limits=self.model.limits,
            params=agent.params,
            noise=agent.noise,
            profiled_replicas=agent.profiled_replicas,
            restart_s=self.restart_s,
            oracle=oracle,
            progress=self.progress * self.model.limits.min_batch,
            done=self.done if self.declares else None,
        )

    @property
    def efficiency(self) -> float:
        """The worth of a sample in the batch that it runs with, by that of one in M0."""
        total = self.batch.total(replicas_of(self.allocation))
        noise = self.model.noise(min(self.epoch, self.model.epochs - 1), total)
        return float(noise.efficiency(total / self.model.limits.min_batch))

    @property
    def done(self) -> float:
        """The part of its epochs that is over, as its own count of samples has it."""
        goals = self.model.goals
        before = float(goals[self.epoch - 1]) if self.epoch else 0.0
        length = float(goals[self.epoch]) - before
        within = (self.progress - before) / length if length > 0 else 0.0
        return (self.epoch + within) / self.model.epochs

    def oracle(self, most: int, gpus_per_node: int) -> Oracle:
        """Return what is left of it, by the true step times on the fewest nodes (Optimus)."""
        steps = self.model.iterations[self._recorded_batch()]
        present = steps[min(self.epoch, self.model.epochs - 1)]
        left = float(steps[-1] - present) or 1.0
        if len(self._step_s) != most:
            counts = range(1, most + 1)
            self._step_s = tuple(self._true_step_s(count, gpus_per_node) for count in counts)
        return Oracle(self._step_s, left)

    def _recorded_batch(self) -> int:
        return int(abs(self.model.batches - self.tuned_batch).argmin())

    def _true_step_s(self, replicas: int, gpus_per_node: int) -> float:
        batch = divide(self.tuned_batch, replicas, self.model.limits)
        accumulated = max(batch.accumulated, 1) if replicas == 1 else batch.accumulated
        if accumulated != batch.accumulated:
            local = -(-self.tuned_batch // (replicas * (accumulated + 1)))
            batch = Batch(local, accumulated)
        times = self.model.step_time(tightest(replicas, gpus_per_node), batch.local)
        return times.whole_s(batch.accumulated)
