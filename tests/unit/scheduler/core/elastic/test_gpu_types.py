"""GPUs of several types: shares that are the best that there are, and one type for each job."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.gpu_types import share_out_types, types_of
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints, Snapshot, check, replicas_of

LIMITS = BatchLimits(64, 8192, 8, 256)
COMPUTES = ThroughputParams(0.05, 0.004, 0.06, 0.001, 0.01, 0.0005, 2.0)
EXCHANGES = replace(COMPUTES, alpha_c=0.001, beta_c=0.00004, alpha_r=0.3, alpha_n=0.6)
NODES = {"fast-0": 4, "fast-1": 4, "slow-0": 4, "slow-1": 4}
SPEEDS = {name: 1.0 if name.startswith("fast") else 0.4 for name in NODES}


def hints(random: Random) -> Hints:
    if random.random() < 0.2:
        return Hints(LIMITS)
    noise = GradientNoise(sqr=1.0, var=10 ** random.uniform(-1, 4))
    params = random.choice((COMPUTES, EXCHANGES))
    return Hints(LIMITS, params, noise, random.choice((1, 2, 4, 8)), random.uniform(5, 250))


def test_shares_are_the_best_that_there_are(seed: int) -> None:
    random = Random(seed)
    types = types_of(Snapshot({"a": 2, "b": 1, "c": 1}, (), speeds={"a": 2.0}))
    assert [(one.speed, one.counts, one.gpus) for one in types] == [
        (2.0, (1, 2), 2),
        (1.0, (1, 2), 2),
    ]
    columns = [(index, count) for index, one in enumerate(types) for count in one.counts]
    for _ in range(30):
        values = np.array([[random.choice((-np.inf, random.random())) for _ in columns]
                           for _ in range(random.randint(1, 4))])  # fmt: skip
        best = 0.0
        for picks in itertools.product((None, *range(len(columns))), repeat=len(values)):
            used = [0, 0]
            for pick in picks:
                if pick is not None:
                    used[columns[pick][0]] += columns[pick][1]
            if max(used) <= 2:
                best = max(
                    best,
                    sum(values[row][pick] for row, pick in enumerate(picks) if pick is not None),
                )
        chosen = share_out_types(values, types)
        found = sum(values[row][columns.index(one)] for row, one in enumerate(chosen) if one[1])
        assert found == pytest.approx(best, abs=1e-5)  # the solver's absolute gap is 1e-6


def test_a_job_runs_on_one_type_and_answers_hold(seed: int) -> None:
    random, policy = Random(seed), GoodputPolicy()
    known = {f"job_{index}": hints(random) for index in range(6)}
    jobs = tuple(ElasticJob(name, float(index)) for index, name in enumerate(known))
    for number in range(15):
        snapshot = Snapshot(NODES, jobs, speeds=SPEEDS)
        answer = policy.allocate(snapshot, known, 600.0 + 60 * number)
        check(snapshot, answer)
        for allocation in answer.values():
            assert len({SPEEDS[node_id] for node_id, _ in allocation}) == 1
        assert sum(map(replicas_of, answer.values())) <= 16
        known = {
            name: one if random.random() < 0.5 else hints(random) for name, one in known.items()
        }
        jobs = tuple(replace(job, allocation=answer.get(job.job_id, ())) for job in jobs)


def test_who_computes_gets_the_fast_ones_and_who_waits_for_the_network_the_others() -> None:
    nodes = {"fast": 4, "slow": 4}
    noise = GradientNoise(1.0, 100.0)
    jobs = (ElasticJob("exchanges", 0.0), ElasticJob("computes", 1.0))
    known = {
        "exchanges": Hints(LIMITS, EXCHANGES, noise, 4),
        "computes": Hints(LIMITS, COMPUTES, noise, 4),
    }
    snapshot = Snapshot(nodes, jobs, speeds={"fast": 1.0, "slow": 0.4})
    answer = GoodputPolicy().allocate(snapshot, known, 600.0)
    assert answer["computes"] == (("fast", 4),)
    assert {node_id for node_id, _ in answer["exchanges"]} == {"slow"}


def test_one_type_of_any_speed_is_a_cluster_as_before(seed: int) -> None:
    random = Random(seed)
    known = {f"job_{index}": Hints(LIMITS) for index in range(random.randint(1, 9))}
    jobs = tuple(ElasticJob(name, 0.0) for name in known)
    plain = GoodputPolicy().allocate(Snapshot(NODES, jobs), known, 600.0)
    slow = Snapshot(NODES, jobs, speeds=dict.fromkeys(NODES, 0.5))
    assert GoodputPolicy().allocate(slow, known, 600.0) == plain
