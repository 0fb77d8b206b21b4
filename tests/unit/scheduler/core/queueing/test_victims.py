"""The choice of victims: the cheapest, and none that is not needed."""

from __future__ import annotations

import random

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.model.nodes import NodeInfo, make_node_spec
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.placement.feasibility import first_obstacle
from stoker_scheduler.core.queueing.victims import choose_victims, victim_cost


def lease_on(place: NodeInfo, lease_id: str, at_s: float = 0.0, **resources: float) -> LeaseState:
    requirements = make_requirements(resources)
    gpus = place.choose(requirements) or {}
    place.allocate(requirements, gpus)
    return LeaseState(
        lease_id=lease_id,
        owner_id="p_1",
        account=Account("p_1", "job_1"),
        job_id="job_1",
        kind=Kind.TASK,
        node_id=place.node_id,
        incarnation=1,
        requirements=requirements,
        gpus=gpus,
        class_key="",
        priority=0,
        granted_at_s=at_s,
        since_s=at_s,
        place=place,
        phase=Phase.HELD,
    )


def test_the_cost_is_the_kind_then_priority_then_preemptions_then_the_work_lost() -> None:
    place = NodeInfo(make_node_spec("n_1", {"CPU": 8}))
    leases = [lease_on(place, f"l_{i}", at_s=float(i), CPU=1) for i in range(5)]
    asked, high, spared, old, new = leases
    for lease in (high, spared, old, new):
        lease.preemptible = True
    high.priority, spared.preemptions = 1, 2
    assert sorted(leases, key=victim_cost) == [new, old, spared, high, asked]


def test_a_small_victim_is_spared_once_a_larger_one_suffices() -> None:
    place = NodeInfo(make_node_spec("n_1", {"CPU": 4}))
    small, large = lease_on(place, "l_1", CPU=1), lease_on(place, "l_2", CPU=3)
    trial = place.copy()
    victims = choose_victims(trial, make_requirements({"CPU": 3}), [small, large], lambda _: True)
    assert victims == [large]
    assert trial.available["CPU"] == 0, "the small one is still there"


def test_no_victim_can_be_left_out_of_any_choice(seed: int) -> None:
    rng = random.Random(seed)
    chosen = 0
    for _ in range(300):
        place = NodeInfo(make_node_spec("n_1", {"CPU": 8, "GPU": 2}, device_indices=(0, 1)))
        leases = []
        for index in range(12):
            wanted = rng.choice([{"CPU": 1}, {"CPU": 2}, {"GPU": 0.5}, {"CPU": 1, "GPU": 0.25}])
            if first_obstacle(place, make_requirements(wanted)) is None:
                leases.append(lease_on(place, f"l_{index}", **wanted))
        rng.shuffle(leases)
        wanted = make_requirements(rng.choice([{"CPU": 3}, {"GPU": 1}, {"CPU": 4, "GPU": 1}]))
        victims = choose_victims(place.copy(), wanted, leases, lambda _: True)
        for spared in victims or ():
            trial = place.copy()
            for lease in victims or ():
                if lease is not spared:
                    trial.free(lease.requirements, lease.gpus)
            assert first_obstacle(trial, wanted) is not None, "one victim too many"
            chosen += 1
    assert chosen > 300
