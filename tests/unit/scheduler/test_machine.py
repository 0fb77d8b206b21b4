"""The state machine, event by event: who is granted what, recalled, refused, released and told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.nodes import NodeInfo, NodeSpec, make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.resources import GPU, UNIT
from stoker_scheduler.core.placement.explain import explain, starting_text
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule, obstacles
from stoker_scheduler.core.placement.plan import PlacementRequest, choose
from stoker_scheduler.core.state import State
from tests.unit.scheduler.core_driver import POLICY, Core, is_reply, of

if TYPE_CHECKING:
    from types import FrameType


def test_grants_as_far_as_possible_and_the_rest_is_asked_for_again() -> None:
    core = Core({"CPU": 2})
    first = core.ask(count=5, CPU=1)
    assert len(core.granted(first) or ()) == 2
    assert not core.state.pending


def test_a_blocked_head_does_not_block_what_fits() -> None:
    core = Core({"CPU": 4})
    core.ask("p_1", CPU=3)
    big, small = core.ask("p_2", CPU=4), core.ask("p_3", CPU=1)
    assert core.granted(big) is None and core.granted(small)


def test_priority_goes_first_then_the_least_served_then_the_first() -> None:
    core = Core({"CPU": 4})
    held = core.granted(core.ask("p_1", count=3, CPU=1)) or ()
    last = core.granted(core.ask("p_9", CPU=1)) or ()
    waiting = {
        "more": core.ask("p_1", CPU=1),
        "none": core.ask("p_2", CPU=1),
        "later": core.ask("p_3", CPU=1),
        "urgent": core.ask("p_1", CPU=1, priority=5),
    }
    order = []
    for lease_id in (*held[:2], *last, held[2]):
        core.release(lease_id)
        order += [name for name, r in waiting.items() if core.granted(r) and name not in order]
    assert order == ["urgent", "none", "later", "more"]


def test_waiting_raises_the_priority() -> None:
    core = Core({"CPU": 1})
    (held,) = core.granted(core.ask("p_1", CPU=1)) or ()
    old = core.ask("p_2", CPU=1, wait_s=500)
    core.wait(2.5 * POLICY.aging_s)
    urgent = core.ask("p_3", CPU=1, priority=1)
    core.release(held)
    assert core.granted(old) and core.granted(urgent) is None


def test_whoever_asks_again_after_an_empty_wait_keeps_the_place() -> None:
    core = Core({"CPU": 1})
    (held,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_2", CPU=1, wait_s=1)
    core.wait(0.5)
    other = core.ask("p_3", CPU=1)
    core.wait(1)
    again = core.ask("p_2", CPU=1)
    core.release(held)
    assert core.granted(again) and core.granted(other) is None


def test_an_empty_wait_says_why_and_how_many_are_ahead() -> None:
    core = Core({"CPU": 1})
    core.ask("p_1", CPU=1)
    core.ask("p_2", CPU=1)
    late = core.ask("p_3", CPU=1, wait_s=1)
    reply = next(c for c in core.wait(1.5) if is_reply(c, cmd.Reply, late))
    assert reply.lease_ids == () and reply.queue_position == 1
    assert "1 CPU fits on none of 1 node now" in reply.note


def test_idle_leases_of_others_are_recalled_at_once_but_not_for_more_of_the_same() -> None:
    core = Core({"CPU": 2})
    ids = core.granted(core.ask("p_1", count=2, CPU=1)) or ()
    core.ask("p_1", CPU=1)
    assert not of(cmd.Preempt, core.poll("p_1", *ids, idle=ids))
    core.ask("p_2", CPU=1)
    preemptions = of(cmd.Preempt, core.out)
    assert [(r.owner_id, len(r.lease_ids)) for r in preemptions] == [("p_1", 1)]


def test_an_idle_lease_of_another_class_is_recalled_from_the_asker_itself() -> None:
    core = Core({"CPU": 2})
    ids = core.granted(core.ask("p_1", CPU=2)) or ()
    core.ask("p_1", CPU=1)
    assert of(cmd.Preempt, core.poll("p_1", *ids, idle=ids))[0].lease_ids == ids


def test_busy_leases_beyond_the_fair_part_are_recalled_for_who_has_none() -> None:
    core = Core({"CPU": 8})
    core.ask("p_1", count=8, CPU=1)
    core.wait(0.5)
    core.ask("p_2", count=8, CPU=1)
    (recall,) = of(cmd.Preempt, core.out)
    assert recall.owner_id == "p_1" and len(recall.lease_ids) == 4
    core.release(*recall.lease_ids)
    assert not of(cmd.Preempt, core.wait(3))
    assert {a: u["CPU"] / UNIT for a, u in core.state.usage.items()} == {"p_1": 4, "p_2": 4}


def test_who_has_nothing_makes_no_queue_behind_who_waits_for_more() -> None:
    core = Core({"CPU": 2})
    core.ask("p_1", count=2, CPU=1)
    core.ask("p_1", count=100, CPU=1)
    core.wait(0.5)
    assert not of(cmd.Preempt, core.out)
    core.ask("p_2", CPU=1)
    assert [r.owner_id for r in of(cmd.Preempt, core.out)] == ["p_1"], "not at the next look only"


def test_places_change_hands_once_a_quantum_where_claimants_are_more() -> None:
    core = Core({"CPU": 1})
    (first,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_2", CPU=1)
    assert not of(cmd.Preempt, core.out), "its owner has only just got it"
    core.wait(0.5)
    assert [r.lease_ids for r in of(cmd.Preempt, core.out)] == [(first,)]


def test_busy_leases_of_lower_priority_are_recalled_and_those_of_actors_never() -> None:
    core = Core({"CPU": 2})
    core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR)
    (task,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_1", CPU=1, priority=1)
    assert [r.lease_ids for r in of(cmd.Preempt, core.out)] == [(task,)]


def test_a_large_demand_gets_a_node_kept_for_it_and_starts() -> None:
    core = Core({"CPU": 4})
    small = list(core.granted(core.ask("p_1", count=4, CPU=1)) or ())
    big = core.ask("p_2", CPU=4, wait_s=500)
    for turn in range(80):
        core.wait(1)
        if core.granted(big):
            break
        core.release(small.pop(0)) if small else None
        more = core.ask(f"p_s{turn % 5}", CPU=1, wait_s=0.1)
        small += core.granted(more) or ()
    assert core.granted(big), "starved by smaller demands"


def test_a_node_kept_for_its_gpu_still_takes_cpu_work() -> None:
    core = Core({"CPU": 4, "GPU": 1})
    core.ask("p_1", GPU=1)
    core.ask("p_2", GPU=1, wait_s=500)
    core.wait(POLICY.reserve_after_s + 1)
    assert core.state.reserved
    assert core.granted(core.ask("p_3", CPU=1))


def test_short_spread_leases_take_turns_however_idle_the_nodes_are() -> None:
    core, requirements = Core(*[{"CPU": 8}] * 3), make_requirements({"CPU": 1}, spread=True)
    taken = []
    for _ in range(6):
        (lease_id,) = core.granted(core.ask(requirements=requirements)) or ()
        taken.append(core.state.leases[lease_id].node_id)
        core.release(lease_id)
    assert sorted(taken[:3]) == ["n_1", "n_2", "n_3"]
    assert taken[3:] == taken[:3]


def test_infeasible_demands_are_refused_after_the_grace_with_every_node_and_a_remedy() -> None:
    core = Core({"CPU": 4}, {"CPU": 2, "GPU": 1})
    request = core.ask(CPU=1, GPU=2, name="train")
    patient = core.ask("p_2", CPU=64, wait_if_infeasible=True)
    assert not of(cmd.Reject, core.wait(1.5))
    (reject,) = of(cmd.Reject, core.wait(1))
    assert reject.request_id == request and reject.reason is cmd.RejectReason.INFEASIBLE
    for words in (
        "'train'",
        "n_1: needs 2 GPU",
        "n_2: needs 2 GPU",
        "start a node with 1 CPU, 2 GPU",
    ):
        assert words in reject.text
    assert core.state.pending[patient].infeasible
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_3", {"CPU": 64})))
    assert core.granted(patient)


def test_no_nodes_at_all_is_said_so() -> None:
    core = Core()
    core.ask(CPU=1, wait_s=500)
    assert not of(cmd.Reject, core.wait(POLICY.infeasible_grace_s + 1))
    (reject,) = of(cmd.Reject, core.wait(POLICY.no_nodes_grace_s))
    assert "no node is registered" in reject.text and "start a nodelet" in reject.text


def test_a_lease_that_starts_after_its_request_ended_serves_the_next_one() -> None:
    core = Core({"CPU": 1}, slow=True)
    core.ask("p_1", CPU=1, wait_s=1)
    core.wait(4)
    again = core.ask("p_1", CPU=1)
    (start,) = of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    assert core.granted(again) == (start.lease_id,)


def test_a_lease_that_nobody_claims_or_renews_is_released() -> None:
    core = Core({"CPU": 2}, slow=True)
    request = core.ask("p_1", CPU=1, wait_s=1)
    core.feed(ev.LeaseRequestCancelled(at_s=0.0, request_id=request))
    held = core.ask("p_2", CPU=1)
    for start in of(cmd.StartWorker, core.out):
        core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    out = core.wait(POLICY.lease_ttl_s + 1, renew=False)
    assert len(of(cmd.ReleaseLease, out)) == 2
    assert [lost.lease_ids for lost in of(cmd.Lost, out)] == [core.granted(held)]


def test_leases_of_the_gcs_do_not_expire_and_actors_outlive_their_job() -> None:
    core = Core({"CPU": 2})
    (actor,) = core.granted(core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR)) or ()
    core.ask("p_1", CPU=1)
    core.wait(POLICY.lease_ttl_s * 2, renew=False)
    core.feed(ev.JobFinished(at_s=core.at_s, job_id="job_1"))
    assert list(core.state.leases) == [actor]
    late = core.ask("p_1", CPU=1)
    assert any(is_reply(c, cmd.Reject, late) for c in core.out)
    assert of(cmd.ReleaseLease, core.release(actor))[0].kill


def test_a_failed_start_shuns_the_node_for_a_while_and_explains_it() -> None:
    core = Core({"CPU": 1}, slow=True)
    core.ask(CPU=1)
    (start,) = of(cmd.StartWorker, core.out)
    failed = ev.LeaseStartFailed(
        at_s=0.0, lease_id=start.lease_id, failure=ev.StartFailure.HERE, text="fork failed"
    )
    assert of(cmd.ReleaseLease, core.feed(failed))[0].kill
    assert not of(cmd.StartWorker, core.feed(ev.LeaseEnded(at_s=0.0, lease_id=start.lease_id)))
    explanation = explain(core.state, make_requirements({"CPU": 1}), "")
    assert (
        explanation.verdicts[0].rules == (Rule.BACKOFF,)
        and "fork failed" in explanation.verdicts[0].detail
    )
    assert of(cmd.StartWorker, core.wait(0.5))


def test_a_failed_start_keeps_the_node_from_its_own_environment_alone() -> None:
    core = Core({"CPU": 4}, slow=True)
    bad, good = make_requirements({"CPU": 1}, env="bad"), make_requirements({"CPU": 1}, env="good")
    core.ask(requirements=bad)
    for _ in range(6):
        (start,) = of(cmd.StartWorker, core.out)
        core.feed(
            ev.LeaseStartFailed(
                at_s=core.at_s, lease_id=start.lease_id, failure=ev.StartFailure.HERE, text="404"
            )
        )
        core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=start.lease_id))
        assert explain(core.state, bad, "").verdicts[0].rules == (Rule.BACKOFF,)
        assert explain(core.state, good, "").fit is NodeFit.FITS
        core.out.clear()
        other = core.ask("p_2", requirements=good)
        (theirs,) = of(cmd.StartWorker, core.out)
        assert theirs.request_id == other, "another environment is started at once"
        core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=theirs.lease_id))
        core.release(theirs.lease_id)
        core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=theirs.lease_id))
        core.out = core.wait(POLICY.backoff_max_s + 0.1, renew=False)


def test_a_node_that_fails_as_a_whole_is_tried_by_one_environment_and_not_by_each() -> None:
    core = Core({"CPU": 64}, {"CPU": 64}, slow=True)
    tries = []
    for turn in range(12):
        core.out.clear()
        core.ask(f"p_{turn}", requirements=make_requirements({"CPU": 1}, env=f"env{turn}"))
        while starts := of(cmd.StartWorker, core.out):
            core.out.clear()
            (start,) = starts
            answer: ev.Event = ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id)
            if start.node_id == "n_1":
                tries.append(core.at_s)
                answer = ev.LeaseStartFailed(
                    at_s=core.at_s,
                    lease_id=start.lease_id,
                    failure=ev.StartFailure.NODE,
                    text="it got no answer",
                )
            core.feed(answer)
        other = explain(core.state, make_requirements({"CPU": 1}, env="another"), "").verdicts[-1]
        assert other.rules == (Rule.BACKOFF,) and "it got no answer" in other.detail
        if turn >= 6:
            core.wait(POLICY.backoff_max_s / 2, renew=False)
    assert len(tries) < 6, "once at first, then as the pause allows, which grows"
    core.wait(POLICY.backoff_max_s + 0.1, renew=False)
    assert explain(core.state, make_requirements({"CPU": 1}), "").fit is NodeFit.FITS
    core.out.clear()
    core.ask("p_last", CPU=1)
    (start,) = of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    assert (start.node_id, core.state.nodes["n_1"].backoffs) == ("n_1", {})


def test_a_start_that_works_opens_the_node_again_at_once() -> None:
    core = Core({"CPU": 4}, slow=True)
    core.ask("p_1", count=2, CPU=1)
    failed, works = of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStartFailed(at_s=0.0, lease_id=failed.lease_id, failure=ev.StartFailure.NODE))
    core.out.clear()
    waiting = core.ask("p_2", requirements=make_requirements({"CPU": 2}, env="e"))
    assert not of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStarted(at_s=0.0, lease_id=works.lease_id))
    assert waiting in [start.request_id for start in of(cmd.StartWorker, core.out)]


def test_a_start_says_where_what_and_since_when() -> None:
    core = Core({"CPU": 4}, slow=True)
    requirements = make_requirements({"CPU": 1}, env="e")
    assert starting_text(core.state, requirements, "job_1", "pip (numpy)") == ""
    core.ask(requirements=requirements)
    core.wait(1.5, renew=False)
    told = starting_text(core.state, requirements, "job_1", "pip (numpy)", now_s=core.at_s + 10.6)
    assert told == "its environment is being installed on node n_1: pip (numpy), since 12 s"
    assert starting_text(core.state, requirements, "job_2", "") == ""
    told = starting_text(core.state, requirements, "job_1", "")
    assert told == "a worker is being started on node n_1, since 2 s"


def work_of(call: Callable[[], object]) -> int:
    """Return how many operations ``call`` takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_requests_whose_wait_passes_do_not_look_at_each_other() -> None:
    def work(requests: int) -> int:
        state = State(policy=POLICY, term="1")
        step(state, ev.NodeJoined(at_s=0.0, spec=make_node_spec("n_1", {"CPU": 4})))
        for index in range(requests):
            for requirements in (make_requirements({}), make_requirements({"CPU": 8})):
                asked = ev.LeaseRequested(
                    at_s=0.0,
                    request_id=f"r_{requirements.text}_{index}",
                    owner_id="gcs",
                    job_id="job_1",
                    requirements=requirements,
                    class_key=f"{index}",
                    count=1,
                    deadline_s=1.0,
                    wait_if_infeasible=True,
                )
                step(state, asked)
        done: list[cmd.Command] = []
        count = work_of(lambda: done.extend(step(state, ev.Tick(at_s=10.0))))
        notes = [reply.note for reply in of(cmd.Reply, done)]
        started = [note for note in notes if "being started on node n_1" in note]
        assert (len(notes), len(started)) == (2 * requests, requests)
        return count

    assert work(160) < 10 * work(20)


