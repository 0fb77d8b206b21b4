"""Stacks where py-spy is not to be had, of one who holds the interpreter, and of others' programs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import ConflictError, ForbiddenError, NotFoundError
from stoker_wire.messages.control import CreateToken, PersonRole, Token
from stoker_wire.messages.node_api import Stacks, StackWay
from tests.e2e._cluster import WAIT_S, cli, driver, head, http, line_of
from tests.services import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WORK = """
    import ctypes, pathlib, time
    import stoker

    stoker.init()

    @stoker.remote(max_retries=0)
    def sleeps_in_this_function(end):
        while not pathlib.Path(end).exists():
            time.sleep(0.02)

    @stoker.remote(max_retries=0)
    def holds_the_interpreter(end, hold):
        libc = ctypes.PyDLL(None)  # a call by it does not let go of the interpreter
        while not pathlib.Path(end).exists():
            if pathlib.Path(hold).exists():
                libc.open(hold.encode(), 0)  # a pipe, which waits for a writer
            else:
                time.sleep(0.02)

    end, hold = {end!r}, {hold!r}
    refs = [sleeps_in_this_function.remote(end), holds_the_interpreter.remote(end, hold)]
    print("tasks:", *(ref.task_id for ref in refs))
    stoker.get(refs)
    print("all is well")
"""

SHARED = """
    import time
    import stoker

    stoker.init(namespace="shared")

    @stoker.remote(max_concurrency=2)
    class Vault:
        def open(self):
            time.sleep(600)

    vault = Vault.options(name="vault", get_if_exists=True).remote()
    print("task:", vault.open.remote().task_id)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster on which there is no py-spy; this machine may be busy, so stacks have time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_PY_SPY", "/nowhere/py-spy")
        patch.setenv("STOKER_STACK_TIMEOUT_S", "8")
        patch.setenv("STOKER_SLOW_TASK_STACKS", "3")
        with head(tmp_path_factory.mktemp("ways"), num_cpus=4) as made:
            yield made


