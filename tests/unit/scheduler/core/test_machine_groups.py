"""Placement groups in the state machine: held whole or not at all, used from inside, lost and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.queues import Account
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from tests.unit.scheduler.core_driver import Core, is_reply, of

if TYPE_CHECKING:
    from stoker_scheduler.core.leases.lease import LeaseState


def inside(
    resources: dict[str, float] | None = None, bundle: int = -1, group_id: str = "pg_1"
) -> Requirements:
    return make_requirements(resources or {"CPU": 1}, group_id=group_id, bundle=bundle)


def bundles(core: Core) -> list[LeaseState]:
    return [lease for lease in core.state.leases.values() if lease.kind is ev.Kind.BUNDLE]


def lost(core: Core, node_id: str) -> list[cmd.Command]:
    return core.feed(ev.NodeLost(at_s=core.at_s, node_id=node_id))


def removed(core: Core, group_id: str = "pg_1") -> list[cmd.Command]:
    return core.feed(ev.GroupRemoved(at_s=core.at_s, group_id=group_id))


def test_all_bundles_are_granted_with_one_reply() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    request_id = core.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 3})
    assert len(core.granted(request_id) or ()) == 2
    assert sorted(core.held()) == [0, 1]
    assert len(set(core.held().values())) == 2
    assert all(lease.phase is Phase.HELD for lease in bundles(core))


def test_bundles_on_several_nodes_are_prepared_then_committed_and_on_one_held_at_once() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    core.group("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1}, group_id="pg_1")
    assert [order.prepare for order in of(cmd.HoldBundles, core.out)] == [True, True]
    assert len(of(cmd.CommitBundles, core.out)) == 2
    core.out.clear()
    core.group("STRICT_PACK", {"CPU": 1}, {"CPU": 1}, group_id="pg_2")
    (order,) = of(cmd.HoldBundles, core.out)
    assert not order.prepare and len(order.lease_ids) == 2
    assert not of(cmd.CommitBundles, core.out)


def test_nothing_is_allocated_for_a_group_that_does_not_fit_as_a_whole() -> None:
    core = Core({"CPU": 4})
    busy = core.granted(core.ask(CPU=2))
    request_id = core.group("PACK", {"CPU": 2}, {"CPU": 2})
    assert core.granted(request_id) is None and not bundles(core)
    core.release(*busy or ())
    assert len(core.granted(request_id) or ()) == 2


def test_two_groups_that_fit_only_one_after_the_other_never_hold_halves() -> None:
    core = Core({"CPU": 2}, {"CPU": 2})
    first = core.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 2}, group_id="pg_1")
    second = core.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 2}, group_id="pg_2")
    assert core.granted(first) and core.granted(second) is None
    assert {lease.group_id for lease in bundles(core)} == {"pg_1"}
    removed(core, "pg_1")
    assert core.granted(second)


def test_work_goes_into_the_bundle_that_it_names_or_the_first_with_room() -> None:
    core = Core({"CPU": 8})
    core.group("PACK", {"CPU": 1}, {"CPU": 2})
    (named,) = core.granted(core.ask(requirements=inside(bundle=1))) or ()
    assert core.state.leases[named].bundle == 1
    anywhere = [core.granted(core.ask(requirements=inside()))[0] for _ in range(2)]  # type: ignore[index]
    assert [core.state.leases[i].bundle for i in anywhere] == [0, 1]
    full = core.ask(requirements=inside())
    assert core.granted(full) is None
    core.release(named)
    assert core.granted(full)


def test_a_bundle_counts_once_for_its_account_and_its_node() -> None:
    core = Core({"CPU": 4})
    core.group("PACK", {"CPU": 3})
    core.granted(core.ask(owner="p_9", requirements=inside({"CPU": 3})))
    assert core.state.nodes["n_1"].available["CPU"] == 10_000
    assert core.state.usage == {Account("gcs", "job_1"): {"CPU": 30_000}}
    assert core.granted(core.ask(CPU=1))


def test_devices_of_a_bundle_are_shared_by_its_own_leases_alone() -> None:
    core = Core({"GPU": 2})
    core.group("PACK", {"GPU": 0.5}, {"GPU": 1})
    halves = [core.granted(core.ask(requirements=inside({"GPU": 0.25}, 0))) for _ in range(2)]
    (whole,) = core.granted(core.ask(requirements=inside({"GPU": 1}, 1))) or ()
    (half_device,) = {i for ids in halves for i in core.state.leases[(ids or ("",))[0]].gpus}
    assert core.state.leases[whole].gpus == {1 - half_device: 10_000}
    assert core.granted(core.ask(GPU=0.5)), "the other half of the first device is free"
    assert core.granted(core.ask(GPU=0.25)) is None


def test_an_idle_lease_in_a_bundle_gives_way_to_other_work_of_the_group() -> None:
    core = Core({"CPU": 4})
    core.group("PACK", {"CPU": 1})
    (idle,) = core.granted(core.ask(requirements=inside(), class_key="f")) or ()
    core.poll("p_1", idle, idle=(idle,))
    core.ask(requirements=inside({"CPU": 1}, 0), class_key="g")
    assert of(cmd.Preempt, core.out)[-1].lease_ids == (idle,)


def test_a_failed_start_gives_up_the_whole_gang_and_tries_it_again() -> None:
    core = Core({"CPU": 4}, {"CPU": 4}, slow=True)
    request_id = core.group("STRICT_SPREAD", {"CPU": 4}, {"CPU": 4})
    first, second = of(cmd.HoldBundles, core.out)
    core.feed(ev.BundlesHeld(at_s=core.at_s, lease_ids=first.lease_ids))
    core.out.clear()
    for lease_id in second.lease_ids:
        failure = ev.StartFailure.NODE
        core.feed(ev.LeaseStartFailed(at_s=core.at_s, lease_id=lease_id, failure=failure))
    given_up = {order.lease_id for order in of(cmd.ReleaseLease, core.out)}
    assert given_up == {*first.lease_ids, *second.lease_ids}
    assert core.granted(request_id) is None
    core.slow = False
    for lease_id in given_up:
        core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=lease_id))
    core.wait(1.0)
    assert len(core.granted(request_id) or ()) == 2


def test_bundles_that_a_nodelet_gave_up_before_their_commit_end_the_attempt() -> None:
    core = Core({"CPU": 4}, {"CPU": 4}, slow=True)
    request_id = core.group("STRICT_SPREAD", {"CPU": 4}, {"CPU": 4})
    for order in of(cmd.HoldBundles, core.out):
        core.feed(ev.BundlesHeld(at_s=core.at_s, lease_ids=order.lease_ids))
    first, second = of(cmd.CommitBundles, core.out)
    core.feed(ev.BundlesCommitted(at_s=core.at_s, lease_ids=first.lease_ids))
    core.feed(ev.BundlesLost(at_s=core.at_s, lease_ids=second.lease_ids))
    assert core.granted(request_id) is None
    ended = {order.lease_id for order in of(cmd.ReleaseLease, core.out)}
    assert ended == {*first.lease_ids, *second.lease_ids}


def test_a_lost_node_takes_its_bundle_and_what_is_in_it_but_not_the_others() -> None:
    core = Core({"CPU": 2}, {"CPU": 2}, {"CPU": 2})
    core.group("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1})
    held = core.held()
    leases = {
        index: core.granted(core.ask(requirements=inside(bundle=index)))[0]  # type: ignore[index]
        for index in held
    }
    out = lost(core, held[0])
    assert (*of(cmd.Lost, out),)[0].lease_ids == (leases[0],)
    assert core.held() == {1: held[1]} and leases[1] in core.state.leases
    gang = make_gang([make_requirements({"CPU": 1})], GangStrategy.STRICT_SPREAD, taken=[held[1]])
    core.ask_gang(gang, indices=(0,))
    assert core.held()[0] not in held.values()


def test_what_is_asked_for_again_gives_up_what_is_held() -> None:
    """So the gcs need not release the rest of a group that it places anew."""
    core = Core({"CPU": 4}, {"CPU": 4})
    core.group("STRICT_SPREAD", {"CPU": 4}, {"CPU": 4})
    old = [lease.lease_id for lease in bundles(core)]
    (worker,) = core.granted(core.ask(requirements=inside())) or ()
    core.ask_gang(core.state.groups["pg_1"].gang)
    assert {order.lease_id for order in of(cmd.ReleaseLease, core.out)} == {*old, worker}
    assert len(core.held()) == 2 and not set(old) & set(core.state.leases)


def test_a_removed_group_ends_what_is_in_it_and_rejects_what_waits_for_it() -> None:
    core = Core({"CPU": 4})
    core.group("PACK", {"CPU": 1})
    (running,) = core.granted(core.ask(requirements=inside())) or ()
    waiting = core.ask(requirements=inside())
    out = removed(core)
    assert any(is_reply(c, cmd.Reject, waiting) for c in out)
    assert any(running in c.lease_ids for c in of(cmd.Lost, out))
    assert not core.state.leases and not core.state.groups and not core.state.usage
    late = core.ask(requirements=inside())
    (rejected,) = (c for c in core.out if is_reply(c, cmd.Reject, late))
    assert rejected.reason is cmd.RejectReason.GROUP_REMOVED


def test_a_bundle_is_free_when_all_that_is_in_it_has_ended() -> None:
    core = Core({"CPU": 2}, slow=True)
    core.group("PACK", {"CPU": 2})
    for order in of(cmd.HoldBundles, core.out):
        core.feed(ev.BundlesHeld(at_s=core.at_s, lease_ids=order.lease_ids))
    core.ask(requirements=inside({"CPU": 2}))
    (start,) = of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    removed(core)
    (bundle,) = bundles(core)
    core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=bundle.lease_id))
    assert core.state.nodes["n_1"].available["CPU"] == 0
    core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=start.lease_id))
    assert core.state.nodes["n_1"].available["CPU"] == 20_000 and not core.state.leases


def test_work_for_a_group_that_waits_waits_with_it_and_too_large_work_is_refused() -> None:
    core = Core({"CPU": 1})
    core.group("PACK", {"CPU": 2})
    patient = core.ask(requirements=inside({"CPU": 2}))
    too_large = core.ask(requirements=inside({"CPU": 3}))
    unknown = core.ask(requirements=inside(group_id="pg_9"))
    core.wait(4.0)
    refused = {c.request_id: c.text for c in of(cmd.Reject, core.out)}
    assert set(refused) == {too_large, unknown}
    assert "does not fit in a bundle of placement group pg_1" in refused[too_large]
    assert "which is not known" in refused[unknown]
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_2", {"CPU": 2})))
    assert core.granted(patient)


def test_nodes_are_reserved_for_a_gang_that_small_tasks_would_starve() -> None:
    core = Core({"CPU": 1}, {"CPU": 1})
    held = [core.granted(core.ask(owner=f"p_{i}", CPU=1))[0] for i in range(2)]  # type: ignore[index]
    request_id = core.group("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1})
    core.wait(6.0)
    assert {node.reserved_for is not None for node in core.state.nodes.values()} == {True}
    for lease_id in held:
        rival = core.ask(owner="p_new", CPU=1)
        core.release(lease_id)
        assert core.granted(rival) is None
        core.feed(ev.LeaseRequestCancelled(at_s=core.at_s, request_id=rival))
    assert core.granted(request_id)
    assert all(node.reserved_for is None for node in core.state.nodes.values())


def test_idle_leases_on_several_nodes_make_way_for_a_gang() -> None:
    core = Core({"CPU": 1}, {"CPU": 1})
    idle = [core.granted(core.ask(owner="p_1", CPU=1))[0] for _ in range(2)]  # type: ignore[index]
    core.poll("p_1", *idle, idle=tuple(idle))
    request_id = core.group("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1})
    preempted = {i for order in of(cmd.Preempt, core.out) for i in order.lease_ids}
    assert preempted == set(idle)
    core.release(*idle)
    assert core.granted(request_id)


def test_a_new_leader_adopts_a_group_and_what_is_in_it() -> None:
    before = Core({"CPU": 4}, {"CPU": 4})
    request_id = before.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 2})
    before.ask(requirements=inside())
    gang = before.state.groups["pg_1"].gang
    after = Core({"CPU": 4}, {"CPU": 4})
    after.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    for lease in before.state.leases.values():  # bundles come first
        after.feed(adopted(lease))
    assert after.held() == before.held()
    assert after.state.nodes["n_1"].available == before.state.nodes["n_1"].available
    again = after.ask_gang(gang, request_id=request_id)
    assert len(after.granted(again) or ()) == 2 and not of(cmd.HoldBundles, after.out)


def test_a_new_leader_ends_bundles_of_groups_that_are_gone_and_gives_up_parts() -> None:
    before = Core({"CPU": 4}, {"CPU": 4})
    request_id = before.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 2})
    gang = before.state.groups["pg_1"].gang
    facts = [adopted(lease) for lease in bundles(before)]
    without_group = Core({"CPU": 4}, {"CPU": 4})
    out = without_group.feed(facts[0])
    assert [order.lease_id for order in of(cmd.ReleaseLease, out)] == [facts[0].lease_id]
    with_a_part = Core({"CPU": 4}, {"CPU": 4})
    with_a_part.state.term = "2"
    with_a_part.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    with_a_part.feed(facts[0])
    again = with_a_part.ask_gang(gang, request_id=request_id)
    assert len(with_a_part.granted(again) or ()) == 2
    assert facts[0].lease_id not in with_a_part.state.leases


def test_a_request_that_is_ahead_of_its_group_waits_for_it_and_one_that_is_late_gets_nothing() -> (
    None
):
    core = Core({"CPU": 4})
    gang = make_gang([make_requirements({"CPU": 2})], GangStrategy.PACK)
    request_id = core.ask_gang(gang)
    assert core.granted(request_id) is None
    core.feed(ev.GroupAdded(at_s=core.at_s, group_id="pg_1", job_id="job_1", gang=gang))
    assert len(core.granted(request_id) or ()) == 1
    late = Core({"CPU": 4})
    request_id = late.ask_gang(gang)
    late.wait(120.0, renew=False)
    assert late.granted(request_id) == () and not bundles(late)
    assert late.granted(late.ask(CPU=4))


def test_bundles_of_several_kinds_are_placed_once_they_fit_together() -> None:
    core = Core({"CPU": 4})
    first, _ = core.granted(core.ask(count=2, CPU=1)) or ()
    request_id = core.group("STRICT_PACK", {"CPU": 1}, {"CPU": 2})
    assert core.granted(request_id) is None
    core.release(first)  # each kind alone had room for one before, and has no more now
    assert len(core.granted(request_id) or ()) == 2


def test_a_bundle_that_is_adopted_while_another_is_on_its_way_is_given_up() -> None:
    before = Core({"CPU": 4})
    before.group("PACK", {"CPU": 2})
    (old,) = bundles(before)
    core = Core({"CPU": 4}, {"CPU": 2}, slow=True)
    core.state.term = "2"
    gang = before.state.groups["pg_1"].gang
    core.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    core.ask_gang(gang)
    (new,) = bundles(core)
    core.feed(adopted(old))
    core.feed(ev.BundlesHeld(at_s=core.at_s, lease_ids=(new.lease_id,)))
    phases = {lease.lease_id: lease.phase for lease in bundles(core)}
    assert phases == {new.lease_id: Phase.HELD, old.lease_id: Phase.RELEASING}


def preempted_gang() -> Core:
    """Return a core whose gang on two nodes, with something in each bundle, is stopped for a task."""
    core = Core({"CPU": 4}, {"CPU": 4})
    core.group("STRICT_SPREAD", {"CPU": 4}, {"CPU": 4}, preemptible=True, preemption_grace_s=5.0)
    for bundle in (0, 1):
        wanted = inside(bundle=bundle)
        core.ask(owner="gcs", kind=ev.Kind.ACTOR, requirements=wanted, preemptible=True)
    core.ask(owner="p_2", priority=10, CPU=4)
    assert core.state.groups["pg_1"].closing
    return core


def test_a_preempted_gang_ends_though_the_node_of_its_first_bundle_is_lost() -> None:
    core = preempted_gang()
    lost(core, core.held()[0])
    assert not of(cmd.PreemptGroup, core.out)
    core.wait(60.0)
    assert of(cmd.PreemptGroup, core.out)[-1].lease_id == bundles(core)[0].lease_id


def test_a_victim_of_two_preemptions_frees_its_room_once() -> None:
    core = preempted_gang()
    state = core.state
    (first, second) = (
        state.leases[place.bundle_lease_id] for place in state.groups["pg_1"].bundles.values()
    )
    wanted = make_requirements({"CPU": 3})
    node = state.nodes[first.node_id]
    state.preemptions.begin(wanted, [first, second], ((node, wanted),))
    for lease in (first, second):
        place = state.nodes[lease.node_id]
        assert state.preemptions.after(place).available["CPU"] <= place.spec.total["CPU"]
    assert state.preemptions.count(wanted) == 1
    removed(core)
    assert state.preemptions.count(wanted) == 0


def test_the_order_of_a_set_of_names_decides_nothing() -> None:
    program = """