def test_a_new_incarnation_loses_the_leases_of_the_old_and_a_stale_one_is_ignored() -> None:
    core = Core({"CPU": 1})
    (lease_id,) = core.granted(core.ask(CPU=1)) or ()
    spec = make_node_spec("n_1", {"CPU": 1}, incarnation=2)
    out = core.feed(ev.NodeJoined(at_s=0.0, spec=spec))
    assert [lost.lease_ids for lost in of(cmd.Lost, out)] == [(lease_id,)]
    core.feed(ev.NodeLost(at_s=0.0, node_id="n_1", incarnation=1))
    assert core.state.nodes["n_1"].spec.incarnation == 2


def test_unblocking_takes_the_cpu_back_and_nothing_is_granted_below_zero() -> None:
    core = Core({"CPU": 1, "GPU": 1})
    (parent,) = core.granted(core.ask(CPU=1, GPU=1)) or ()
    core.feed(ev.LeaseBlocked(at_s=0.0, lease_id=parent))
    assert core.granted(core.ask("p_2", GPU=1, wait_s=1)) is None
    (child,) = core.granted(core.ask("p_2", CPU=1)) or ()
    core.feed(ev.LeaseUnblocked(at_s=0.0, lease_id=parent))
    assert core.state.nodes["n_1"].available["CPU"] == -UNIT
    late = core.ask("p_3", CPU=1)
    core.release(child)
    assert core.granted(late) is None
    core.release(parent)
    assert core.granted(late)


