"""A small world for the steps of elastic jobs: the gcs's rules, nodes that die, jobs that answer or not."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.registry.groups import rules as group_rules
from stoker_gcs.registry.jobs import elastic_rules
from stoker_scheduler.core.elastic import generations as gen
from stoker_scheduler.core.elastic.targets import Targets
from stoker_scheduler.elastic.controller import bundles_of
from stoker_scheduler.elastic.directory import ElasticDirectory, places_of
from stoker_wire.errors import ConflictError
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.elastic import (
    AnswerOffer,
    ElasticState,
    Hints,
    MakeOffer,
    Replica,
    Scaling,
    WithdrawReplicas,
)
from stoker_wire.messages.groups import (
    BundlePlacement,
    CreatePlacementGroup,
    GroupState,
    PlacementGroup,
    Reschedule,
)
from stoker_wire.messages.work import Job, JobState

if TYPE_CHECKING:
    from random import Random

    from stoker_scheduler.core.elastic.allocations import Allocation

GRACE_S = 5.0


@dataclass(slots=True)
class Trainer:
    """A job's half: how soon it answers, None for never, and the generation that it runs."""

    answers_after_s: float | None = 1.0
    running: int = 0
    saw: dict[int, float] = field(default_factory=dict)


class World:
    """Jobs, nodes and groups; ``tick`` has one look of the controller and lets a second pass."""

    def __init__(self, random: Random, nodes: dict[str, int]) -> None:
        self.random = random
        self.now_s = 0.0
        self.nodes = dict(nodes)
        self.others: Counter[str] = Counter()
        """What other work has of each node."""
        self.directory = ElasticDirectory()
        self.targets: dict[str, Allocation] = {}
        """What the last round has decided; another dict, or another content, is another round."""
        self.decided = Targets()
        self._round: tuple[dict[str, Allocation], dict[str, Allocation]] | None = None
        self.trainers: dict[str, Trainer] = {}
        self.refused = 0
        self.loses_orders = 0.0
        self.places_groups = True
        self._numbers = itertools.count(1)

    # What happens

    def join(self, job_id: str, **limits: int) -> None:
        scaling = Scaling(
            base_batch=64, max_local_batch=64, max_batch=1024, grace_s=GRACE_S, **limits
        )
        job = Job(
            job_id=job_id,
            name="",
            entrypoint="",
            state=JobState.RUNNING,
            submitted=True,
            namespace="",
            runtime_env=RuntimeEnv(),
            metadata={},
            resources={},
            created_at_s=self.now_s,
        )
        transition = elastic_rules.scaled(job, scaling, self.now_s)
        assert transition is not None
        self.directory.put_job(transition.record)
        self.trainers[job_id] = Trainer()

    def hint(self, job_id: str, **hints: Any) -> None:
        """Have a job say something of itself."""
        transition = elastic_rules.hinted(self.directory.jobs[job_id], Hints(**hints), self.now_s)
        assert transition is not None
        self.directory.put_job(transition.record)

    def lose(self, node_id: str) -> None:
        self.nodes.pop(node_id)
        self.others.pop(node_id, None)
        for group in list(self.directory.groups.values()):
            self._regroup(group, group_rules.node_lost(group, node_id, 9, "it died", self.now_s))

    # What is

    def state(self, job_id: str) -> ElasticState:
        state = self.directory.jobs[job_id].elastic
        assert state is not None
        return state

    def allocation(self, job_id: str) -> dict[str, int]:
        return self.state(job_id).allocation()

    def free(self) -> dict[str, int]:
        used = Counter(self.others)
        for group in self.directory.groups.values():
            used.update(place.node_id for place in group.placements.values())
        return {node_id: size - used[node_id] for node_id, size in self.nodes.items()}

    # A second

    def tick(self) -> list[gen.Order]:
        last = self._round
        if last is None or last[0] is not self.targets or last[1] != self.targets:
            self.decided.decide(self.targets)
            self._round = self.targets, dict(self.targets)
        standings = list(map(self.decided.seen, self.directory.standings(self.directory.jobs)))
        orders = gen.settle(standings, self.decided.by_job, self.free(), self.now_s)
        for order in orders:
            if self.random.random() >= self.loses_orders:
                self._obey(order)
            self.check()
        self.now_s += 1.0
        for job_id in self.trainers:
            self._answer(job_id)
            self.check()
        for group in list(self.directory.groups.values()):
            self._place(group)
            self.check()
        return orders

    def _obey(self, order: gen.Order) -> None:
        try:
            match order:
                case gen.Reserve():
                    scaling = self.state(order.job_id).scaling
                    body = CreatePlacementGroup(
                        group_id=f"pg_elastic.{next(self._numbers)}",
                        job_id=order.job_id,
                        bundles=bundles_of(scaling, order.wanted),
                        reschedule=Reschedule.NEVER,
                    )
                    self.directory.put_group(group_rules.created(body, "", self.now_s))
                case gen.Release():
                    group = self.directory.groups[order.group_id]
                    if order.bundles:
                        done = group_rules.released(group, order.bundles, "", self.now_s)
                    else:
                        done = group_rules.removed(group, "", self.now_s)
                    self._regroup(group, done)
                case gen.Offer():
                    made = MakeOffer(
                        version=order.version,
                        replicas=_replicas(order.places),
                        answer_within_s=order.answer_within_s,
                    )
                    job = self.directory.jobs[order.job_id]
                    self.directory.put_job(elastic_rules.offered(job, made, self.now_s).record)
                case gen.Withdraw():
                    self._withdraw(order.job_id, WithdrawReplicas(version=order.version))
                case gen.Preempt():
                    body_ = WithdrawReplicas(
                        version=order.version, replicas=_replicas(order.places), preempted=True
                    )
                    self._withdraw(order.job_id, body_)
                    self.trainers[order.job_id].running = 0
                case gen.Lose() | gen.TakeBack():
                    body_ = WithdrawReplicas(
                        version=order.version,
                        replicas=_replicas(order.places),
                        returned=isinstance(order, gen.TakeBack),
                    )
                    self._withdraw(order.job_id, body_)
                    if body_.returned:
                        left = places_of(self.state(order.job_id).replicas)
                        self.decided.took_back(order.job_id, left)
        except ConflictError:
            self.refused += 1

    def _withdraw(self, job_id: str, body: WithdrawReplicas) -> None:
        transition = elastic_rules.withdrawn(self.directory.jobs[job_id], body, self.now_s)
        if transition is not None:
            self.directory.put_job(transition.record)

    def _answer(self, job_id: str) -> None:
        trainer, state = self.trainers[job_id], self.state(job_id)
        if state.offer is None or trainer.answers_after_s is None:
            return
        saw_s = trainer.saw.setdefault(state.offer.generation, self.now_s)
        if self.now_s - saw_s < trainer.answers_after_s:
            return
        answer = AnswerOffer(generation=state.offer.generation)
        transition = elastic_rules.accepted(self.directory.jobs[job_id], answer, self.now_s)
        assert transition is not None
        assert answer.generation > trainer.running, "a generation begins once"
        trainer.running = answer.generation
        self.directory.put_job(transition.record)

    def _place(self, group: PlacementGroup) -> None:
        wanted = group_rules.missing(group)
        if not wanted or not self.places_groups or self.random.random() < 0.3:
            return
        free, placements = self.free(), dict(group.placements)
        for index in wanted:
            node_id = group.bundles[index].label_selector["stoker.io/node-id"]
            if free.get(node_id, 0) <= 0:
                return
            free[node_id] -= 1
            placements[index] = BundlePlacement(
                lease_id=f"l_{index}", node_id=node_id, node_incarnation=1
            )
        self.directory.put_group(
            msgspec.structs.replace(group, state=GroupState.CREATED, placements=placements)
        )

    def _regroup(self, group: PlacementGroup, transition: object) -> None:
        if transition is not None:
            self.directory.put_group(transition.record)  # type: ignore[attr-defined]

    # What must hold at any moment

    def check(self) -> None:
        assert all(free >= 0 for free in self.free().values()), f"over-committed: {self.free()}"
        used: Counter[tuple[str, int]] = Counter()
        for job_id, trainer in self.trainers.items():
            state = self.state(job_id)
            assert trainer.running <= state.numbered
            count = len(state.replicas)
            low, high = state.scaling.min_replicas, state.scaling.max_replicas
            assert not count or state.lost or low <= count <= high, (job_id, count)
            used.update((one.group_id, one.bundle) for one in state.replicas)
            if state.offer is not None:
                offered = len(state.offer.replicas)
                assert not offered or low <= offered <= high
                held = {(one.group_id, one.bundle) for one in state.replicas}
                used.update(
                    key
                    for one in state.offer.replicas
                    if (key := (one.group_id, one.bundle)) not in held
                )
        assert max(used.values(), default=0) <= 1, "a bundle is two jobs', or two replicas'"


def _replicas(places: gen.Places) -> tuple[Replica, ...]:
    return tuple(
        Replica(group_id=one.group_id, bundle=one.bundle, node_id=one.node_id) for one in places
    )
