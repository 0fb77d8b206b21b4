"""A sample of ``make chaos``: two cells, which the seed chooses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.chaos.matrix.cell import run_cell
from tests.chaos.matrix.faults import FAULTS
from tests.chaos.matrix.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

# What is broken here on purpose is warned of; the cell itself reads the logs for crashes.
pytestmark = pytest.mark.logs(
    r'"level": "warning"', r"^this process: stoker[._]", r"(FATAL|ERROR): "
)


@pytest.mark.parametrize("number", range(2))
def test_answers_are_right_and_nothing_is_lost_doubled_or_left(
    number: int, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    workload = dice.sample([*WORKLOADS], 2)[number]
    fault = dice.sample([*FAULTS], 2)[number]
    outcome = run_cell(workload, fault, seed, tmp_path / "cell")
    if outcome.skipped:
        pytest.skip(f"{fault}: {outcome.skipped}")
    repeat = f"python -m tests.chaos.matrix --seed {seed} --workloads {workload} --faults '{fault}'"
    assert not outcome.broken, f"repeat: {repeat}"