def test_an_adopted_lease_is_the_answer_to_its_request_and_conflicts_are_ended() -> None:
    core = Core({"GPU": 1})
    facts: dict[str, Any] = {
        "at_s": 0.0,
        "owner_id": "p_1",
        "job_id": "job_1",
        "kind": ev.Kind.TASK,
        "node_id": "n_1",
        "incarnation": 1,
        "requirements": make_requirements({"GPU": 1}),
        "gpus": {0: UNIT},
    }
    core.feed(ev.LeaseAdopted(lease_id="l_old.0.1", **facts))
    out = core.feed(ev.LeaseAdopted(lease_id="l_two.0.2", **facts))
    assert [c.lease_id for c in of(cmd.ReleaseLease, out)] == ["l_two.0.2"]
    core.ask(request_id="r_old", GPU=1)
    assert core.granted("r_old") == ("l_old.0.1",)


requirement_sets = st.sampled_from(
    [
        make_requirements({"CPU": 1}),
        make_requirements({"CPU": 3}),
        make_requirements({"GPU": 1}),
        make_requirements({"GPU": 0.5}),
        make_requirements({"CPU": 1, "GPU": 2}),
        make_requirements({"CPU": 1}, spread=True),
        make_requirements({"CPU": 1}, label_selector={"zone": "a"}),
        make_requirements({"CPU": 16}),
    ]
)
clusters = st.lists(
    st.sampled_from([{"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    clusters,
    st.lists(
        st.tuples(
            requirement_sets, st.booleans(), st.sampled_from(["", "k1", "k2"]), st.booleans()
        ),
        max_size=25,
    ),
)
def test_the_ranking_places_where_a_full_scan_would(
    nodes: list[dict[str, float]], explanation: list[tuple[Requirements, bool, str, bool]]
) -> None:
    core = Core(*nodes)
    for index, (requirements, give_back, kernels, warms) in enumerate(explanation):
        request = PlacementRequest(requirements, kernels=kernels)
        expected = choose(core.state.nodes.values(), request, POLICY.score)
        before = set(core.state.leases)
        asked = core.ask(f"p_{index}", requirements=requirements, kernels=kernels)
        if not core.state.queue.subqueues:
            new = [i for i in core.state.leases if i not in before]
            assert [core.state.leases[i].node_id for i in new] == ([expected] if expected else [])
        if core.granted(asked) is None:
            core.feed(ev.LeaseRequestCancelled(at_s=core.at_s, request_id=asked))
        if give_back and core.state.leases:
            core.release(next(iter(core.state.leases)))
        if warms:
            spec = list(core.state.nodes.values())[index % len(nodes)].spec
            core.feed(ev.NodeChanged(at_s=0.0, spec=replace(spec, warm=(kernels,))))


@settings(max_examples=100, deadline=None)
@given(clusters, st.lists(requirement_sets, max_size=12), requirement_sets)
def test_applying_the_remedy_of_any_verdict_makes_a_pending_demand_start(
    nodes: list[dict[str, float]], holders: list[Requirements], requirements: Requirements
) -> None:
    core = Core(*nodes)
    for index, holder in enumerate(holders):
        core.ask(f"p_{index}", requirements=holder, wait_if_infeasible=True)
    for request_id in list(core.state.pending):
        core.feed(ev.LeaseRequestCancelled(at_s=0.0, request_id=request_id))
    explanation = explain(core.state, requirements, "")
    if explanation.fit is NodeFit.FITS:
        assert core.granted(core.ask("p_x", requirements=requirements))
        return
    request = core.ask("p_x", requirements=requirements, wait_if_infeasible=True)
    assert core.granted(request) is None
    node = core.state.nodes[explanation.verdicts[0].node_id]
    spec = _restarted(node, requirements)
    if spec != node.spec:
        core.feed(ev.NodeChanged(at_s=0.0, spec=spec))
    for lease_id in list(node.leases):
        if core.granted(request):
            break
        core.release(lease_id)
    assert core.granted(request), explanation.remedy


def _restarted(node: NodeInfo, requirements: Requirements) -> NodeSpec:
    """Return the node's spec as its remedies for what never fits would have it."""
    spec = node.spec
    for obstacle in obstacles(node, requirements):
        if obstacle.rule is Rule.TOTAL and obstacle.subject == GPU:
            spec = replace(spec, gpus=tuple(range(max(1, requirements.gpu // UNIT))))
        elif obstacle.rule is Rule.TOTAL:
            name = obstacle.subject
            spec = replace(spec, total={**spec.total, name: dict(requirements.items)[name]})
        elif obstacle.rule is Rule.LABEL:
            term = next(term for term in requirements.terms if term.label == obstacle.subject)
            spec = replace(spec, labels={**spec.labels, term.label: term.values[0]})
    return spec


@pytest.mark.parametrize("count", [1, 7])
def test_everything_given_back_leaves_nothing_behind(count: int) -> None:
    core = Core({"CPU": 4, "GPU": 2}, {"CPU": 4})
    for resources in ({"CPU": 1.0}, {"GPU": 0.3}, {"CPU": 0.1, "GPU": 1.0}):
        core.ask("p_1", count=count, **resources)
    core.release(*core.state.leases)
    core.feed(ev.JobFinished(at_s=core.at_s, job_id="job_1"))
    assert not core.state.leases and not core.state.usage and not core.state.pending
    for node in core.state.nodes.values():
        assert node.available_units == node.spec.total_units
