"""Ten thousand cycles of everything end where they began; a hundred thousand are in tests/soak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import stoker
from stoker.local.sessions import session_root
from tests.e2e.conftest import Cluster
from tests.e2e.objects import _cycles as cycles

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROUNDS = 10


def test_cycles_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(tmp_path))
    cluster = Cluster(stoker.init(num_cpus=4, num_gpus=0))
    try:
        keeper = cycles.Keeper.remote()
        cycles.one_round(keeper)
        cycles.nothing_left(cluster, keeper)
        files = cycles.open_files()
        for _ in range(ROUNDS):
            cycles.one_round(keeper)
        cycles.nothing_left(cluster, keeper)
        cycles.no_more_files(files)
    finally:
        stoker.shutdown()


def test_sessions_lie_where_tests_read_their_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert session_root().is_relative_to(tmp_path_factory.getbasetemp())
