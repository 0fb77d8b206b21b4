"""The baselines' rules, one by one; that they give the published times is a test of the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker_goodput.batches import BatchLimits
from stoker_scheduler.core.elastic.baselines import TIRESIAS_LIMIT_GPU_S, Fifo, Optimus, Tiresias
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints, Oracle, Snapshot, replicas_of

NODES = {"node-0": 4, "node-1": 4}
LIMITS = BatchLimits(32, 1024, 8, 128)


def job(name: str, replicas: int = 0, **fields: object) -> ElasticJob:
    return replace(ElasticJob(name, 0.0, replicas=replicas), **fields)  # type: ignore[arg-type]


def test_fifo_lets_nobody_overtake() -> None:
    jobs = (job("a", 6), job("b", 4), job("c", 2))
    answer = Fifo().allocate(Snapshot(NODES, jobs), {}, 60.0)
    assert {name: replicas_of(one) for name, one in answer.items()} == {"a": 6}
    assert answer["a"] == (("node-0", 4), ("node-1", 2))


def test_tiresias_lets_what_fits_run_behind_and_demotes_what_has_had_much() -> None:
    policy, jobs = Tiresias(), (job("a", 6), job("b", 4), job("c", 2))
    answer = policy.allocate(Snapshot(NODES, jobs), {}, 0.0)
    assert list(answer) == ["a", "c"]
    jobs = tuple(replace(one, allocation=answer.get(one.job_id, ())) for one in jobs)
    answer = policy.allocate(Snapshot(NODES, jobs), {}, TIRESIAS_LIMIT_GPU_S / 6)
    assert list(answer) == ["c", "b"], "the first is in the second queue now"
    assert answer["c"] == jobs[2].allocation, "it stays where it is"


def test_optimus_gives_the_next_gpu_to_whom_it_saves_most() -> None:
    known = {
        "a": Hints(LIMITS, oracle=Oracle((4.0, 2.0, 1.4, 1.1, 1.05), 100.0)),
        "b": Hints(LIMITS, oracle=Oracle((4.0, 3.9, 3.8), 100.0)),
        "c": Hints(LIMITS, oracle=Oracle((1.0, 2.0), 100.0)),
    }
    jobs = tuple(job(name) for name in known)
    answer = Optimus().allocate(Snapshot(NODES, jobs), known, 60.0)
    assert {name: replicas_of(one) for name, one in answer.items()} == {"a": 4, "b": 3, "c": 1}
    with pytest.raises(KeyError, match="oracle"):
        Optimus().allocate(Snapshot(NODES, jobs), dict.fromkeys(known, Hints(LIMITS)), 60.0)
