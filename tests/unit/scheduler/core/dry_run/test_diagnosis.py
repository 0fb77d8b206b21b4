"""Diagnoses: what binds a request, in each of the ways in which it can wait, and who holds what it wants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.diagnosis import (
    MAX_HOLDERS,
    ConstraintKind,
    Diagnosis,
    diagnose,
)
from stoker_scheduler.core.model.nodes import Health, make_node_spec
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import to_units
from tests.unit.scheduler.core_driver import Core


def diagnosis(core: Core, *, try_remedies: bool = False, **options: object) -> Diagnosis:
    """Return the diagnosis of a request that waits at a core."""
    request_id = core.ask("p_x", wait_if_infeasible=True, **options)
    request = core.state.pending[request_id].request
    return diagnose(core.state, request, at_s=core.at_s, try_remedies=try_remedies)


def kind_of(found: Diagnosis) -> ConstraintKind | None:
    return found.constraint.kind if found.constraint is not None else None


def busy() -> Core:
    core = Core({"CPU": 4, "GPU": 1})
    core.ask("p_1", CPU=4, GPU=1, name="train", kind=ev.Kind.ACTOR)
    return core


def test_what_others_hold_binds_and_they_are_named_with_the_resource() -> None:
    found = diagnosis(busy(), GPU=1, try_remedies=True)
    assert kind_of(found) is ConstraintKind.CAPACITY
    assert found.constraint is not None and found.constraint.resource == "GPU"
    assert found.constraint.text.startswith("n_1, the nearest: needs 1 GPU, 0 of 1 devices")
    assert [lease.name for lease in found.holders] == ["train"]
    (needed,) = found.remedies[0].leases
    assert needed.lease_id == found.holders[0].lease_id and found.position == 0


def test_without_the_search_for_remedies_there_are_none() -> None:
    found = diagnosis(busy(), GPU=1)
    assert found.remedies == () and found.holders


def test_a_limit_binds_before_all_else() -> None:
    core = busy()
    team = QueueSpec(name="team", limit=to_units({"GPU": 1}))
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(team,)))
    core.feed(ev.NodeJoined(at_s=0.0, spec=make_node_spec("n_2", {"GPU": 1})))
    core.ask("p_2", GPU=1, queue="team", name="first")
    found = diagnosis(core, GPU=1, queue="team")
    assert kind_of(found) is ConstraintKind.QUEUE_LIMIT
    assert found.constraint is not None
    assert (found.constraint.queue, found.constraint.resource) == ("team", "GPU")
    assert [lease.name for lease in found.holders] == ["first"], "of that queue only"


def test_leases_that_were_asked_back_bind() -> None:
    core = Core({"CPU": 1})
    core.ask("low", CPU=1)
    core.wait(1)
    assert kind_of(diagnosis(core, CPU=1, priority=3)) is ConstraintKind.PREEMPTION


@pytest.mark.parametrize("change", [{"health": Health.SUSPECT}, {"cordon": "cordoned"}])
def test_a_node_that_takes_nothing_binds(change: dict[str, object]) -> None:
    core = Core({"CPU": 1})
    spec = core.state.nodes["n_1"].spec
    core.feed(ev.NodeChanged(at_s=0.0, spec=replace(spec, **change)))  # type: ignore[arg-type]
    assert kind_of(diagnosis(core, CPU=1)) is ConstraintKind.NODE


def test_a_reservation_for_another_binds_and_says_for_how_long() -> None:
    core = Core({"CPU": 2})
    core.ask("p_1", CPU=1, kind=ev.Kind.TASK)
    core.ask("p_2", CPU=2, priority=0)
    core.wait(7)
    found = diagnosis(core, CPU=1)
    assert kind_of(found) is ConstraintKind.RESERVATION
    assert found.constraint is not None and ", 2 CPU; for 5" in found.constraint.text


def test_what_never_fits_and_what_a_group_lacks() -> None:
    core = busy()
    assert kind_of(diagnosis(core, GPU=9)) is ConstraintKind.INFEASIBLE
    core.group("PACK", {"CPU": 1})
    inside = make_requirements({"CPU": 1}, group_id="pg_1")
    assert kind_of(diagnosis(core, requirements=inside)) is ConstraintKind.GROUP


def test_a_start_is_no_constraint_that_anything_could_lift() -> None:
    core = Core({"CPU": 1}, slow=True)
    request = core.state.pending[core.ask("p_x", CPU=1)].request
    found = diagnose(core.state, request, at_s=core.at_s, try_remedies=True)
    assert kind_of(found) is ConstraintKind.STARTING
    assert found.pending is None and not found.remedies and not found.holders


def test_a_gang_that_is_being_held_has_its_nodes() -> None:
    core = Core({"CPU": 1}, slow=True)
    request = core.state.pending[core.group("PACK", {"CPU": 1})].request
    found = diagnose(core.state, request, at_s=core.at_s, try_remedies=True)
    assert found.constraint is not None and kind_of(found) is ConstraintKind.STARTING
    assert found.constraint.text == "its bundles are being held on n_1"


def test_what_would_start_has_no_constraint() -> None:
    core = Core({"CPU": 1})
    asked = ev.LeaseRequested(
        at_s=0.0,
        request_id="r_9",
        owner_id="p_9",
        job_id="job_9",
        requirements=make_requirements({"CPU": 1}),
        class_key="",
        count=1,
        deadline_s=1.0,
    )
    found = diagnose(core.state, asked, at_s=0.0, try_remedies=True)
    assert found.constraint is None and found.remedies == () and found.position is None


def test_holders_are_counted_out() -> None:
    core = Core({"CPU": 50})
    core.ask("p_1", count=50, CPU=1)
    assert len(diagnosis(core, CPU=1).holders) == MAX_HOLDERS
