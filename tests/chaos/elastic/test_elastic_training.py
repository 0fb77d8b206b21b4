"""Elastic trainings whose node, scheduler, gcs or driver is killed while they change: no sample is lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root
from tests.e2e.train import elastic_loops as loops
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch")

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

WAIT_S = 120.0
REPO = Path(__file__).resolve().parents[3]


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Apart]:
    with connected(tmp_path, cpus=2) as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Apart]:
    """A node for one replica: a second one needs another node."""
    with connected(tmp_path, cpus=1) as made:
        yield made


def trainer(folder: Path) -> ElasticTrainer:
    """A training that goes on until it is stopped, and that is faster with more replicas."""
    return ElasticTrainer(
        loops.linear,
        config={"folder": str(folder / "steps"), "epochs": 10_000, "sample_s": 0.004},
        scaling=Scaling(max_replicas=2, resources={"CPU": 1}, base_batch=16),
        checkpoint=Checkpoint(str(folder / "checkpoints"), every=20, commit_every=5),
        failure=Failure(hang_s=40.0),
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


@pytest.mark.parametrize("service", ["scheduler", "gcs"])
def test_a_resize_goes_on_when_a_service_is_killed_in_the_middle_of_it(
    cluster: Apart, tmp_path: Path, service: str
) -> None:
    one = trainer(tmp_path)
    one.submit()
    makes_steps(tmp_path, 2)
    one.resize(1)
    killed = getattr(cluster, service)
    killed.kill()
    before = loops.lines(tmp_path / "steps")[-1].step
    until(
        lambda: loops.lines(tmp_path / "steps")[-1].step > before,
        WAIT_S,
        f"steps without {service}",
    )
    killed.start()
    smaller = makes_steps(tmp_path, 1)
    one.resize(2)
    makes_steps(tmp_path, 2, after=smaller.generation)
    ends_exact(one)


def test_a_node_that_dies_while_the_job_grows_onto_it_stops_nobody(
    small: Apart, tmp_path: Path
) -> None:
    one = trainer(tmp_path)
    one.submit()
    first = makes_steps(tmp_path, 1)
    small.add_nodelet(cpus=1)
    lost = small.nodes()["n1"]["node_id"]

    def grows() -> bool:
        query = {"job_id": one.job_id, "limit": 100}
        page = small.client.call("GET", "/v1/actors", reply=dict[str, Any], query=query)
        return any(actor["node_id"] == lost for actor in page["items"])

    until(grows, WAIT_S, "a replica starts on the second node")
    small.nodelets[1].kill()
    small.add_nodelet(cpus=1)
    makes_steps(tmp_path, 2)
    assert {line.pid for line in loops.lines(tmp_path / "steps") if line.rank == 0} == {first.pid}
    ends_exact(one)


DRIVER = """
    import sys
    from pathlib import Path

    import stoker
    from tests.chaos.elastic.test_elastic_training import trainer

    stoker.init(sys.argv[1], log_to_driver=False)
    trainer(Path(sys.argv[2])).fit()
"""


def test_a_training_whose_driver_was_killed_is_found_by_its_name(
    cluster: Apart, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen(
        [sys.executable, str(script), cluster.gcs.url, str(tmp_path)],
        env={**cluster.environ, "PYTHONPATH": str(REPO)},
    )
    try:
        killed_at = makes_steps(tmp_path, 2)
    finally:
        driver.kill()
        driver.wait(WAIT_S)
    one = ElasticTrainer.attach("survivor")
    one.resize(1)
    makes_steps(tmp_path, 1, after=killed_at.generation)
    ends_exact(one)
