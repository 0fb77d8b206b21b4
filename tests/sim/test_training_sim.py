"""Elastic jobs in virtual time: one generation lives, no sample is lost or doubled, jobs end."""

from __future__ import annotations

import pytest

from stoker_train.elastic.core.phases import TRANSITIONS
from tests.sim.training.mutants import MUTANTS, Mutant
from tests.sim.training.world import BrokenInvariantError, simulate

WORLDS = 150
FIRST = 5460
"""From this seed on the rare transitions come soon; wherever they move to, they are looked for."""
MOST_WORLDS = 3000
SEEDS = 500
"""Within so many seeds a planted bug is found."""


def test_random_worlds_see_every_transition_and_keep_every_promise() -> None:
    # The ways to FAILED are one rule, which is the same in each phase: not every one of them is drawn.
    missing = {
        (str(before), str(after))
        for before, all_after in TRANSITIONS.items()
        for after in all_after
        if after != "FAILED"
    }
    worlds = 0
    while (missing or worlds < WORLDS) and worlds < MOST_WORLDS:
        missing -= simulate(FIRST + worlds).transitions
        worlds += 1
    assert not missing, f"in {worlds} worlds nothing went {sorted(missing)}"


def test_fresh_worlds_keep_every_promise(seed: int) -> None:
    for number in range(seed, seed + WORLDS):
        simulate(number)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_and_only_that(mutant: Mutant) -> None:
    for seed in range(mutant.first, mutant.first + SEEDS):
        simulate(seed)
        try:
            with mutant.plant():
                simulate(seed)
        except BrokenInvariantError:
            return
    pytest.fail(f"{mutant.name} is not found in {SEEDS} seeds")
