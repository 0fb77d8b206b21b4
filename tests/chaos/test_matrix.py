"""A sample of ``make chaos``: every workload through one fault, which the seed chooses."""

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


@pytest.mark.parametrize("workload", WORKLOADS)
def test_answers_are_right_and_nothing_is_lost_doubled_or_left(
    workload: str, seed: int, tmp_path: Path
) -> None:
    fault = random.Random(f"{seed} {workload}").choice([*FAULTS])
    outcome = run_cell(workload, fault, seed, tmp_path / "cell")
    if outcome.skipped:
        pytest.skip(f"{fault}: {outcome.skipped}")
    repeat = f"python -m tests.chaos.matrix --seed {seed} --workloads {workload} --faults '{fault}'"
    assert not outcome.broken, f"repeat: {repeat}"
