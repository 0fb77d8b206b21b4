"""The ladder of the ends that no other work asks for: a timeout, the end of a job, the stop of a node."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import TaskTimeoutError
from stoker.jobs import JobSubmissionClient
from stoker.local.cluster import LocalCluster, spawn_node
from tests.e2e import _cluster
from tests.e2e.conftest import Flags, get
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.logs(r"lease did not start: .* got no answer")

HERE = {"num_cpus": 0, "resources": {"seat": 1}}
WAIT_S = 40.0
SAVES = """
    import os, sys, time
    import stoker

    folder, leaves, options = sys.argv[1], sys.argv[2], {{}}
    if {embedded}:
        options = dict(num_cpus=1, num_gpus=0)
    stoker.init(**options, log_to_driver=False)

    @stoker.remote
    class Holder:
        def hold(self):
            @stoker.on_stop
            def save(notice):
                time.sleep(0.5)
                open(os.path.join(folder, "saved"), "w").write(notice.reason or "?")

    holder = Holder.remote()
    stoker.get(holder.hold.remote(), timeout=40)
    if leaves == "shutdown":
        stoker.shutdown()
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with _cluster.head(tmp_path_factory.mktemp("h"), num_cpus=2) as cluster:
        stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
        try:
            yield cluster
        finally:
            stoker.shutdown()


@pytest.fixture
def nodes(head: LocalCluster, tmp_path: Path) -> Iterator[list[LocalCluster]]:
    """Two nodes with a seat each."""
    made = [
        spawn_node(
            head.info.gcs_url,
            token=head.info.token,
            num_cpus=1,
            num_gpus=0,
            resources={"seat": 1},
            session_dir=tmp_path / f"node{number}",
        )
        for number in range(2)
    ]
    try:
        for node in made:
            node.wait_ready()
        yield made
    finally:
        for node in made:
            node.stop()


def node_of(pid: int) -> str:
    return next(str(one["node_id"]) for one in stoker.nodes() if one["pid"] == pid)


def test_a_timeout_that_is_not_obeyed_runs_the_callbacks_first(
    head: LocalCluster, flags: Flags
) -> None:
    @stoker.remote(timeout=4, max_retries=0)
    def deaf() -> None:
        stoker.on_stop(lambda notice: flags.raise_("notice", notice.reason))
        flags.raise_("pid", os.getpid())
        while True:
            try:
                time.sleep(600)
            except TaskTimeoutError:
                flags.raise_("raised")

    with pytest.raises(TaskTimeoutError):
        get(deaf.remote())
    assert flags.is_up("raised"), "its code has heard of it before"
    assert "timeout of 4 s" in flags.wait("notice")
    pid = int(flags.wait("pid"))
    until(lambda: not alive(pid), WAIT_S, "its worker is gone")


def test_an_actor_saves_before_its_node_stops_and_is_started_again_after(
    nodes: list[LocalCluster], flags: Flags
) -> None:
    @stoker.remote(**HERE, max_restarts=1)
    class Holder:
        def __init__(self) -> None:
            flags.note("began", flags.is_up("saved"))
            stoker.on_stop(self.save)

        def save(self, notice: stoker.PreemptionNotice) -> None:
            time.sleep(0.5)
            flags.raise_("saved", notice.reason)

        def where(self) -> str:
            return str(stoker.get_runtime_context().node_id)

    holder = Holder.remote()
    where = get(holder.where.remote())
    there = next(node for node in nodes if node_of(node.pid) == where)
    there.stop()
    assert flags.wait("saved") == "its node stops"
    until(lambda: len(flags.notes("began")) == 2, WAIT_S, "it was started elsewhere")
    assert flags.notes("began") == ["False", "True"]
    stoker.kill(holder)


@stoker.remote(**HERE, max_restarts=1, max_task_retries=-1, save_interval_s=None)
class Ledger:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def where(self) -> str:
        return str(stoker.get_runtime_context().node_id)

    def __stoker_save__(self) -> int:
        return self.count

    def __stoker_restore__(self, state: int) -> None:
        self.count = state


def test_the_state_of_an_actor_is_saved_as_its_node_stops(nodes: list[LocalCluster]) -> None:
    ledger = Ledger.remote()
    assert [get(ledger.add.remote()) for _ in range(3)] == [1, 2, 3]
    where = get(ledger.where.remote())
    next(node for node in nodes if node_of(node.pid) == where).stop()
    assert get(ledger.add.remote()) == 4
    record = _cluster.actor_record(ledger._info.actor_id)
    assert (record["restarts"], record["preemptions"]) == (1, 0)
    stoker.kill(ledger)


def test_a_driver_gets_sigterm_when_its_node_stops(
    head: LocalCluster, nodes: list[LocalCluster], flags: Flags
) -> None:
    script = flags.folder / "waits.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        def leave(*_):
            open(sys.argv[1] + "/left", "w").write("x")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(sys.argv[1] + "/runs", "w").write(str(os.getppid()))
        while True:
            time.sleep(600)
        """)
    )
    client = JobSubmissionClient(head.info.gcs_url, token=head.info.token)
    job_id = client.submit_job(
        entrypoint=f"exec {sys.executable} {script} {flags.folder}",
        entrypoint_resources={"seat": 1},
    )
    flags.wait("runs")
    for node in nodes:
        node.stop()
    assert flags.wait("left")
    client.stop_job(job_id)


@pytest.mark.parametrize("leaves", ["shutdown", "exit"])
def test_the_end_of_a_job_lets_callbacks_run_to_their_end(
    leaves: str, head: LocalCluster, flags: Flags
) -> None:
    run(SAVES.format(embedded=False), flags, leaves, **_cluster.environment(head))
    assert flags.wait("saved")


@pytest.mark.parametrize("leaves", ["shutdown", "exit"])
def test_a_cluster_of_its_own_waits_for_them(leaves: str, flags: Flags) -> None:
    run(SAVES.format(embedded=True), flags, leaves, **os.environ)
    assert flags.is_up("saved"), "nothing of it runs any more"


def run(program: str, flags: Flags, *args: str, **env: Any) -> None:
    environment = {**env, "STOKER_SESSION_ROOT": str(flags.folder / "sessions")}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(flags.folder), *args],
        env=environment,
        timeout=90,
        check=True,
    )
