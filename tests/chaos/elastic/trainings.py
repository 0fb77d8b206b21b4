"""Elastic trainings on clusters of real processes, which tests kill."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root
from tests.e2e.train import elastic_loops as loops
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 120.0


@contextlib.contextmanager
def connected(folder: Path, cpus: int) -> Iterator[Apart]:
    """A cluster of one node, with rounds of the scheduler that come soon; this process is a driver."""
    (folder / "steps").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "1")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.2")
        patch.setenv("OMP_NUM_THREADS", "1")
        with session_root(folder / "s"), apart(folder, nodelets=1, cpus=cpus) as made:
            stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
            try:
                yield made
            finally:
                stoker.shutdown()


def trainer(
    folder: Path,
    replicas: tuple[int, int] = (1, 2),
    sample_s: float = 0.004,
    hang_s: float = 40.0,
) -> ElasticTrainer:
    """A training that goes on until it is stopped, and that is faster with more replicas."""
    return ElasticTrainer(
        loops.linear,
        config={"folder": str(folder / "steps"), "epochs": 10_000, "sample_s": sample_s},
        scaling=Scaling(*replicas, resources={"CPU": 1}, base_batch=16),
        checkpoint=Checkpoint(str(folder / "checkpoints"), every=20, commit_every=5),
        failure=Failure(hang_s=hang_s),
        name="survivor",
    )


def makes_steps(folder: Path, world: int, after: int = 0) -> loops.Line:
    """Wait for a step of so many replicas, in a generation later than ``after``; returns the last one."""

    def made() -> loops.Line | None:
        found = loops.lines(folder / "steps")
        newest = max((one.generation for one in found), default=0)
        last = [one for one in found if one.generation == newest]
        return last[-1] if newest > after and last[-1].world == world else None

    until(lambda: made() is not None, WAIT_S, f"{world} replicas make a step")
    return loops.lines(folder / "steps")[-1]


def ends_exact(one: ElasticTrainer) -> None:
    """Stop it, and look into its ledger."""
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems


def next_is_written(one: ElasticTrainer, after: int) -> None:
    """Wait until the record of a generation later than ``after`` is written: a resize has begun."""

    def written() -> bool:
        membership = one._records.membership()
        return membership is not None and membership.generation > after

    until(written, WAIT_S, "the next generation is written")
