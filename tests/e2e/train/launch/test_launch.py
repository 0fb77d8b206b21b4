"""``stoker launch``: torchrun's scripts as jobs, on nodes that come and go."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import stoker
from stoker.exceptions import BadRequestError
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker_train.launch.driver import Run
from stoker_train.launch.places import ElasticPlaces, open_places
from stoker_train.launch.spec import Spec
from tests.e2e._cluster import cli, environment, head, http
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
LONG_S = 240.0
ENV = {"OMP_NUM_THREADS": "1"}

GLOO = """
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
value = torch.full((2,), float(dist.get_rank() + 1))
dist.all_reduce(value)
print("sum", value.tolist(), *sys.argv[1:], flush=True)
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2
dist.destroy_process_group()
"""

KILLED_ONCE = """
import os, signal, time
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", count, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
if count == "0":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""

RECORDED = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the learning rate is a pear")
    time.sleep(600)

main()
"""

FOLLOWS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
names = ["RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"]
mark = folder / ("-".join(os.environ[name] for name in names) + f"-{os.getpid()}")
mark.touch()
while not (folder / "stop").exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Four CPUs; this process is a driver too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "2")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.2")
        patch.setenv("OMP_NUM_THREADS", "1")
        with head(tmp_path_factory.mktemp("l"), num_cpus=4) as made:
            stoker.init(made.info.gcs_url, token=made.info.token, log_to_driver=False)
            try:
                yield made
            finally:
                stoker.shutdown()


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def launched(cluster: LocalCluster, *args: str) -> subprocess.CompletedProcess[str]:
    """``stoker launch``, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", "launch", *args],
        env=environment(cluster, **ENV),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


# -- the command -----------------------------------------------------------------------------------