from tests.unit.scheduler.core_driver import Core
core = Core({"CPU": 4, "x": 4, "y": 4})
one, other = core.granted(core.ask(count=2, CPU=1, x=1, y=1))
core.group("PACK", {"x": 4}, group_id="pg_1")
core.group("PACK", {"y": 4}, group_id="pg_2")
core.release(one)
core.wait(20.0)
print([requirements.text for requirements in core.state.reserved])
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(5)
    }
    assert len(said) == 1 and "PACK" in said.pop()


def adopted(lease: LeaseState) -> ev.LeaseAdopted:
    return ev.LeaseAdopted(
        at_s=0.0,
        lease_id=lease.lease_id,
        owner_id=lease.owner_id,
        job_id=lease.job_id,
        kind=lease.kind,
        node_id=lease.node_id,
        incarnation=lease.incarnation,
        requirements=lease.requirements,
        gpus=lease.gpus,
        group_id=lease.group_id,
        bundle=lease.bundle,
    )


def test_a_bundle_that_a_new_leader_does_not_want_has_its_gpus_until_its_node_has_ended_it() -> (
    None
):
    before = Core({"GPU": 1})
    before.group("PACK", {"GPU": 1})
    (bundle,) = before.state.leases.values()
    after = Core({"GPU": 1}, slow=True)
    assert of(cmd.ReleaseLease, after.feed(adopted(bundle))), "its group was removed meanwhile"
    asked = after.ask(GPU=1)
    assert not of(cmd.StartWorker, after.out)
    after.feed(ev.LeaseEnded(at_s=0.0, lease_id=bundle.lease_id))
    (start,) = of(cmd.StartWorker, after.out)
    assert start.request_id == asked


