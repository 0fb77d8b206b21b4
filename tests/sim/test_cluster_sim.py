"""Whole clusters under faults in virtual time keep their invariants, and end with nothing left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.sim.world.world import Outcome, Plan, run

if TYPE_CHECKING:
    from tests.sim.world.world import World

QUIET = 10
FIXED = range(8)
"""Seeds that every run tries."""
CASES = 14
SEEDS_PER_CASE = 10
"""Fresh seeds of each case in ``make test``; ``make sim`` runs thousands."""
MESSAGES, FAULTS = 1000, 5
"""Each cluster has so many, at least."""


def simulate_cluster(seed: int) -> Outcome:
    """Run one cluster under faults; a failure says how to repeat it."""
    try:
        outcome = run(seed)
        assert outcome.messages >= MESSAGES, f"seed {seed} has only {outcome.messages} messages"
        assert outcome.faults >= FAULTS, f"seed {seed} has only {outcome.faults} faults"
        assert outcome.calls, f"seed {seed} has no calls"
    except AssertionError as error:
        repeat = f"repeat: python -m tests.sim --first {seed} --clusters 1"
        raise AssertionError(f"{error}\n{repeat}") from error
    return outcome


@pytest.mark.parametrize("seed", range(QUIET))
def test_a_cluster_without_faults_does_all_that_is_asked(seed: int) -> None:
    outcome = run(seed, Plan(faults=0))
    assert outcome.faults == 0
    assert set(outcome.results) <= {
        "done", "failed", "infeasible", "actor_died", "worker_died", "task_cancelled", "task_failed",
        "placement_group_removed",
    }  # fmt: skip
    assert set(outcome.reads) <= {"value", "task_cancelled", "task_failed"}


def test_the_same_clusters_under_faults_keep_their_invariants_in_every_run() -> None:
    for number in FIXED:
        simulate_cluster(number)


@pytest.mark.parametrize("case", range(CASES))
def test_a_cluster_under_faults_keeps_its_invariants_and_ends_clean(case: int, seed: int) -> None:
    first = seed * 1000 + case * SEEDS_PER_CASE
    for number in range(first, first + SEEDS_PER_CASE):
        simulate_cluster(number)


@pytest.mark.parametrize("seed", range(3))
def test_a_driver_outlives_a_gcs_that_starts_again_and_then_loses_its_database(seed: int) -> None:
    async def script(world: World) -> None:
        driver, gcs = world.drivers[0], world.gcs[0]
        node = next(one for one in world.nodes if one.host == driver.process.host)
        await asyncio.sleep(2.0)
        node.process.kill()  # nobody can look whether the driver runs
        gcs.process.kill()
        await asyncio.sleep(1.0)
        gcs.start()
        await asyncio.sleep(0.02)
        assert gcs.serves
        world.database.trouble.begin("freeze")
        await asyncio.sleep(15.0)
        node.start()
        world.database.trouble.end()

    run(seed, Plan(faults=0, drivers=1, replicas=1), script=script)


def test_a_seed_is_the_same_run_whatever_ran_before_and_the_hash_seed_is() -> None:
    seeds = (3, 7)
    here = [run(seed).digest for seed in seeds]
    assert here == [run(seed).digest for seed in reversed(seeds)][::-1]
    program = f"from tests.sim.world.world import run; print(*(run(s).digest for s in {seeds}))"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.split() == here
