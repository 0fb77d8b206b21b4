"""Whole clusters under faults in virtual time keep their invariants, and end with nothing left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.world.world import Plan, run

QUIET = 10
FAULTY = 60
"""Seeds of each kind in ``make test``; ``make sim`` runs thousands."""


@pytest.mark.parametrize("seed", range(QUIET))
def test_a_cluster_without_faults_does_all_that_is_asked(seed: int) -> None:
    outcome = run(seed, Plan(faults=0))
    assert outcome.faults == 0
    assert set(outcome.results) <= {
        "done", "failed", "infeasible", "actor_died", "worker_died", "task_cancelled", "task_failed"
    }  # fmt: skip
    assert set(outcome.reads) <= {"value", "task_cancelled", "task_failed"}


@pytest.mark.parametrize("first", range(0, FAULTY, 10))
def test_a_cluster_under_faults_keeps_its_invariants_and_ends_clean(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = run(seed)
        assert outcome.faults and outcome.calls and outcome.messages


def test_a_seed_is_the_same_run_whatever_ran_before_and_the_hash_seed_is() -> None:
    seeds = (3, 7)
    here = [run(seed).digest for seed in seeds]
    assert here == [run(seed).digest for seed in reversed(seeds)][::-1]
    program = f"from tests.sim.world.world import run; print(*(run(s).digest for s in {seeds}))"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == here
