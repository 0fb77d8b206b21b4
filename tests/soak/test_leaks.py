"""A hundred thousand cycles of everything end where they began (``make soak``).

``STOKER_TEST_LEAK_CYCLES`` sets how many.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import stoker
from tests.e2e.conftest import Cluster
from tests.e2e.objects import _cycles as cycles

if TYPE_CHECKING:
    from pathlib import Path

CYCLES = int(os.environ.get("STOKER_TEST_LEAK_CYCLES", "100000"))
WARM_UP = 0.3
"""Part of the rounds: allocators, caches and connection pools fill up."""
SLOPE_BYTES = 200.0
"""Allowed a cycle in any one process. A leaked object is 600 bytes and more, the history's page
cache and the allocators' own ways are less."""


@pytest.mark.timeout(900)
def test_cycles_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(tmp_path))
    cluster = Cluster(stoker.init(num_cpus=2, num_gpus=0))
    try:
        keeper = cycles.Keeper.remote()
        rounds = max(10, CYCLES // cycles.ROUND_CYCLES)
        warm_up = int(rounds * WARM_UP)
        for _ in range(warm_up):
            cycles.one_round(keeper)
        cycles.nothing_left(cluster, keeper)
        files, before_mb = cycles.open_files(), cycles.resident_mb()
        for _ in range(rounds - warm_up):
            cycles.one_round(keeper)
        cycles.nothing_left(cluster, keeper)
        cycles.no_more_files(files)
        after_mb = cycles.resident_mb()
        counted = (rounds - warm_up) * cycles.ROUND_CYCLES
        slopes = {
            pid: (mb - before_mb[pid]) * 2**20 / counted
            for pid, mb in after_mb.items()
            if pid in before_mb
        }
        steep = {pid: round(slope) for pid, slope in slopes.items() if slope > SLOPE_BYTES}
        assert not steep, f"bytes a cycle, by process: {steep}"
    finally:
        stoker.shutdown()