class Work:
    """A driver with two tasks that run until the test ends."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.sleeping, self.holding = line_of(process, "tasks: ").split()
        self.end, self.hold = folder / "end", folder / "hold"

    def hold_on(self) -> None:
        """Have the second task hold the interpreter, until :meth:`let_go` or a signal."""
        os.mkfifo(self.hold)

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        """Be the writer for which that task waits, or is about to wait."""
        writer = os.open(self.hold, os.O_RDWR) if self.hold.exists() else None
        yield
        if writer is not None:
            os.close(writer)


@pytest.fixture
def alice(cluster: LocalCluster) -> str:
    return token(cluster, "alice")


@pytest.fixture
def work(cluster: LocalCluster, alice: str, tmp_path: Path) -> Iterator[Work]:
    program = WORK.format(end=str(tmp_path / "end"), hold=str(tmp_path / "hold"))
    with driver(cluster, program, STOKER_TOKEN=alice) as process:
        started = Work(process, tmp_path)
        for one in (started.sleeping, started.holding):
            until(lambda one=one: runs(cluster, one), WAIT_S, f"{one} runs")  # type: ignore[misc]
        yield started
        started.end.touch()
        with started.let_go():
            assert line_of(process, "all is") == "well"


def token(cluster: LocalCluster, name: str, role: str = "user", *namespaces: str) -> str:
    body = CreateToken(name=name, role=PersonRole(role), namespaces=namespaces)
    return http(cluster).call("POST", "/v1/tokens", body, reply=Token).secret


def runs(cluster: LocalCluster, task_id: str) -> dict[str, Any] | None:
    try:
        found = http(cluster).call("GET", f"/v1/tasks/{task_id}", reply=dict[str, Any])
    except NotFoundError:
        return None
    return found if found["state"] == "RUNNING" else None


def stacks_of(cluster: LocalCluster, target: str, secret: str = "") -> Stacks:
    client = HttpClient(cluster.info.gcs_url, token=secret or cluster.info.token)
    return client.call("GET", "/v1/stacks", reply=Stacks, query={"target": target})


def functions_of(stacks: Stacks) -> set[str]:
    return {
        frame.function
        for process in stacks.processes
        for thread in process.threads
        for frame in thread.frames
    }


def test_without_py_spy_the_worker_tells_its_stacks_itself(
    cluster: LocalCluster, work: Work, alice: str
) -> None:
    (process,) = stacks_of(cluster, work.sleeping, alice).processes
    assert process.way is StackWay.WORKER
    assert process.why_not_better.startswith("py-spy is not installed on this node")
    frames = [frame for thread in process.threads for frame in thread.frames]
    (where,) = [frame for frame in frames if "sleeps_in_this_function" in frame.function]
    assert where.line > 0
    assert process.task_ids == (work.sleeping,)
    assert process.threads[0].name == "MainThread"


def test_one_that_holds_the_interpreter_is_seen_by_a_signal(
    cluster: LocalCluster, work: Work
) -> None:
    work.hold_on()

    def by_signal() -> Stacks | None:
        found = stacks_of(cluster, work.holding)
        return found if found.processes[0].way is StackWay.SIGNAL else None

    stacks = until(by_signal, WAIT_S, "the worker does not answer")
    assert stacks is not None
    assert any("holds_the_interpreter" in name for name in functions_of(stacks))
    assert stacks.processes[0].task_ids is None


def test_a_profile_without_py_spy_says_what_is_lacking(cluster: LocalCluster, work: Work) -> None:
    body = msgspec.json.decode(msgspec.json.encode({"target": work.sleeping, "seconds": 0.1}))
    with pytest.raises(ConflictError, match="py-spy is not installed") as caught:
        http(cluster).call("POST", "/v1/profiles", body, reply=bytes, timeout_s=WAIT_S)
    assert "stoker[profile]" in str(caught.value)


def test_the_program_of_another_user_is_nobody_elses_to_look_into(
    cluster: LocalCluster, work: Work, alice: str
) -> None:
    record = runs(cluster, work.sleeping)
    assert record is not None
    targets = (work.sleeping, record["job_id"], record["worker_id"])
    mallory, viewer = token(cluster, "mallory"), token(cluster, "eyes", "viewer")
    client = HttpClient(cluster.info.gcs_url, token=mallory)
    for target in targets:
        assert functions_of(stacks_of(cluster, target, alice))
        with pytest.raises(ForbiddenError, match="is not user mallory's"):
            stacks_of(cluster, target, mallory)
        with pytest.raises(ForbiddenError, match="is not user mallory's"):
            client.call("POST", "/v1/profiles", {"target": target}, reply=bytes)
        with pytest.raises(ForbiddenError):
            stacks_of(cluster, target, viewer)
    # A node is nobody's: each sees there what is theirs.
    assert not stacks_of(cluster, record["node_id"], mallory).processes
    mine = stacks_of(cluster, record["node_id"], alice).processes
    assert record["job_id"] in {one.job_id for one in mine}
    with pytest.raises(NotFoundError):
        stacks_of(cluster, record["worker_id"][:-2], mallory)


def test_a_call_of_anothers_actor_does_not_open_that_actor(cluster: LocalCluster) -> None:
    owner = token(cluster, "owner", "user", "shared")
    guest = token(cluster, "guest", "user", "shared")
    with driver(cluster, SHARED, STOKER_TOKEN=owner) as first:
        task_of_owner = line_of(first, "task: ")
        until(lambda: runs(cluster, task_of_owner), WAIT_S, "the owner's call runs")
        with driver(cluster, SHARED, STOKER_TOKEN=guest) as second:
            task_of_guest = line_of(second, "task: ")
            record = until(lambda: runs(cluster, task_of_guest), WAIT_S, "the guest's call runs")
            assert record is not None
            client = HttpClient(cluster.info.gcs_url, token=guest)
            with pytest.raises(ForbiddenError, match="is not user guest's"):
                stacks_of(cluster, task_of_guest, guest)
            with pytest.raises(ForbiddenError, match="is not user guest's"):
                client.call("POST", "/v1/profiles", {"target": task_of_guest}, reply=bytes)
            assert functions_of(stacks_of(cluster, task_of_owner, owner))


def test_the_command_line_shows_stacks(cluster: LocalCluster, work: Work, alice: str) -> None:
    shown = cli(cluster, "stack", work.sleeping, STOKER_TOKEN=alice)
    assert shown.returncode == 0, shown.stderr
    assert "sleeps_in_this_function" in shown.stdout
    assert "as the worker itself says" in shown.stdout
    assert "not by py-spy: py-spy is not installed on this node" in shown.stdout
    assert f"runs {work.sleeping}" in shown.stdout
    as_json = cli(cluster, "stack", "--json", work.sleeping, STOKER_TOKEN=alice)
    assert msgspec.json.decode(as_json.stdout, type=Stacks).target == work.sleeping
    refused = cli(cluster, "stack", "w_nothing")
    assert refused.returncode == 1
    assert "there is no worker 'w_nothing' that runs" in refused.stderr


SLOW = """
    import pathlib, time
    import stoker

    stoker.init()

    @stoker.remote
    class Counter:
        def counts(self, end):
            def is_stuck_in_this_function():
                while not pathlib.Path(end).exists():
                    time.sleep(0.02)
            if end:
                is_stuck_in_this_function()

    counter = Counter.remote()
    stoker.get([counter.counts.remote("") for _ in range(30)])
    ref = counter.counts.remote({end!r})
    print("task:", ref.task_id)
    stoker.get(ref)
    print("all is well")
"""


def test_a_task_that_runs_much_longer_than_its_function_does_has_its_stack_in_its_story(
    cluster: LocalCluster, alice: str, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    gcs = http(cluster)
    with driver(cluster, SLOW.format(end=str(end)), STOKER_TOKEN=alice) as process:
        task_id = line_of(process, "task: ")

        def told() -> dict[str, Any] | None:
            query = {"kind": "task.slow", "subject": task_id}
            events = gcs.call("GET", "/v1/events", reply=dict[str, Any], query=query)["items"]
            return events[0]["payload"] if events else None

        payload = until(told, WAIT_S, "the task is told to be slow")
        assert payload is not None
        assert payload["runs"] == 30
        assert payload["ran_s"] >= 1.0
        assert "is_stuck_in_this_function" in payload["stack"]
        explained = cli(cluster, "explain", task_id, STOKER_TOKEN=alice).stdout
        assert "it runs much longer than its function does" in explained
        assert "is_stuck_in_this_function" in explained
        viewer = HttpClient(cluster.info.gcs_url, token=token(cluster, "eyes", "viewer"))
        query = {"kind": "task.slow", "subject": task_id}
        seen = viewer.call("GET", "/v1/events", reply=dict[str, Any], query=query)["items"]
        assert seen[0]["payload"]["stack"] == ""
        end.touch()
        assert line_of(process, "all is") == "well"
    story = cli(cluster, "story", task_id, STOKER_TOKEN=alice).stdout
    assert f"task {task_id} has run for" in story
    assert "is_stuck_in_this_function" in story


def test_this_machine_can_hold_an_interpreter() -> None:
    """What the test by a signal stands on."""
    assert ctypes.PyDLL(None).sleep(0) == 0
