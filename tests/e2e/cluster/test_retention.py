"""Retention on a running cluster: dead nodes leave, logs stay short, and a driver is shown every line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Page, RetentionStatus
from tests.e2e._cluster import WAIT_S, environment, head, http, run_driver
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

MAX_LOG = 1 << 20
LINES = 20_000
PRINTS = """
    import sys

    import stoker

    stoker.init()

    @stoker.remote
    def prints(first, count):
        import os
        import subprocess
        for i in range(first, first + count):
            print(f"line {i:06} " + "x" * 80)
        subprocess.run(["echo", f"child {first}"], check=True)
        return os.environ["STOKER_WORKER_ID"]

    for first in range(0, LINES, 4000):
        worker = stoker.get(prints.remote(first, 4000))
    sys.stdout.write(f"worker {worker}\\n")  # at once: another thread writes the workers' lines
    stoker.shutdown()
""".replace("LINES", str(LINES))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_KEEP_NODES_S", "0.5")
        patch.setenv("STOKER_KEEP_JOBS_S", "1000")
        patch.setenv("STOKER_LOG_MAX_BYTES", str(MAX_LOG))
        with head(tmp_path_factory.mktemp("session"), num_cpus=1) as made:
            yield made


def node_ids(cluster: LocalCluster) -> set[str]:
    page = http(cluster).call("GET", "/v1/nodes", reply=Page[Node])
    return {node.node_id for node in page.items}


def test_a_dead_node_leaves_the_lists(cluster: LocalCluster) -> None:
    before = node_ids(cluster)
    command = [sys.executable, "-m", "stoker.cli", "start", "--address", cluster.info.gcs_url]
    joined = subprocess.run(
        [*command, "--num-cpus", "1", "--num-gpus", "0", "--json"],
        env=environment(cluster),
        capture_output=True,
        text=True,
        check=True,
    )
    started = json.loads(joined.stdout)
    try:
        assert node_ids(cluster) == before | {started["node_id"]}
    finally:
        os.kill(started["pid"], signal.SIGTERM)
    until(lambda: node_ids(cluster) == before, WAIT_S, "the node has left the list")

    def told() -> bool:
        shown = http(cluster).call("GET", "/v1/retention", reply=RetentionStatus)
        (nodes,) = (one for one in shown.kinds if one.kind == "nodes")
        return (nodes.count, nodes.removed, nodes.keep_s) == (0, 1, 0.5)

    until(told, WAIT_S, "the pass that removed it says so")
    status = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "status"],
        env=environment(cluster),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Kept" in status.stdout
    assert "events (the oldest" in status.stdout


def test_a_driver_is_shown_all_of_a_log_that_is_shortened(cluster: LocalCluster) -> None:
    done = run_driver(cluster, PRINTS)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    for i in range(0, LINES, 997):
        assert f"line {i:06} " in output
    assert sum(line.find("line ") >= 0 for line in output.splitlines()) == LINES
    assert output.count("child ") == LINES // 4000
    assert "dropped by retention" not in output
    (worker,) = re.findall(r"worker (w_[0-9a-f.]+)", done.stdout)
    logs: Path = cluster.session_dir / "logs"
    path = logs / f"worker-{worker}.log"
    assert path.stat().st_size > LINES * 80
    until(
        lambda: path.stat().st_blocks * 512 <= MAX_LOG + 8192, 60.0, "the log is short on the disk"
    )
