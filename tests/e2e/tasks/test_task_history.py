"""The task history end to end: complete, and closed however a task, a worker or a job ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Cluster, Flags

WAIT_S = 40.0


def attempts(cluster: Cluster, ref: stoker.ObjectRef[Any], count: int = 1) -> list[dict[str, Any]]:
    """The attempts of a task, once there are so many and all have ended."""

    def ended() -> list[dict[str, Any]] | None:
        try:
            found = cluster.call("GET", f"/v1/tasks/{ref.task_id}/attempts")["items"]
        except exceptions.NotFoundError:
            return None
        ends = [one for one in found if one["ended_at_s"]]
        return found if len(found) == len(ends) == count else None

    return until(ended, WAIT_S, f"the history has the end of {ref.task_id}")


@stoker.remote
def length(data: bytes) -> bytes:
    return data + data


@stoker.remote(max_retries=0)
def ends_its_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@stoker.remote
def fails() -> None:
    raise FileNotFoundError("no file caf\udce9")


@stoker.remote
def touch_and_wait(folder: str, name: str) -> None:
    path = Path(folder, name)
    path.write_text(str(os.getpid()))
    while not path.with_suffix(".go").exists():
        time.sleep(0.01)


@stoker.remote
class Stream:
    def items(self, count: int) -> Iterator[int]:
        time.sleep(0.15)  # long enough to be told of while it runs
        yield from range(count)

    def hang(self, folder: str) -> None:
        Path(folder, "hangs").touch()
        time.sleep(600)

    def die(self, flag: str) -> int:
        if not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1


def test_a_record_is_complete(cluster: Cluster) -> None:
    data = os.urandom(1000)
    ref = length.remote(data)
    stoker.get(ref, timeout=WAIT_S)
    (record,) = attempts(cluster, ref)
    assert record["state"] == "FINISHED"
    assert record["submitted_at_s"] <= record["started_at_s"] <= record["ended_at_s"]
    assert record["node_id"] == cluster.info.node_id
    assert record["worker_id"].startswith("w_")
    assert record["args_nbytes"] > 1000
    assert record["result_nbytes"] > 2000
    assert record["error"] is None


def test_a_large_argument_is_counted_where_it_lies(cluster: Cluster) -> None:
    ref = length.remote(os.urandom(300_000))
    stoker.get(ref, timeout=WAIT_S)
    (record,) = attempts(cluster, ref)
    assert record["args_nbytes"] > 300_000
    assert record["result_nbytes"] > 600_000


def test_an_attempt_whose_worker_died_has_failed_where_it_was(cluster: Cluster) -> None:
    ref = ends_its_worker.remote()
    with pytest.raises(exceptions.WorkerDiedError):
        stoker.get(ref, timeout=WAIT_S)
    (record,) = attempts(cluster, ref)
    assert record["state"] == "FAILED"
    assert record["error"]["code"] == "worker_died"
    assert record["node_id"] == cluster.info.node_id
    assert record["worker_id"].startswith("w_")


def test_each_attempt_that_is_tried_again_has_its_end(cluster: Cluster, tmp_path: Path) -> None:
    actor = Stream.options(max_restarts=1, max_task_retries=1).remote()
    ref = actor.die.remote(str(tmp_path / "flag"))
    assert stoker.get(ref, timeout=WAIT_S) == 1
    states = [one["state"] for one in attempts(cluster, ref, 2)]
    assert states == ["FAILED", "FINISHED"]


def test_an_error_with_text_that_is_no_unicode_is_told(cluster: Cluster) -> None:
    ref = fails.remote()
    with pytest.raises(FileNotFoundError, match="caf"):
        stoker.get(ref, timeout=WAIT_S)
    (record,) = attempts(cluster, ref)
    assert record["error"]["message"] == "FileNotFoundError: no file caf?"


def test_a_stream_has_ended_also_if_its_actor_is_killed_at_once(cluster: Cluster) -> None:
    for _ in range(3):
        actor = Stream.remote()
        stream = actor.items.options(num_returns="streaming").remote(3)
        assert [stoker.get(item, timeout=WAIT_S) for item in stream] == [0, 1, 2]
        stoker.kill(actor)

    def states() -> list[str]:
        items = cluster.call("GET", "/v1/tasks", name="Stream.items", limit=1000)["items"]
        return [item["state"] for item in items]

    until(lambda: states() == ["FINISHED"] * 3, WAIT_S, "all three are told as finished")


def test_a_call_that_runs_when_its_actor_is_killed_has_failed(
    cluster: Cluster, tmp_path: Path
) -> None:
    actor = Stream.remote()
    ref = actor.hang.remote(str(tmp_path))
    until((tmp_path / "hangs").exists, WAIT_S, "it runs")
    stoker.kill(actor)
    with pytest.raises(exceptions.ActorDiedError):
        stoker.get(ref, timeout=WAIT_S)
    (record,) = attempts(cluster, ref)
    assert (record["state"], record["error"]["code"]) == ("FAILED", "actor_died")


@pytest.mark.parametrize("force", [False, True])
def test_a_cancelled_task_is_cancelled_in_the_history(
    cluster: Cluster, tmp_path: Path, force: bool
) -> None:
    ref = touch_and_wait.remote(str(tmp_path), "runs")
    until((tmp_path / "runs").exists, WAIT_S, "it runs")
    queued = touch_and_wait.options(num_cpus=4).remote(str(tmp_path), "never")
    waiting = length.remote(queued)
    for one in (waiting, queued):
        stoker.cancel(one)
    stoker.cancel(ref, force=force)
    for one in (ref, queued, waiting):
        with pytest.raises(exceptions.TaskCancelledError):
            stoker.get(one, timeout=WAIT_S)
        (record,) = attempts(cluster, one)
        assert (record["state"], record["error"]["code"]) == ("CANCELLED", "task_cancelled")


DRIVER = """
import os, sys, stoker
from tests.services import until
stoker.init(sys.argv[1], token=sys.argv[2], log_to_driver=False)