def test_two_nodes_form_a_group_and_lines_name_their_rank(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    args = [
        "--nnodes",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
        script(tmp_path, GLOO),
        "--lr",
        "3",
    ]
    done = launched(cluster, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert {"[rank 0] sum [3.0, 3.0] --lr 3", "[rank 1] sum [3.0, 3.0] --lr 3"} <= set(said)
    kept = [one.read_text() for one in (tmp_path / "logs").rglob("stdout.log")]
    assert kept == ["sum [3.0, 3.0] --lr 3\n"] * 2


def test_a_killed_worker_restarts_all_and_is_counted(cluster: LocalCluster, tmp_path: Path) -> None:
    args = ["--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, KILLED_ONCE)]
    done = launched(cluster, *args)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for rank in (0, 1):
        assert f"[rank {rank}] attempt 1 of 1" in said
    assert "rank 1 was ended by signal SIGKILL; restart 1 of 1" in said


def test_an_error_is_told_with_its_traceback_and_rank(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    done = launched(cluster, "--nproc-per-node", "2", script(tmp_path, RECORDED))
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "traceback of rank 1:" in said and 'raise ValueError("the learning rate' in said
    cause = "rank 1 failed with exit code 1: ValueError: the learning rate is a pear"
    assert f"after 0 of 0 restarts: {cause}" in said


def test_a_program_fails_with_its_own_exit_code_and_its_last_words(cluster: LocalCluster) -> None:
    command = ["--no-python", "sh", "-c", "echo no such thing >&2; exit 7"]
    done = launched(cluster, *command)
    said = done.stdout + done.stderr
    assert done.returncode == 7, said
    assert "last output on stderr of rank 0:" in said
    assert "rank 0 failed with exit code 7: no such thing" in said


def test_a_module_runs_and_a_job_that_is_stopped_leaves_no_process(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "follows.py").write_text(FOLLOWS)
    (tmp_path / "marks").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "launch", "-m", "follows", str(tmp_path / "marks")],
        env=environment(cluster, **ENV),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        (mark,) = until(lambda: marks(tmp_path / "marks", "0-1-0-0-*"), LONG_S, "the worker runs")
        worker = psutil.Process(int(mark.rpartition("-")[2]))
        processes = [worker, *worker.parents()[:1]]
        assert "stoker_train.launch.agent" in processes[1].cmdline()
        jobs = http(cluster).call("GET", "/v1/jobs", reply=dict)["items"]
        (job,) = (
            one for one in jobs if one["name"] == "launch follows" and one["state"] == "RUNNING"
        )
        assert cli(cluster, "job", "stop", job["job_id"]).returncode == 0
        said, _ = process.communicate(timeout=LONG_S)
        assert process.returncode == 143, said
        until(
            lambda: not any(one.is_running() for one in processes), WAIT_S, "worker and agent ended"
        )
    finally:
        process.kill()
        process.communicate()


def test_without_a_cluster_one_is_started_for_it(tmp_path: Path) -> None:
    environ = {name: one for name, one in os.environ.items() if not name.startswith("STOKER_")}
    environ |= {"STOKER_SESSION_ROOT": str(tmp_path / "s"), **ENV}
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "launch", "--no-python", "echo", "hello"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "[rank 0] hello" in said and "started a cluster for it" in said


def test_what_no_node_could_run_is_refused_with_the_fix(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def refused(*args: str) -> str:
        done = launched(cluster, *args)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    assert "exchange them" in refused("--nnodes", "4:1", "x.py")
    assert "write it like 4, or 1:4" in refused("--nnodes", "all", "x.py")
    assert "give from 1 to 1000" in refused("--nnodes", "0", "x.py")
    assert "there is no file 'x.py'" in refused("x.py")
    assert "not both" in refused("-m", "--no-python", "x")
    assert "not both" in refused("--local", "--address", "http://127.0.0.1:1", "--no-python", "x")
    assert "no folder" in refused("--working-dir", str(tmp_path / "none"), "x.py")


# -- nodes that come and go ------------------------------------------------------------------------


def marks(folder: Path, pattern: str) -> list[str]:
    return sorted(one.name for one in folder.glob(pattern))


class Scripted:
    """Places that a test gives and takes."""

    def __init__(self, group: Any) -> None:
        self.all = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index in range(group.bundle_count)
        ]
        self.wanted = {0}
        self.held = {"0": self.all[0]}
        self.told: list[int] = []
        self.leave_by_s = WAIT_S

    @property
    def leaving(self) -> frozenset[str]:
        return frozenset(self.held) - {str(one) for one in self.wanted}

    def accept(self) -> None:
        self.held = {str(one): self.all[one] for one in sorted(self.wanted)}

    def ran(self, nodes: int, restart_s: float) -> None:
        assert restart_s > 0
        self.told.append(nodes)

    def close(self) -> None:
        """Nothing is to be given back."""


def test_nodes_come_are_lost_and_go_while_it_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    spec = Spec(
        command=(script(tmp_path, FOLLOWS), str(folder)), min_nodes=1, max_nodes=2, gpu=False
    )
    group = stoker.placement_group([{"CPU": 1}] * 2)
    assert group.wait(WAIT_S)
    places = Scripted(group)
    run = Run(spec, places, f"run-{time.monotonic_ns()}", "launch-test")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run.follow()), daemon=True)
    thread.start()
    try:
        until(lambda: marks(folder, "0-1-0-0-*"), LONG_S, "one node runs")
        places.wanted = {0, 1}
        until(lambda: marks(folder, "1-2-1-0-*"), LONG_S, "two nodes run, nothing counted")
        (mark,) = marks(folder, "1-2-1-0-*")
        agent = psutil.Process(int(mark.rpartition("-")[2])).parent()
        assert agent is not None
        agent.kill()
        until(lambda: len(marks(folder, "1-2-*")) == 2, LONG_S, "the lost node is replaced")
        alone = len(marks(folder, "0-1-*"))
        places.wanted = {0}
        until(lambda: len(marks(folder, "0-1-*")) > alone, LONG_S, "one node goes on alone")
        until(lambda: set(places.held) == {"0"}, LONG_S, "the other place is given back")
        (folder / "stop").touch()
        thread.join(LONG_S)
        assert codes == [0]
        restarts = {re.split("-", name)[3] for name in marks(folder, "?-?-?-?-*")}
        assert restarts == {"0"}, "nodes that come, go or are lost are no failures of the script"
        assert places.told[0] == 1 and 2 in places.told and places.told[-1] == 1
    finally:
        (folder / "stop").touch()
        thread.join(WAIT_S)
        stoker.remove_placement_group(group)


def test_a_place_where_no_agent_begins_is_given_up(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Spec(command=("x",), min_nodes=1, max_nodes=1, gpu=False, cwd="/no/such/folder")
    group = stoker.placement_group([{"CPU": 1}])
    assert group.wait(WAIT_S)
    try:
        run = Run(spec, Scripted(group), f"run-{time.monotonic_ns()}", "launch-test")
        assert run.follow() == 1
    finally:
        stoker.remove_placement_group(group)
    said = capsys.readouterr().err
    assert said.count("the folder /no/such/folder is not on this node") == 3
    assert "send it along: --working-dir" in said
    assert "0 of 1 places are of use, and 1 are needed" in said


def test_elastic_places_follow_the_scheduler_s_offers(cluster: LocalCluster) -> None:
    spec = Spec(command=("x",), min_nodes=1, max_nodes=2, gpu=False, cpus=2.0)
    places = open_places(spec)
    assert isinstance(places, ElasticPlaces)
    try:

        def held() -> int:
            places.accept()
            return len(places.held)

        until(lambda: held() == 2, WAIT_S, "it has all four CPUs")
        places.ran(2, 0.01)

        @stoker.remote(num_cpus=2)
        def rigid() -> int:
            return 1

        waiting = rigid.remote()
        until(lambda: len(places.leaving) == 1, WAIT_S, "one is wanted back")
        assert 0 < places.leave_by_s <= 30 and len(places.held) == 2
        until(lambda: held() == 1, WAIT_S, "it is left with one")
        assert not places.leaving
        assert stoker.get(waiting, timeout=WAIT_S) == 1
    finally:
        places.close()


def test_elastic_nodes_of_several_gpus_are_refused(cluster: LocalCluster) -> None:
    spec = Spec(command=("x",), min_nodes=1, max_nodes=2, nproc=4, gpu=True)
    with pytest.raises(BadRequestError, match=r"--nnodes 4:8 --nproc-per-node 1"):
        open_places(spec)
