"""Counterfactuals: what is told to make a request start does so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run import remedies as module
from stoker_scheduler.core.dry_run.remedies import Remedy, remedies
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import to_units
from tests.unit.scheduler.core_driver import Core
from tests.unit.scheduler.random_states import add_group, random_core, random_request

if TYPE_CHECKING:
    import pytest

    from stoker_scheduler.core.state import State

SEEDS = 120


def leases_of(state: State, request_id: str) -> int:
    """Return how many leases a request got."""
    return sum(lease.request_id == request_id for lease in state.leases.values())


def apply(core: Core, remedy: Remedy) -> None:
    """Have what a remedy says happen to a core."""
    for event in remedy.events:
        if isinstance(event, ev.Tick):
            while core.at_s < event.at_s:
                core.wait(0.25)
        else:
            core.feed(event)


def test_applying_any_remedy_makes_the_request_start() -> None:
    found: Counter[str] = Counter()
    for seed in range(SEEDS):
        for which in (0, 1):
            core, random = random_core(seed)
            request = random_request(core, random, "r_new", f"p_{random.randrange(7)}")
            add_group(core, request)
            before = core.state.snapshot()
            told = remedies(core.state, request)
            assert core.state.snapshot() == before, f"seed {seed}"
            core.feed(request)
            if leases_of(core.state, "r_new"):
                assert told == (), f"seed {seed}: it starts"
                found["starts"] += 1
                break
            assert [one.text for one in remedies(core.state, request)] == [one.text for one in told]
            found[f"{len(told)} remedies"] += 1
            if which >= len(told):
                break
            apply(core, told[which])
            found.update(type(event).__name__ for event in told[which].events)
            assert leases_of(core.state, "r_new"), f"seed {seed}: {told[which].text}"
            nodes = {one.node_id for one in core.state.leases.values() if one.request_id == "r_new"}
            # Owners that are ahead may be content with less than the fork gave them.
            assert told[which].node_id in nodes or len(told[which].changes) > 1, f"seed {seed}"
    for kind in ("starts", "2 remedies", "LeaseReleased", "NodeJoined", "QueuesChanged"):
        assert found[kind], found


def waiting(core: Core, **options: object) -> ev.LeaseRequested:
    """Have a request wait at a core, and return it."""
    request_id = core.ask("p_x", wait_if_infeasible=True, **options)
    return core.state.pending[request_id].request


def test_the_least_is_told_with_who_has_it() -> None:
    core = Core({"GPU": 2}, {"GPU": 2})
    core.ask("p_1", GPU=1, name="small")
    core.ask("p_2", GPU=2, name="large")
    core.ask("p_3", GPU=1, name="small")
    by_itself, by_hand = remedies(core.state, waiting(core, GPU=2))
    assert by_itself.text == "it starts if 2 GPU on n_2 is freed, when task large ends"
    assert [lease.name for lease in by_itself.leases] == ["large"] and by_itself.node_id == "n_2"
    assert by_hand.text == "it starts if a node with 2 GPU joins"


def test_those_that_are_ahead_are_served_first() -> None:
    core = Core({"CPU": 2})
    for name in ("a", "b"):
        core.ask("p_1", CPU=1, name=name, class_key=name)
    core.ask("p_2", CPU=1, priority=5)
    by_itself, _ = remedies(core.state, waiting(core, CPU=1))
    assert len(by_itself.leases) == 2, "the first that ends is for the other"


def test_a_limit_is_lifted_or_waited_for() -> None:
    core = Core({"CPU": 8})
    team = QueueSpec(name="team", limit=to_units({"CPU": 2}), user_limit=to_units({"CPU": 2}))
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(team,)))
    core.ask("p_1", count=2, CPU=1, queue="team", name="train")
    by_itself, by_hand = remedies(core.state, waiting(core, CPU=1, queue="team"))
    assert by_itself.text == "it starts if 1 CPU of queue 'team' is freed, when task train ends"
    assert by_hand.text == (
        "it starts if the user_limit of queue 'team' is 3 CPU (stoker queue set team --user-limit "
        "CPU=3) and the limit of queue 'team' is 3 CPU (stoker queue set team --limit CPU=3)"
    )
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(QueueSpec(name="team", stopped=True),)))
    (start,) = remedies(core.state, waiting(core, CPU=1, queue="team"))
    assert start.text.endswith("queue 'team' is started (stoker queue start team)")


def test_what_only_time_is_needed_for_is_waited_for() -> None:
    core = Core({"CPU": 8})
    team = QueueSpec(name="team", rate_limit=1.0)
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(team,)))
    core.ask("p_1", count=3, CPU=1, queue="team")
    request = waiting(core, CPU=1, queue="team")
    (told,) = remedies(core.state, request)
    assert told.text == "it starts if 1.0 s pass"
    apply(core, told)
    assert core.granted(request.request_id)


def test_what_no_change_that_is_tried_would_help_has_no_remedy() -> None:
    core = Core({"CPU": 1})
    requirements = make_requirements({"CPU": 2}, node_id="n_1")
    assert remedies(core.state, waiting(core, requirements=requirements)) == ()


def test_a_state_too_large_to_be_tried_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core({"CPU": 1})
    core.ask(CPU=1)
    request = waiting(core, CPU=1)
    assert remedies(core.state, request)
    monkeypatch.setattr(module, "MAX_SIZE", 2)
    assert remedies(core.state, request) == ()
