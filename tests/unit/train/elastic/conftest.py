"""Processes for the ranks of small groups, started once: torch takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.train.elastic.rank_processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    processes = RankProcesses(4, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()