def shrunk(core: Core, *numbers: int) -> list[cmd.Command]:
    return core.feed(ev.GroupShrunk(at_s=core.at_s, group_id="pg_1", bundles=numbers))


def test_a_bundle_that_is_given_up_ends_with_what_is_in_it_and_the_others_stay() -> None:
    core = Core({"CPU": 4})
    core.group("PACK", {"CPU": 2}, {"CPU": 2})
    core.ask(requirements=inside(bundle=0))
    kept = core.ask(requirements=inside(bundle=1))
    out = shrunk(core, 0)
    assert len(of(cmd.ReleaseLease, out)) == 2, "the bundle, and the lease in it"
    assert list(core.held()) == [1]
    assert core.granted(kept)
    assert core.state.nodes["n_1"].available["CPU"] == 20_000
    assert not shrunk(core, 0), "again changes nothing"


def test_a_bundle_that_was_given_up_is_not_adopted() -> None:
    core = Core({"CPU": 4})
    core.group("PACK", {"CPU": 2}, {"CPU": 2})
    shrunk(core, 0)
    (bundle,) = bundles(core)
    adopted = ev.LeaseAdopted(
        at_s=core.at_s,
        lease_id="l_1.1.ff",
        owner_id=bundle.owner_id,
        job_id=bundle.job_id,
        kind=ev.Kind.BUNDLE,
        node_id="n_1",
        incarnation=1,
        requirements=bundle.requirements,
        group_id="pg_1",
        bundle=0,
        gpus={},
        granted_at_s=0.0,
    )
    out = core.feed(adopted)
    assert [one.lease_id for one in of(cmd.ReleaseLease, out)] == ["l_1.1.ff"]
