"""Starts that fail: where leases start next, after what backoff, and what ends it."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule
from tests.unit.scheduler.core_driver import POLICY, Core, of


def test_a_failed_start_keeps_leases_off_the_node_for_a_while_and_explains_it() -> None:
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
