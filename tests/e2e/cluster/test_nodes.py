"""Nodes that are closed: a cordon and taints, from the command line to what runs where."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError
from stoker.local.cluster import spawn_node
from tests.e2e import _cluster
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

WAIT_S = 40.0


class Pair:
    """A head, and one more node with a taint; this process is a driver of the cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        by_label = {one["labels"]["name"]: one["node_id"] for one in stoker.nodes()}
        self.head, self.other = by_label["head"], by_label["other"]

    def cli(self, *args: str, may_fail: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "stoker.cli", *args],
            env=_cluster.environment(self.cluster),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert may_fail or done.returncode == 0, done.stderr
        return done.stdout

    def explained(self, ref: Any) -> str:
        """What ``stoker explain`` says of the task that makes ``ref``."""
        return self.cli("explain", str(ref.task_id), may_fail=True)  # unknown for a moment

    def taints(self, node_id: str) -> list[str]:
        (record,) = [one for one in stoker.nodes() if one["node_id"] == node_id]
        return [f"{one['key']}={one['value']}:{one['effect']}" for one in record["taints"]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nodes")
    with _cluster.head(folder, num_cpus=2, labels={"name": "head"}) as cluster:
        node = spawn_node(
            cluster.info.gcs_url,
            token=cluster.info.token,
            num_cpus=2,
            num_gpus=0,
            labels={"name": "other"},
            taints="team=a:NoSchedule",
            session_dir=folder / "other",
        )
        try:
            node.wait_ready()
            stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
            yield Pair(cluster)
        finally:
            stoker.shutdown()
            node.stop()


@stoker.remote
def where() -> str:
    return str(stoker.get_runtime_context().node_id)


def test_work_keeps_away_from_a_taint_that_it_does_not_tolerate(pair: Pair) -> None:
    assert pair.taints(pair.other) == ["team=a:NoSchedule"]
    spread = {"scheduling_strategy": "SPREAD", "num_cpus": 1}
    assert {get(where.options(**spread).remote()) for _ in range(8)} == {pair.head}
    tolerant = where.options(tolerations=["team=a:NoSchedule"], label_selector={"name": "other"})
    assert get(tolerant.remote()) == pair.other
    group = stoker.placement_group(
        [{"CPU": 1}] * 2, "STRICT_SPREAD", tolerations=[{"key": "team", "value": "a"}]
    )
    assert group.wait(WAIT_S)
    stoker.remove_placement_group(group)
    with pytest.raises(BadRequestError, match="none of NoSchedule"):
        where.options(tolerations=["team=a:Nowhere"])


def test_a_cordoned_node_gets_nothing_and_explain_says_so(pair: Pair) -> None:
    assert "cordoned by" in pair.cli("node", "cordon", pair.head[:12], "--reason", "a disk")
    waiting = where.options(label_selector={"name": "head"}).remote()
    until(lambda: "cordoned by cluster since" in pair.explained(waiting), WAIT_S, "it is explained")
    text = pair.explained(waiting)
    assert "UTC: a disk" in text and "team=a:NoSchedule, which is not tolerated" in text
    assert pair.cli("node", "uncordon", pair.head).endswith("open to new work\n")
    assert get(waiting) == pair.head


def test_no_execute_moves_a_task_at_no_cost(pair: Pair, flags: Flags) -> None:
    pair.cli("node", "taint", pair.other, "team-")

    @stoker.remote(max_retries=0, label_selector={"name": "in(head,other)"}, preemption_grace=0.3)
    def long() -> tuple[str, int]:
        context = stoker.get_runtime_context()
        flags.note("ran", context.node_id)
        if len(flags.notes("ran")) == 1:
            time.sleep(600)  # it ignores the notice, and is run again
        return str(context.node_id), context.attempt

    running = long.remote()
    until(lambda: flags.notes("ran"), WAIT_S, "it runs")
    (first,) = flags.notes("ran")
    assert "gone:NoExecute" in pair.cli("node", "taint", first, "gone:NoExecute")
    try:
        node_id, _ = get(running)
        assert node_id != first
    finally:
        pair.cli("node", "taint", first, "gone-")
        pair.cli("node", "taint", pair.other, "team=a:NoSchedule")


def test_no_execute_moves_an_actor_with_its_state_at_no_cost(pair: Pair) -> None:
    pair.cli("node", "taint", pair.other, "team-")

    @stoker.remote(max_restarts=0, save_interval_s=None, label_selector={"name": "in(head,other)"})
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> tuple[str, int]:
            self.count += 1
            return str(stoker.get_runtime_context().node_id), self.count

        def __stoker_save__(self) -> int:
            return self.count

        def __stoker_restore__(self, state: int) -> None:
            self.count = state

    counter = Counter.remote()
    first, _ = get(counter.add.remote())
    pair.cli("node", "taint", first, "gone:NoExecute")
    try:
        count = 1

        def has_moved() -> bool:
            nonlocal count
            node_id, now = get(counter.add.options(max_task_retries=-1).remote())
            count += 1
            assert now == count, "nothing of its state is lost"
            return bool(node_id != first)

        until(has_moved, WAIT_S, "it lives on the other node", interval_s=0.1)
        record = json.loads(pair.cli("get", str(counter.actor_id), "--json"))
        assert (record["preemptions"], record["restarts"]) == (1, 0)
    finally:
        pair.cli("node", "taint", first, "gone-")
        pair.cli("node", "taint", pair.other, "team=a:NoSchedule")
        stoker.kill(counter)
