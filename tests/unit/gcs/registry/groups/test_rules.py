"""The state machine of a placement group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_gcs.registry.groups import rules
from stoker_wire.errors import BadRequestError, ConflictError
from stoker_wire.messages.cluster import GrantedLease, Lease, LeaseKind
from stoker_wire.messages.common import Address
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.groups import (
    Bundle,
    CreatePlacementGroup,
    GroupState,
    GroupStrategy,
    PlacementGroup,
    Reschedule,
)

if TYPE_CHECKING:
    from stoker_gcs.state.records import Transition


def group(bundles: int = 2, **options: Any) -> PlacementGroup:
    body = CreatePlacementGroup(
        group_id="pg_1",
        job_id="job_1",
        bundles=(Bundle(resources={"CPU": 1}),) * bundles,
        **options,
    )
    return rules.created(body, "ns", 1.0)


def grants(*nodes: tuple[int, str, int]) -> tuple[GrantedLease, ...]:
    """Grants of bundles: number, node and its incarnation."""
    return tuple(
        GrantedLease(
            lease=Lease(
                lease_id=f"l_{index}.{node_id}",
                owner_id="gcs",
                job_id="job_1",
                kind=LeaseKind.BUNDLE,
                node_id=node_id,
                node_incarnation=incarnation,
                resources={"CPU": 1},
                group_id="pg_1",
                bundle=index,
            ),
            worker_id="",
            address=Address("", "", "", "", ""),
        )
        for index, node_id, incarnation in nodes
    )


def then(transition: Transition[PlacementGroup] | None, kind: EventKind) -> PlacementGroup:
    assert transition is not None and transition.kind is kind
    return transition.record


def placed(**options: Any) -> PlacementGroup:
    granted = grants((1, "n_2", 1), (0, "n_1", 1))
    return then(rules.placed(group(**options), granted, 0, 2.0), EventKind.GROUP_PLACED)


def test_a_group_is_created_when_all_its_bundles_are_granted() -> None:
    one = placed()
    assert (one.state, one.placed_at_s, one.attempt) == (GroupState.CREATED, 2.0, 0)
    assert [(i, p.node_id) for i, p in one.placements.items()] == [(0, "n_1"), (1, "n_2")]
    assert rules.missing(one) == ()
    assert rules.placed(one, grants((0, "n_3", 1)), 0, 3.0) is None


def test_it_says_once_why_it_waits() -> None:
    waiting = then(rules.delayed(group(), "no room"), EventKind.GROUP_DELAYED)
    assert waiting.reason == "no room"
    assert rules.delayed(waiting, "no room") is None
    assert rules.delayed(placed(), "no room") is None


def test_a_lost_node_has_its_bundles_placed_again() -> None:
    one = then(rules.node_lost(placed(), "n_1", 2, "it died", 9.0), EventKind.GROUP_RESCHEDULING)
    assert (one.state, one.attempt, one.reschedules) == (GroupState.RESCHEDULING, 1, 1)
    assert rules.missing(one) == (0,) and one.reason == "it died"
    assert rules.placed(one, grants((0, "n_3", 1)), 0, 3.0) is None, "a grant to an older attempt"
    again = then(rules.placed(one, grants((0, "n_3", 1)), 1, 3.0), EventKind.GROUP_PLACED)
    assert [p.node_id for p in again.placements.values()] == ["n_3", "n_2"]


@pytest.mark.parametrize(
    "options", [{"reschedule": Reschedule.GROUP}, {"strategy": GroupStrategy.STRICT_PACK}]
)
def test_or_all_of_them(options: dict[str, Any]) -> None:
    one = then(
        rules.node_lost(placed(**options), "n_1", 2, "it died", 9.0), EventKind.GROUP_RESCHEDULING
    )
    assert rules.missing(one) == (0, 1)


def test_a_second_loss_while_it_is_placed_again_counts_as_well() -> None:
    one = then(rules.node_lost(placed(), "n_1", 2, "it died", 9.0), EventKind.GROUP_RESCHEDULING)
    two = then(rules.node_lost(one, "n_2", 2, "it died too", 9.0), EventKind.GROUP_RESCHEDULING)
    assert (rules.missing(two), two.attempt) == ((0, 1), 2)


def test_nodes_without_its_bundles_and_later_incarnations_do_not_matter() -> None:
    assert rules.node_lost(placed(), "n_9", 9, "it died", 9.0) is None
    assert rules.node_lost(placed(), "n_1", 1, "it started again", 9.0) is None


def test_removed_is_the_end() -> None:
    one = then(rules.removed(placed(), "by its user", 5.0), EventKind.GROUP_REMOVED)
    assert (one.state, one.placements, one.removed_at_s) == (GroupState.REMOVED, {}, 5.0)
    assert rules.missing(one) == ()
    assert rules.removed(one, "again", 6.0) is None
    assert rules.node_lost(one, "n_1", 9, "it died", 9.0) is None
    assert rules.placed(one, grants((0, "n_1", 1)), 0, 7.0) is None


def test_a_preempted_group_is_placed_again_whole_and_only_once() -> None:
    placed = rules.placed(group(preemptible=True), grants((0, "n_1", 1), (1, "n_2", 1)), 0, 2.0)
    before = then(placed, EventKind.GROUP_PLACED)
    preempted = rules.preempted(before, "l_1.n_2", "for x", 9.0)
    after = then(preempted, EventKind.GROUP_RESCHEDULING)
    assert (after.state, after.placements, after.attempt) == (GroupState.RESCHEDULING, {}, 1)
    assert (after.preemptions, after.reason) == (1, "for x")
    assert rules.preempted(after, "l_1.n_2", "for x", 9.0) is None


def test_bundles_are_given_up_one_by_one_and_with_the_last_the_group() -> None:
    one = then(rules.released(placed(), (1,), "by its user", 5.0), EventKind.GROUP_SHRUNK)
    assert (one.state, one.released, list(one.placements)) == (GroupState.CREATED, (1,), [0])
    assert rules.missing(one) == (), "it is not placed again"
    assert rules.released(one, (1,), "again", 6.0) is None
    end = then(rules.released(one, (0,), "by its user", 7.0), EventKind.GROUP_REMOVED)
    assert (end.state, end.placements, end.removed_at_s) == (GroupState.REMOVED, {}, 7.0)


def test_only_bundles_that_it_has_and_only_when_it_is_placed() -> None:
    with pytest.raises(BadRequestError, match=r"has no bundle 2.\nits bundles are 0 to 1"):
        rules.released(placed(), (2,), "", 5.0)
    with pytest.raises(ConflictError, match="it is not placed whole"):
        rules.released(group(), (0,), "", 5.0)


def test_a_group_that_reschedules_none_goes_on_without_what_it_lost() -> None:
    whole = placed(reschedule=Reschedule.NEVER)
    one = then(rules.node_lost(whole, "n_1", 2, "it died", 5.0), EventKind.GROUP_SHRUNK)
    assert (one.released, one.reason, rules.missing(one)) == ((0,), "it died", ())
    end = then(rules.node_lost(one, "n_2", 2, "it died too", 6.0), EventKind.GROUP_REMOVED)
    assert end.state is GroupState.REMOVED
    gone = then(rules.preempted(whole, "l_1.n_2", "for x", 5.0), EventKind.GROUP_REMOVED)
    assert gone.placements == {}
