"""The steps of elastic jobs, on the gcs's own rules: growth whole, shrinking with notice, no step twice."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from stoker_scheduler.core.elastic import generations as gen
from tests.unit.scheduler.elastic.generations_world import GRACE_S, World

if TYPE_CHECKING:
    from stoker_scheduler.core.elastic.allocations import Allocation


def world(*sizes: int) -> World:
    return World(Random(1), {f"n_{i}": size for i, size in enumerate(sizes)})


def settled(one: World, within: int = 60) -> list[gen.Order]:
    """Let time pass until nothing is ordered for some looks; return all orders."""
    orders: list[gen.Order] = []
    quiet = 0
    for _ in range(within):
        new = one.tick()
        orders += new
        quiet = 0 if new else quiet + 1
        if quiet > 10:
            return orders
    raise AssertionError(f"it does not settle: {orders[-6:]}")


def test_it_grows_by_a_reservation_and_an_offer_of_all() -> None:
    one = world(4, 4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4), ("n_1", 2))
    orders = settled(one)
    assert [type(order) for order in orders] == [gen.Reserve, gen.Offer]
    assert one.allocation("job_1") == {"n_0": 4, "n_1": 2}
    state = one.state("job_1")
    assert (state.generation, state.restarts, state.offer) == (1, 0, None)


def test_it_shrinks_by_an_offer_of_less_and_a_release_after_the_answer() -> None:
    one = world(4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    one.targets["job_1"] = (("n_0", 2),)
    one.tick()
    offer = one.state("job_1").offer
    assert offer is not None and offer.withdraws and len(offer.replicas) == 2
    assert one.free() == {"n_0": 0}, "nothing is released before the job has answered"
    settled(one)
    assert one.free() == {"n_0": 2}
    assert one.state("job_1").replicas == offer.replicas


def test_a_place_more_is_lent_where_there_is_room_and_the_one_that_is_given_back_is_released() -> (
    None
):
    one = world(2, 3)
    one.join("job_1", max_replicas=3)
    one.targets["job_1"] = (("n_0", 2),)
    settled(one)
    one.hint("job_1", spares=1)
    assert [type(order) for order in settled(one)] == [gen.Reserve, gen.Offer]
    assert one.allocation("job_1") == {"n_0": 2, "n_1": 1}
    assert settled(one) == [], "it stays while the job asks for it"
    slow = one.state("job_1").replicas[0]
    one.hint("job_1", unwanted=(slow,))
    assert [type(order) for order in settled(one)] == [gen.TakeBack, gen.Release]
    assert one.allocation("job_1") == {"n_0": 1, "n_1": 1}, "the newcomer stays where it is"
    assert slow not in one.state("job_1").replicas and one.state("job_1").lost == 0


def test_of_two_that_are_replaced_one_after_the_other_both_newcomers_stay() -> None:
    one = world(2, 2)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 2),)
    settled(one)
    one.hint("job_1", spares=2)
    settled(one)
    first, second = one.state("job_1").replicas[:2]
    one.hint("job_1", spares=1, unwanted=(first,))
    settled(one)
    assert one.allocation("job_1") == {"n_0": 1, "n_1": 2}
    one.hint("job_1", unwanted=(second,))
    settled(one)
    assert one.allocation("job_1") == {"n_1": 2}


def test_a_job_gives_what_a_round_takes_from_it_though_it_asks_for_a_place_more() -> None:
    one = world(5, 2)
    one.join("job_1")
    one.join("job_2")
    one.targets = {"job_1": (("n_0", 5),), "job_2": (("n_1", 2),)}
    settled(one)
    one.hint("job_1", spares=1)
    assert settled(one) == [], "there is no room for one more"
    one.targets = {"job_1": (("n_0", 4),), "job_2": (("n_0", 1), ("n_1", 2))}
    orders = settled(one)
    assert one.allocation("job_1") == {"n_0": 4}
    assert one.allocation("job_2") == {"n_0": 1, "n_1": 2}
    assert one.state("job_1").preemptions == 0, orders
    one.targets = {"job_1": (("n_0", 4),), "job_2": (("n_1", 2),)}
    settled(one)
    assert one.allocation("job_1") == {"n_0": 5}, "then one is lent"
    one.targets = {"job_1": (("n_0", 4),), "job_2": (("n_1", 1),)}
    assert not [order for order in settled(one) if getattr(order, "job_id", "") == "job_1"]


def test_what_a_job_gives_back_while_a_round_takes_more_is_not_reserved_for_it_again() -> None:
    one = world(3, 2)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 3), ("n_1", 2))
    settled(one)
    one.hint("job_1", unwanted=one.state("job_1").replicas[:1])
    one.targets["job_1"] = (("n_0", 3),)
    orders = settled(one)
    assert not [order for order in orders if isinstance(order, gen.Reserve)]
    assert one.allocation("job_1") == {"n_0": 2, "n_1": 1}


def test_no_place_is_lent_beyond_the_most_of_a_job_or_where_there_is_none() -> None:
    one = world(2)
    one.join("job_1", max_replicas=2)
    one.join("job_2")
    one.targets |= {"job_1": (("n_0", 1),), "job_2": (("n_0", 1),)}
    settled(one)
    for job_id in one.trainers:
        one.hint(job_id, spares=1)
    assert settled(one) == []
    one.targets["job_2"] = ()
    settled(one)
    one.hint("job_1", spares=2)
    settled(one)
    assert one.allocation("job_1") == {"n_0": 2}


def test_places_without_which_a_job_has_too_few_are_not_taken_back() -> None:
    one = world(2)
    one.join("job_1", min_replicas=2)
    one.targets["job_1"] = (("n_0", 2),)
    settled(one)
    one.hint("job_1", unwanted=one.state("job_1").replicas[:1])
    assert settled(one) == []


def test_what_is_not_answered_in_time_costs_all_and_comes_back() -> None:
    one = world(4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    one.trainers["job_1"].answers_after_s = None
    one.targets["job_1"] = (("n_0", 2),)
    for _ in range(int(GRACE_S) + 2):
        one.tick()
    state = one.state("job_1")
    assert (state.preemptions, state.generation, state.replicas) == (1, 0, ())
    one.trainers["job_1"].answers_after_s = 1.0
    settled(one)
    assert one.allocation("job_1") == {"n_0": 2}


def test_a_failed_offer_leaves_everything_as_it_was() -> None:
    one = world(4, 4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    before = one.state("job_1")
    one.trainers["job_1"].answers_after_s = None
    one.targets["job_1"] = (("n_0", 4), ("n_1", 4))
    while one.state("job_1").offer is None:
        one.tick()
    assert one.free() == {"n_0": 0, "n_1": 0}, "what is offered is reserved"
    while one.state("job_1").offer is not None:
        one.tick()
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    after = one.state("job_1")
    assert (after.replicas, after.generation) == (before.replicas, before.generation)
    assert (after.unanswered, after.restarts, after.preemptions) == (1, 0, 0)
    assert one.free() == {"n_0": 0, "n_1": 4}


def test_a_reservation_that_others_were_before_ends_and_is_made_again() -> None:
    one = world(4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4),)
    one.places_groups = False
    one.tick()
    one.others["n_0"], one.places_groups = 2, True
    for _ in range(int(gen.RESERVE_S) + 3):
        one.tick()
    assert not one.directory.groups, "what cannot be had is not waited for without end"
    one.others["n_0"] = 0
    settled(one)
    assert one.allocation("job_1") == {"n_0": 4}


def test_an_offer_of_a_node_that_dies_is_void_at_once() -> None:
    one = world(4, 4)
    one.join("job_1")
    one.trainers["job_1"].answers_after_s = None
    one.targets["job_1"] = (("n_1", 4),)
    while one.state("job_1").offer is None:
        one.tick()
    one.lose("n_1")
    (order,) = [order for order in one.tick() if isinstance(order, gen.Withdraw)]
    assert not order.unanswered and one.state("job_1").offer is None


def test_of_two_that_want_the_same_room_one_reserves_it() -> None:
    one = world(4)
    for job_id in ("job_1", "job_2"):
        one.join(job_id)
        one.targets[job_id] = (("n_0", 4),)
    assert [type(order) for order in one.tick()] == [gen.Reserve]


def test_two_that_change_places_do_not_wait_for_each_other() -> None:
    one = world(4, 4)
    for job_id, node_id in (("job_1", "n_0"), ("job_2", "n_1")):
        one.join(job_id)
        one.targets[job_id] = ((node_id, 4),)
    settled(one)
    one.targets = {"job_1": (("n_1", 4),), "job_2": (("n_0", 4),)}
    settled(one)
    assert one.allocation("job_1") == {"n_1": 4}
    assert one.allocation("job_2") == {"n_0": 4}


def test_who_only_grows_waits_for_those_who_change_places() -> None:
    one = world(4, 4)
    for job_id, node_id in (("job_1", "n_0"), ("job_2", "n_1"), ("job_3", "n_1")):
        one.join(job_id)
        one.targets[job_id] = ((node_id, 3 if job_id == "job_2" else 1),)
    settled(one)
    one.targets = {"job_1": (("n_1", 1),), "job_2": (("n_0", 3),), "job_3": (("n_1", 3),)}
    settled(one)
    assert [one.allocation(f"job_{i}") for i in (1, 2, 3)] == [{"n_1": 1}, {"n_0": 3}, {"n_1": 3}]
    one.targets = {"job_1": (("n_0", 4),), "job_2": (("n_1", 3),), "job_3": (("n_1", 1),)}
    settled(one)
    assert [one.allocation(f"job_{i}") for i in (1, 2, 3)] == [{"n_0": 4}, {"n_1": 3}, {"n_1": 1}]


def test_a_lost_node_makes_a_generation_of_what_is_left() -> None:
    one = world(4, 4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4), ("n_1", 4))
    settled(one)
    one.lose("n_1")
    one.tick()
    state = one.state("job_1")
    assert (len(state.replicas), state.lost, state.generation) == (4, 4, 1)
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    state = one.state("job_1")
    assert (len(state.replicas), state.lost, state.generation) == (4, 0, 2)


def test_all_nodes_lost_leave_no_generation_and_no_group() -> None:
    one = world(4)
    one.join("job_1")
    one.targets["job_1"] = (("n_0", 4),)
    settled(one)
    one.lose("n_0")
    one.targets["job_1"] = ()
    settled(one)
    state = one.state("job_1")
    assert (state.replicas, state.generation, state.preemptions) == ((), 0, 0)
    assert not one.directory.groups


def test_nothing_is_ordered_while_nothing_changes() -> None:
    one = world(4, 4)
    for number in range(3):
        one.join(f"job_{number}")
    one.targets = {"job_0": (("n_0", 2),), "job_1": (("n_0", 2),), "job_2": (("n_1", 4),)}
    settled(one)
    assert not any(one.tick() for _ in range(20))


def test_random_worlds_never_break_a_promise_and_settle(seed: int) -> None:
    for number in range(60):
        random = Random(seed * 1000 + number)
        sizes = {f"n_{i}": random.choice((2, 4)) for i in range(random.randint(1, 5))}
        one = World(random, sizes)
        jobs = [f"job_{i}" for i in range(random.randint(1, 5))]
        for job_id in jobs:
            one.join(job_id, min_replicas=random.choice((1, 1, 2)))
        one.loses_orders = random.choice((0.0, 0.2))
        for _ in range(150):
            if random.random() < 0.1:
                one.targets = _targets(random, one.nodes, jobs)
            if random.random() < 0.05:
                trainer = one.trainers[random.choice(jobs)]
                trainer.answers_after_s = random.choice((0.0, 1.0, 4.0, 20.0, None))
            if random.random() < 0.02:
                job_id = random.choice(jobs)
                places = one.state(job_id).replicas
                given_back = random.sample(places, random.randint(0, len(places)))
                one.hint(job_id, spares=random.randint(0, 2), unwanted=tuple(given_back))
            if random.random() < 0.01 and len(one.nodes) > 1:
                one.lose(random.choice(sorted(one.nodes)))
                one.targets = _targets(random, one.nodes, jobs)
            one.tick()
        one.loses_orders = 0.0
        for job_id, trainer in one.trainers.items():
            trainer.answers_after_s = 1.0
            one.hint(job_id)
        one.targets = _targets(random, one.nodes, jobs)
        settled(one, within=600)
        for job_id in jobs:
            assert one.allocation(job_id) == dict(one.targets[job_id]), f"world {number}, {job_id}"
        held = sum(sum(one.allocation(job_id).values()) for job_id in jobs)
        assert sum(one.free().values()) == sum(one.nodes.values()) - held, "something is kept"


def _targets(random: Random, nodes: dict[str, int], jobs: list[str]) -> dict[str, Allocation]:
    """Return allocations that fit together, of two replicas at least or none."""
    free, found = dict(nodes), {}
    for job_id in jobs:
        taken: dict[str, int] = {}
        for node_id in random.sample(sorted(free), random.randint(0, len(free))):
            count = random.randint(0, free[node_id])
            if count:
                taken[node_id] = count
        if sum(taken.values()) < 2:
            taken = {}
        for node_id, count in taken.items():
            free[node_id] -= count
        found[job_id] = tuple(taken.items())
    return found
