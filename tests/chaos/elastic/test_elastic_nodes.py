"""Elastic trainings whose nodes are lost, or of no use, or whose ranks are replaced: what they say and do."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from stoker_wire.messages.control import Explanation
from stoker_wire.messages.elastic import ElasticState
from stoker_wire.messages.events import Story
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
    from pathlib import Path

    from stoker.train import ElasticTrainer
    from tests.chaos._services import Apart, Service

pytest.importorskip("torch")

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Apart]:
    """Two nodes for one replica each."""
    with connected(tmp_path, cpus=1) as made:
        made.add_nodelet(cpus=1)
        yield made


def loses_power(node: Service) -> None:
    """Kill a nodelet and all that it has started."""
    started = psutil.Process(node.pid).children(recursive=True)
    node.kill()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its nodelet
            process.kill()


def state_of(cluster: Apart, one: ElasticTrainer) -> ElasticState:
    return cluster.client.call("GET", f"/v1/jobs/{one.job_id}/elastic", reply=ElasticState)


def story_of(cluster: Apart, one: ElasticTrainer) -> str:
    told = cluster.client.call("GET", f"/v1/story/{one.job_id}", reply=Story)
    return "\n".join(f"{line.text}: {line.why}" for line in told.lines)


def test_below_min_replicas_a_training_waits_says_for_what_and_goes_on_with_another_node(
    pair: Apart, tmp_path: Path
) -> None:
    one = trainer(tmp_path, replicas=(2, 2))
    one.submit()
    before = makes_steps(tmp_path, 2)
    loses_power(pair.nodelets[1])
    waits = "of 2 at least (scaling.min_replicas): the training waits for more"
    until(lambda: waits in one.progress().get("message", ""), WAIT_S, "its status says so")
    until(lambda: waits in story_of(pair, one), WAIT_S, "its story says so")

    def explained() -> bool:
        found = pair.client.call("GET", f"/v1/jobs/{one.job_id}/explain", reply=Explanation)
        return "with 2 replicas at least, and nodes have room for 1" in found.summary

    until(explained, WAIT_S, "stoker explain says for what")
    assert loops.lines(tmp_path / "steps")[-1].generation == before.generation
    pair.add_nodelet(cpus=1)
    after = makes_steps(tmp_path, 2, after=before.generation)
    assert after.generation > before.generation
    ends_exact(one)


def test_the_place_of_a_node_on_which_nothing_starts_is_given_back(
    tmp_path: Path,
) -> None:
    with connected(tmp_path, cpus=1) as cluster:
        one = trainer(tmp_path)
        one.submit()
        makes_steps(tmp_path, 1)
        (tmp_path / "steps.broken").touch()
        cluster.add_nodelet(cpus=1)
        bad = cluster.nodes()["n1"]["node_id"]
        until(
            lambda: bad in state_of(cluster, one).scaling.node_filter,
            WAIT_S,
            "the job wants no more of that node",
        )
        until(lambda: bad not in state_of(cluster, one).allocation(), WAIT_S, "it is given back")
        assert "is quarantined: " in story_of(cluster, one)
        assert state_of(cluster, one).lost == 0
        (tmp_path / "steps.broken").unlink()
        cluster.add_nodelet(cpus=1)  # another is as good as any
        makes_steps(tmp_path, 2)
        ends_exact(one)


def test_the_newcomer_comes_before_the_rank_that_it_replaces_leaves(tmp_path: Path) -> None:
    with connected(tmp_path, cpus=2) as cluster:
        one = trainer(tmp_path, replicas=(1, 3))
        one.submit()
        makes_steps(tmp_path, 2)
        slow = loops.pid_of(tmp_path / "steps", 0)
        asked = loops.lines(tmp_path / "steps")[-1]
        one.replace(0)

        def asks() -> bool:
            hints = state_of(cluster, one).hints
            return hints is not None and hints.spares == 1

        until(asks, WAIT_S, "it asks for a place more")
        cluster.add_nodelet(cpus=1)
        until(lambda: not psutil.pid_exists(slow), WAIT_S, "the rank that is replaced leaves")
        seen = [line for line in loops.lines(tmp_path / "steps") if line.at_s > asked.at_s]
        assert min(line.world for line in seen) >= 2, "nobody trained with less meanwhile"
        why = "rank 0 leaves, as another is there"
        until(lambda: why in story_of(cluster, one), WAIT_S, "its story says so")
        ends_exact(one)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_resize_in_whose_middle_rank_0_dies_or_hangs_is_followed_by_another(
    fault: signal.Signals, tmp_path: Path
) -> None:
    with connected(tmp_path, cpus=2):
        one = trainer(tmp_path, sample_s=0.03, hang_s=6.0)
        one.submit()
        before = makes_steps(tmp_path, 2)
        first = loops.pid_of(tmp_path / "steps", 0)
        one.resize(1)
        next_is_written(one, after=before.generation)
        os.kill(first, fault)
        smaller = makes_steps(tmp_path, 1, after=before.generation)
        one.resize(2)
        makes_steps(tmp_path, 2, after=smaller.generation)
        until(lambda: not psutil.pid_exists(first), WAIT_S, "the one that hung was ended")
        ends_exact(one)
