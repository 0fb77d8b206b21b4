"""A cluster of CPUs for the tests of sharded training, and trainers whose jobs are ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.jobs import JobSubmissionClient
from stoker.runtime import current
from stoker.train import Checkpoint, Failure, ShardedTrainer
from tests.e2e.train.sharded import loops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 240.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Five CPUs: four ranks, and one for the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SESSION_ROOT", str(tmp_path_factory.mktemp("s")))
        patch.setenv("OMP_NUM_THREADS", "1")
        stoker.init(num_cpus=5, num_gpus=0, log_to_driver=False, namespace="sharded")
        try:
            yield
        finally:
            stoker.shutdown()


@pytest.fixture
def trainer(cluster: None, tmp_path: Path) -> Iterator[Callable[..., ShardedTrainer]]:
    """Make trainers of the noted loop, whose jobs are stopped at the end."""
    made: list[ShardedTrainer] = []
    notes = tmp_path / "notes"
    notes.mkdir()

    def make(
        plan: Any,
        *,
        epochs: int = 2,
        every: int = 4,
        resume: bool = False,
        failure: Failure | None = None,
        resources: dict[str, float] | None = None,
        auto: dict[str, Any] | None = None,
        **config: Any,
    ) -> ShardedTrainer:
        one = ShardedTrainer(
            loops.noted,
            plan=plan,
            batch=loops.BATCH,
            config={"folder": str(notes), "epochs": epochs, **config},
            resources=resources or {"CPU": 1},
            checkpoint=Checkpoint(str(tmp_path / "checkpoints"), every=every, resume=resume),
            failure=failure or Failure(collective_timeout_s=40.0, hang_s=60.0),
            **(auto or {}),
        )
        made.append(one)
        return one

    yield make
    identity = current.runtime().identity
    client = JobSubmissionClient(identity.gcs_url, token=identity.credential.token)
    for one in made:
        if one.job_id:
            client.stop_job(one.job_id)
            client.wait(one.job_id, timeout_s=WAIT_S)
