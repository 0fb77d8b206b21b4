"""The simulator finds each of the planted bugs, and nothing where none is planted."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from stoker.runtime.tasks.leases import Leases
from tests.sim.world.checks import BrokenInvariantError, CrashError
from tests.sim.world.mutants import MUTANTS, Mutant
from tests.sim.world.runtime.mutants import MUTANTS as MUTANTS_OF_OBJECTS
from tests.sim.world.world import run

SEEDS = 16
"""Within so many seeds a bug is found."""


@pytest.mark.parametrize("mutant", (*MUTANTS, *MUTANTS_OF_OBJECTS), ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_and_only_that(mutant: Mutant) -> None:
    for seed in range(mutant.first, mutant.first + SEEDS):
        run(seed, mutant.plan)
        try:
            with mutant.plant():
                run(seed, mutant.plan)
        except BrokenInvariantError as error:
            assert re.search(mutant.finds, str(error)), f"seed {seed}: not what it breaks"
            return
    pytest.fail(f"{mutant.name} is not found in {SEEDS} seeds")


def test_a_mutant_that_crashes_is_not_found() -> None:
    stale = mock.patch.object(Leases, "request", lambda *_: 1 / 0)
    with stale, pytest.raises(CrashError, match="ZeroDivisionError"):
        run(0)
