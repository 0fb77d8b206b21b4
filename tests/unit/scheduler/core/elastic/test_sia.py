"""The policy's answers hold, and are those of the integer program that it is defined by."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.goodput_policy import share_out
from stoker_scheduler.core.elastic.jobs import ElasticJob, Hints, Snapshot, check, replicas_of
from stoker_scheduler.core.elastic.packing import counts_of
from stoker_scheduler.core.elastic.sia import Sia

LIMITS = BatchLimits(64, 8192, 8, 256)
SCALES = ThroughputParams(0.05, 0.004, 0.06, 0.001, 0.01, 0.0005, 2.0)
NODES = {f"node-{index}": 4 for index in range(16)}


def test_shares_are_those_of_the_integer_program(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = counts_of(NODES, 4)
    for _ in range(20):
        values = random.random((int(random.integers(1, 30)), len(counts)))
        values[random.random(values.shape) < 0.3] = -np.inf
        flat = np.where(np.isfinite(values), values, -1e3).ravel()
        jobs = np.kron(np.eye(len(values)), np.ones(len(counts)))
        gpus = np.tile(counts, len(values))
        found = milp(
            -flat,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(jobs, 0, 1), LinearConstraint(gpus, 0, 64)],
            options={"mip_rel_gap": 0},  # its default is a hundred times what is asserted below
        )
        chosen = share_out(values, counts, 64)
        ours = sum(values[row][counts.index(k)] for row, k in enumerate(chosen) if k)
        assert sum(chosen) <= 64
        assert ours == pytest.approx(-found.fun, rel=1e-6)


def test_a_job_starts_with_one_and_doubles(seed: int) -> None:
    random = Random(seed)
    policy, job = Sia(), ElasticJob("a", 0.0)
    known = Hints(LIMITS)
    for number in range(8):
        snapshot = Snapshot(NODES, (job,))
        answer = policy.allocate(snapshot, {"a": known}, 60.0 * (number + 1))
        check(snapshot, answer)
        most = max(1, 2 * known.profiled_replicas)
        assert 1 <= replicas_of(answer["a"]) <= most
        job = replace(job, allocation=answer["a"])
        noise = GradientNoise(1.0, random.uniform(100, 1000))
        known = replace(
            known, params=SCALES, noise=noise,
            profiled_replicas=max(known.profiled_replicas, replicas_of(answer["a"])),
        )  # fmt: skip
    assert replicas_of(job.allocation) > 4