@stoker.remote(num_cpus=4)
def runs(folder):
    import pathlib, time
    pathlib.Path(folder, "runs").touch()
    time.sleep(600)

refs = [runs.remote(sys.argv[3]) for _ in range(3)]
until(lambda: os.path.exists(os.path.join(sys.argv[3], "runs")), 40, "one runs")
job_id = stoker.get_runtime_context().job_id
http = stoker.runtime.current.runtime().job.http

def known():
    page = http.call("GET", "/v1/tasks", reply=dict, query={"job_id": job_id})
    return len(page["items"]) == 3

until(known, 40, "the history knows them")
print(job_id, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_tasks_of_a_killed_driver_end(
    cluster: Cluster, tmp_path: Path, driver: Callable[..., Any], flags: Flags
) -> None:
    done = driver(DRIVER, cluster.info.address, cluster.info.token, str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    job_id = done.stdout.strip()

    def states() -> list[str]:
        items = cluster.call("GET", "/v1/tasks", job_id=job_id)["items"]
        return sorted(item["state"] for item in items)

    wanted = ["CANCELLED", "CANCELLED", "FAILED"]
    until(lambda: states() == wanted, WAIT_S, "what ran has failed, what waited is cancelled")


def test_calls_without_task_events_are_not_kept(cluster: Any) -> None:
    @stoker.remote(num_cpus=0, enable_task_events=False)
    def quiet() -> None:
        return None

    @stoker.remote
    class Quiet:
        @stoker.method(enable_task_events=False)
        def call(self) -> None:
            return None

        def kept(self) -> None:
            return None

    quietly = Quiet.remote()
    first, second, last = quiet.remote(), quietly.call.remote(), quietly.kept.remote()
    stoker.get([first, second, last], timeout=WAIT_S)
    assert len(attempts(cluster, last)) == 1
    found = stoker.runtime.current.runtime()
    found.io.run(found.events.forward(), WAIT_S)
    for ref in (first, second):
        with pytest.raises(exceptions.NotFoundError):
            cluster.call("GET", f"/v1/tasks/{ref.task_id}")
