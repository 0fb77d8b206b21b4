"""Bundles in the lease machine: held all or none, given up unless committed, fenced."""

from __future__ import annotations

from stoker_nodelet.core import LeaseTerms, Policy, State, WorkKind, step
from stoker_nodelet.core.commands import RefuseOrder
from stoker_nodelet.core.events import (
    BundlesCommitted,
    BundlesRequested,
    LeasesReleased,
    NodeFenced,
    NodeRegistered,
    Ticked,
)


def terms(lease_id: str, incarnation: int = 1) -> LeaseTerms:
    return LeaseTerms(
        lease_id=lease_id, job_id="job_1", kind=WorkKind.BUNDLE, node_incarnation=incarnation
    )


def machine() -> State:
    state = State(policy=Policy(warm_workers=0, prepared_ttl_s=10.0))
    step(state, NodeRegistered(incarnation=1))
    return state


def hold(
    state: State, *leases: LeaseTerms, epoch: int = 1, at_s: float = 0.0, prepare: bool = False
) -> list[RefuseOrder]:
    event = BundlesRequested(at_s=at_s, leases=leases, epoch=epoch, prepare=prepare)
    commands = step(state, event)
    assert state.violations() == []
    return [command for command in commands if isinstance(command, RefuseOrder)]


def test_bundles_are_held_until_they_are_released() -> None:
    state = machine()
    assert hold(state, terms("l_1"), terms("l_2")) == []
    step(state, Ticked(at_s=1000.0))
    assert list(state.bundles) == ["l_1", "l_2"]
    step(state, LeasesReleased(at_s=1000.0, lease_ids=("l_1",), epoch=1))
    assert list(state.bundles) == ["l_2"]
    (refusal,) = hold(state, terms("l_1"))
    assert refusal.code == "conflict" and "has ended" in refusal.message


def test_prepared_bundles_are_given_up_unless_they_are_committed() -> None:
    state = machine()
    hold(state, terms("l_1"), terms("l_2"), prepare=True)
    step(state, BundlesCommitted(lease_ids=("l_1",), epoch=1))
    step(state, Ticked(at_s=9.0))
    assert list(state.bundles) == ["l_1", "l_2"]
    step(state, Ticked(at_s=10.1))
    assert list(state.bundles) == ["l_1"]
    step(state, BundlesCommitted(lease_ids=("l_2",), epoch=1))
    assert list(state.bundles) == ["l_1"], "a commit that comes late revives nothing"


def test_an_order_that_comes_twice_changes_nothing_more() -> None:
    state = machine()
    hold(state, terms("l_1"), prepare=True)
    step(state, BundlesCommitted(lease_ids=("l_1",), epoch=1))
    assert hold(state, terms("l_1"), prepare=True, at_s=5.0) == []
    step(state, Ticked(at_s=100.0))
    assert list(state.bundles) == ["l_1"]


def test_one_that_is_refused_refuses_all() -> None:
    state = machine()
    (refusal,) = hold(state, terms("l_1"), terms("l_2", incarnation=2))
    assert refusal.code == "fenced" and not state.bundles


def test_former_leaders_change_nothing() -> None:
    state = machine()
    hold(state, terms("l_1"), epoch=2, prepare=True)
    (refusal,) = hold(state, terms("l_2"), epoch=1)
    assert refusal.code == "fenced" and list(state.bundles) == ["l_1"]
    (late,) = step(state, BundlesCommitted(lease_ids=("l_1",), epoch=1))
    assert isinstance(late, RefuseOrder)
    assert state.bundles["l_1"].prepared_at_s is not None


def test_a_node_that_is_given_up_holds_nothing() -> None:
    state = machine()
    hold(state, terms("l_1"))
    step(state, NodeFenced(at_s=0.0))
    assert not state.bundles
