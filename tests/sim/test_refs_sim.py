"""An object lives as long as somebody can reach it, whatever happens to channels and processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.sim.refs_world import World, run

STEPS = 400
PROCESSES = 5
RARE = 5
"""Each kind of message comes more often in a world."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run was."""

    digest: str
    messages: int
    faults: int


def simulate_refs(seed: int, *, faults: bool = True) -> Outcome:
    """Run one world of objects, at whose end nothing is left; a failure says how to repeat it."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(seed, PROCESSES, patch)
        gc.disable()  # what dies is dead at once, or there is a cycle to be found
        try:
            run(world, STEPS, faults=faults)
            assert not world.left(), world.left()
            counts = world.messages
            rarest = min(counts[m] for m in ("Borrow", "ReleaseBorrow", "Resolve", "tuple"))
            assert rarest > RARE, counts
        except AssertionError as error:
            repeat = f"repeat: python -m tests.sim --first {seed} --refs 1"
            raise AssertionError(f"seed {seed}: {error}\n{repeat}") from error
        finally:
            gc.enable()
            world.loop.close()
    nfaults = counts["cut"] + counts["die"]
    return Outcome(world.digest(), counts.total() - nfaults, nfaults)


@pytest.mark.parametrize("number", range(10))
def test_all_is_freed_and_nothing_under_a_reader(number: int) -> None:
    assert not simulate_refs(number, faults=False).faults


@pytest.mark.parametrize("case", range(30))
def test_the_same_with_cut_lines_and_dead_processes(case: int, seed: int) -> None:
    assert simulate_refs(seed * 1000 + case).faults


def test_a_seed_is_the_same_run_whatever_ran_before_and_the_hash_seed_is() -> None:
    seeds = (100, 101)
    here = [simulate_refs(number).digest for number in seeds]
    assert here == [simulate_refs(number).digest for number in reversed(seeds)][::-1]
    imports = "from tests.sim.test_refs_sim import simulate_refs"
    program = f"{imports}; print(*(simulate_refs(n).digest for n in {seeds}))"
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.split() == here
