"""The words by which ``stoker explain`` tells why an elastic job has no more replicas."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker_gcs.explain.elastic import clause_of
from stoker_gcs.registry.jobs import rules
from stoker_wire.messages.elastic import (
    ElasticPlan,
    ElasticState,
    Hints,
    PlannedScaling,
    PoolPlan,
    Replica,
    Scaling,
    StepTimeParams,
)
from stoker_wire.messages.work import AttachDriver

THETA = StepTimeParams(
    alpha_c=0.1, beta_c=0.01, alpha_n=0.2, beta_n=0.01, alpha_r=0.1, beta_r=0.01, gamma=1.5
)
JOB = rules.attached(AttachDriver(entrypoint="x", hostname="h", pid=1), "job_1", 1.0)
STATE = ElasticState(
    scaling=Scaling(base_batch=64, max_local_batch=64),
    generation=1,
    replicas=(Replica(group_id="pg_1", bundle=0, node_id="n_1"),),
    hints=Hints(params=THETA),
)


def clause(state: ElasticState = STATE, rooms: int = 4, **planned: Any) -> str:
    known = {"job_id": "job_1", "queue": "q", "present": {"n_1": 1}, "target": {"n_1": 1}}
    one = PlannedScaling(**{**known, **planned})
    pool = PoolPlan(queue="q", rooms={"n_1": rooms}, jobs=(one,))
    return clause_of(JOB, state, ElasticPlan(at_s=1.0, pools=(pool,)))


def test_a_job_that_is_no_faster_with_more_replicas_is_told_so() -> None:
    found = clause(speedup=1.0, more=2, more_worth=-0.01, more_speedup=1.03)
    assert "with 2 replicas it would be 1.03 times as fast as with 1" in found


def test_a_job_for_which_the_next_replica_is_worth_something_is_told_who_has_it() -> None:
    found = clause(speedup=1.0, more=2, more_worth=0.5, more_speedup=1.9)
    assert "the next, up to 2, would be worth 0.5 each, and no other elastic job has any" in found


def test_a_job_that_lost_replicas_that_it_cannot_do_without_is_told_what_it_waits_for() -> None:
    scaling = msgspec.structs.replace(STATE.scaling, min_replicas=2)
    state = msgspec.structs.replace(STATE, scaling=scaling)
    found = clause(state, rooms=1, target={})
    assert "it trains with 2 replicas at least, and nodes have room for 1" in found
