"""The state machine of generations: offers, answers, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from stoker_gcs.registry.jobs import elastic_rules, rules
from stoker_wire.errors import BadRequestError, ConflictError
from stoker_wire.messages.elastic import (
    AnswerOffer,
    ElasticState,
    Hints,
    MakeOffer,
    Replica,
    Scaling,
    StepTimeParams,
    WithdrawReplicas,
)
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import AttachDriver, FinishJob, Job, JobArray, JobState, SubmitJob

SCALING = Scaling(base_batch=64, max_batch=1024, max_local_batch=64, min_replicas=2, max_replicas=4)
REPLICAS = tuple(Replica(group_id="pg_1", bundle=i, node_id=f"n_{i // 2}") for i in range(4))
THETA = StepTimeParams(
    alpha_c=0.1, beta_c=0.01, alpha_n=0.2, beta_n=0.01, alpha_r=0.1, beta_r=0.01, gamma=1.5
)


def job() -> Job:
    return rules.attached(AttachDriver(entrypoint="x", hostname="h", pid=1), "job_1", 1.0)


def elastic(**limits: Any) -> Job:
    scaling = msgspec.structs.replace(SCALING, **limits)
    transition = elastic_rules.scaled(job(), scaling, 1.0)
    assert transition is not None and transition.kind is EventKind.JOB_HINTED
    return transition.record


def state(of: Job) -> ElasticState:
    assert of.elastic is not None
    return of.elastic


def offered(of: Job, count: int = 4, at_s: float = 2.0) -> Job:
    offer = MakeOffer(
        version=state(of).version, replicas=REPLICAS[:count], answer_within_s=30.0, reason="room"
    )
    return elastic_rules.offered(of, offer, at_s).record


def accepted(of: Job, generation: int, at_s: float = 3.0) -> Job:
    transition = elastic_rules.accepted(of, AnswerOffer(generation=generation), at_s)
    assert transition is not None and transition.kind is EventKind.JOB_SCALED
    return transition.record


def withdrawn(of: Job, count: int = 0, at_s: float = 9.0, **how: Any) -> Job:
    order = WithdrawReplicas(version=state(of).version, replicas=REPLICAS[:count], **how)
    transition = elastic_rules.withdrawn(of, order, at_s)
    assert transition is not None
    return transition.record


def test_an_offer_is_made_accepted_and_counted() -> None:
    first = accepted(offered(elastic()), 1)
    one = state(first)
    assert (one.generation, len(one.replicas), one.offer, one.restarts) == (1, 4, None, 0)
    assert one.allocation() == {"n_0": 2, "n_1": 2}
    less = offered(first, 2, at_s=13.0)
    offer = state(less).offer
    assert offer is not None and offer.withdraws and offer.answer_by_s == 43.0
    two = state(accepted(less, 2, at_s=23.0))
    assert (two.generation, len(two.replicas), two.restarts) == (2, 2, 1)
    assert two.service_s == 4 * 20.0, "four replicas from 3 s to 23 s"


def test_an_answer_counts_once_and_only_for_what_is_on_offer() -> None:
    first = accepted(offered(elastic()), 1)
    assert elastic_rules.accepted(first, AnswerOffer(generation=1), 4.0) is None
    with pytest.raises(ConflictError, match="generation 7 is not on offer to job job_1: none is"):
        elastic_rules.accepted(first, AnswerOffer(generation=7), 4.0)
    void = withdrawn(offered(first, 2))
    with pytest.raises(ConflictError, match="generation 2 is not on offer"):
        elastic_rules.accepted(void, AnswerOffer(generation=2), 4.0)
    again = offered(void, 2)
    offer = state(again).offer
    assert offer is not None and offer.generation == 3, "a number is given once"


def test_the_scheduler_acts_on_what_is_or_not_at_all() -> None:
    one = offered(elastic())
    stale = MakeOffer(version=1, replicas=(), answer_within_s=1.0)
    with pytest.raises(ConflictError, match="is at version 2 of its replicas, not 1"):
        elastic_rules.offered(one, stale, 3.0)
    second = msgspec.structs.replace(stale, version=2)
    with pytest.raises(ConflictError, match="has an open offer already"):
        elastic_rules.offered(one, second, 3.0)


@pytest.mark.parametrize("count", [1, 5])
def test_never_below_the_least_nor_above_the_most(count: int) -> None:
    one = elastic()
    many = tuple(Replica(group_id="pg_1", bundle=i, node_id="n") for i in range(count))
    offer = MakeOffer(version=state(one).version, replicas=many, answer_within_s=1.0)
    with pytest.raises(BadRequestError, match=f"replicas: {count} are not 2 to 4"):
        elastic_rules.offered(one, offer, 2.0)


def test_a_job_that_lets_its_grace_pass_has_nothing_and_no_generation() -> None:
    one = state(withdrawn(offered(accepted(offered(elastic()), 1), 2), 4, preempted=True))
    assert (one.generation, one.replicas, one.offer, one.preemptions) == (0, (), None, 1)


def test_lost_replicas_leave_the_others_and_all_of_them_no_generation() -> None:
    first = accepted(offered(elastic()), 1)
    one = state(withdrawn(first, 1))
    assert (one.generation, len(one.replicas), one.lost, one.preemptions) == (1, 3, 1, 0)
    none = state(withdrawn(first, 4))
    assert (none.generation, none.replicas, none.lost) == (0, (), 0)


def test_hints_are_kept_and_those_that_are_no_numbers_are_counted() -> None:
    good = Hints(params=THETA, grad_sqr=2.0, grad_var=6.0, profiled_replicas=3)
    transition = elastic_rules.hinted(elastic(), good, 5.0)
    assert transition is not None
    one = state(transition.record)
    assert (one.hints, one.hints_at_s, one.noise_scale) == (good, 5.0, 64 * 6.0 / 2.0)
    bad = msgspec.structs.replace(good, params=msgspec.structs.replace(THETA, beta_n=-0.1))
    transition = elastic_rules.hinted(transition.record, bad, 6.0)
    assert transition is not None
    two = state(transition.record)
    assert (two.hints, two.hints_dropped) == (good, 1)
    assert two.hints_problem == "params.beta_n is -0.1: it must be a number, and not negative"
    assert two.version == one.version, "who waits for replicas is not woken by hints"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"params": msgspec.structs.replace(THETA, alpha_c=None)}, "params.alpha_c is NaN"),
        ({"params": msgspec.structs.replace(THETA, gamma=11.0)}, "params.gamma is 11.0"),
        ({"grad_sqr": -1.0}, "grad_sqr is -1.0"),
        ({"grad_var": None}, "grad_sqr and grad_var: one without the other"),
        ({"restart_s": math.inf}, "restart_s is inf"),
        ({"done_fraction": 1.5}, "done_fraction is 1.5: it must be from 0 to 1"),
        ({"efficiency": -0.1}, "efficiency is -0.1"),
        ({"goodput": -5.0}, "goodput is -5.0"),
    ],
)
def test_a_hint_that_makes_no_sense_is_named(change: dict[str, Any], problem: str) -> None:
    good = Hints(params=THETA, grad_sqr=2.0, grad_var=6.0)
    assert elastic_rules.problem_of(good) == ""
    assert elastic_rules.problem_of(msgspec.structs.replace(good, **change)).startswith(problem)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"min_replicas": 5, "max_replicas": 4}, "min_replicas"),
        ({"base_batch": 2048}, "base_batch"),
        ({"min_local_batch": 65}, "min_local_batch"),
        ({"min_replicas": 3, "max_batch": 64, "min_local_batch": 32}, "min_replicas"),
        ({"resources": {"GPU": 2.0}}, "resources.GPU"),
        ({"resources": {"GPU": 0.5}}, "resources.GPU"),
        ({"resources": {"CPU": 0.0}}, "resources"),
    ],
)
def test_limits_that_nothing_keeps_are_refused(change: dict[str, Any], field: str) -> None:
    elastic_rules.check(SCALING)
    with pytest.raises(BadRequestError) as refused:
        elastic_rules.check(msgspec.structs.replace(SCALING, **change))
    assert refused.value.field == field


def test_limits_may_change_but_not_what_replicas_are_made_of() -> None:
    one = accepted(offered(elastic()), 1)
    assert elastic_rules.scaled(one, SCALING, 5.0) is None
    wider = msgspec.structs.replace(SCALING, max_replicas=8)
    transition = elastic_rules.scaled(one, wider, 5.0)
    assert transition is not None and state(transition.record).replicas == REPLICAS
    other = msgspec.structs.replace(SCALING, resources={"CPU": 1.0})
    with pytest.raises(ConflictError, match="has replicas of other resources"):
        elastic_rules.scaled(one, other, 5.0)
    rigid = elastic_rules.unscaled(one)
    assert rigid is not None and rigid.record.elastic is None
    assert elastic_rules.unscaled(rigid.record) is None


def test_who_is_not_elastic_or_has_ended_is_told_so() -> None:
    with pytest.raises(ConflictError, match=r"is not elastic.\nstate its limits first"):
        elastic_rules.hinted(job(), Hints(), 1.0)
    over = rules.ended(elastic(), JobState.SUCCEEDED, 9.0)
    assert over is not None
    with pytest.raises(ConflictError, match="has ended"):
        elastic_rules.hinted(over.record, Hints(), 10.0)
    array = rules.submitted(SubmitJob(entrypoint="x", array=JobArray(indices=(0, 1))), "job_2", 1.0)
    with pytest.raises(ConflictError, match="is an array"):
        elastic_rules.scaled(array, SCALING, 1.0)


def test_the_next_attempt_begins_without_the_replicas_of_the_last() -> None:
    submitted = rules.submitted(SubmitJob(entrypoint="x", retries=1), "job_1", 1.0)
    running = msgspec.structs.replace(submitted, state=JobState.RUNNING, started_at_s=1.0)
    scaled = elastic_rules.scaled(running, SCALING, 1.0)
    assert scaled is not None
    one = offered(accepted(offered(scaled.record), 1), 2)
    failed = rules.attempt_failed(one, FinishJob(state=JobState.FAILED), 13.0, 0.0)
    assert failed is not None and failed.kind is EventKind.JOB_RETRYING
    after = state(failed.record)
    assert (after.replicas, after.offer, after.generation, after.numbered) == ((), None, 0, 2)
    assert after.service_s == 4 * 10.0


def test_spares_and_unwanted_replicas_are_kept_beside_numbers_that_are_refused() -> None:
    kept = elastic_rules.hinted(elastic(), Hints(efficiency=0.5), 5.0)
    assert kept is not None
    for of in (kept.record, elastic()):
        bad = Hints(efficiency=1.2, spares=2, unwanted=REPLICAS[:1])
        then = elastic_rules.hinted(of, bad, 6.0)
        assert then is not None
        known = state(then.record).hints
        assert known is not None and (known.spares, known.unwanted) == (2, REPLICAS[:1])
        assert known.efficiency != 1.2 and "efficiency" in state(then.record).hints_problem
