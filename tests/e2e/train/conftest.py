"""What the tests of elastic training share: a cluster for each module, and trainers on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import stoker
from tests.e2e.train.elastic_jobs import Trainers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def elastic_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Four CPUs, and rounds of the scheduler that come soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SESSION_ROOT", str(tmp_path_factory.mktemp("s")))
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "2")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.2")
        patch.setenv("OMP_NUM_THREADS", "1")
        stoker.init(num_cpus=4, num_gpus=0, log_to_driver=False, namespace="elastic")
        try:
            yield
        finally:
            stoker.shutdown()


@pytest.fixture
def trainer(elastic_cluster: None, tmp_path: Path) -> Iterator[Trainers]:
    """Trainers whose jobs are stopped at the end."""
    made = Trainers(tmp_path)
    yield made
    made.stop()
