"""Elastic trainings whose node, scheduler, gcs or driver is killed while they change: no sample is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.train import ElasticTrainer
from tests.chaos.elastic.trainings import (
    WAIT_S,
    connected,
    ends_exact,
    makes_steps,
    next_is_written,
    trainer,
)
from tests.e2e.train import elastic_loops as loops
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos._services import Apart

pytest.importorskip("torch")

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Apart]:
    with connected(tmp_path, cpus=2) as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Apart]:
    """A node for one replica: a second one needs another node."""
    with connected(tmp_path, cpus=1) as made:
        yield made


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
    from tests.chaos.elastic.trainings import trainer

    stoker.init(sys.argv[1], log_to_driver=False)
    trainer(Path(sys.argv[2])).fit()
"""


def test_a_training_whose_driver_was_killed_in_a_resize_is_found_by_its_name(
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
        one = ElasticTrainer.attach("survivor")
        one.resize(1)
        next_is_written(one, after=killed_at.generation)
    finally:
        driver.kill()
        driver.wait(WAIT_S)
    one = ElasticTrainer.attach("survivor")
    makes_steps(tmp_path, 1, after=killed_at.generation)
    ends_exact(one)


def test_a_controller_that_is_killed_in_a_resize_has_a_successor_that_loses_no_sample(
    cluster: Apart, tmp_path: Path
) -> None:
    one = trainer(tmp_path)
    one.submit()
    until(lambda: one.progress().get("checkpoint"), WAIT_S, "a checkpoint is written")
    before = makes_steps(tmp_path, 2)
    first = {line.pid for line in loops.lines(tmp_path / "steps")}
    one.resize(1)
    next_is_written(one, after=before.generation)
    job = cluster.client.call("GET", f"/v1/jobs/{one.job_id}", reply=dict[str, Any])
    os.kill(job["pid"], signal.SIGKILL)
    until(
        lambda: {line.pid for line in loops.lines(tmp_path / "steps")} - first,
        WAIT_S,
        "replicas of the next attempt make steps",
    )
    ends_exact(one)
