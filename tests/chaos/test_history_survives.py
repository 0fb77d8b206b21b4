"""Nothing that an owner saw end is missing in SQL, whichever process is killed when."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
import stoker.train
from stoker import exceptions
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

GET_S = 40.0
ENDS = ("FINISHED", "FAILED", "CANCELLED")


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Apart]:
    with session_root(tmp_path / "s"), apart(tmp_path) as made:
        stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
        try:
            yield made
        finally:
            stoker.shutdown()


def get(refs: Any) -> Any:
    return stoker.get(refs, timeout=GET_S)


@stoker.remote
def pid_of(number: int, for_s: float = 0.0) -> int:
    time.sleep(for_s)
    return os.getpid()


@stoker.remote
class Holder:
    def pid(self) -> int:
        return os.getpid()


def until_told(cluster: Apart, ended: set[str]) -> None:
    """Wait until SQL has an end for each task, and nothing open."""

    def missing() -> dict[str, str]:
        path = f"file:{cluster.folder}/gcs.sqlite3?mode=ro"
        with closing(sqlite3.connect(path, uri=True)) as database:
            rows = database.execute("SELECT task_id, state FROM tasks ORDER BY attempt").fetchall()
        last = {**dict.fromkeys(ended, "unknown"), **dict(rows)}
        return {task_id: state for task_id, state in last.items() if state not in ENDS}

    try:
        until(lambda: not missing(), 60.0, f"{len(ended)} ends are in SQL", interval_s=0.05)
    except TimeoutError as error:
        raise AssertionError(f"{error}, but {missing()}") from None
    status = cluster.client.call("POST", "/v1/tasks/report", {"records": []}, reply=dict[str, Any])
    assert status["dropped"] == 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_workers_killed_right_after_their_results_take_no_record_with_them(joined: Apart) -> None:
    dice = random.Random(7)
    ended = set()
    for round_ in range(100):
        refs = [pid_of.remote(i) for i in range(dice.choice((1, 1, 3)))]
        # Not all may be awaited: the others are killed while they run or before, and tried again.
        kill(get(refs[0]))
        ended.update(ref.task_id for ref in refs)
        if round_ % 10 == 9:
            get(refs)
    get(refs)
    until_told(joined, ended)


def test_actors_killed_right_after_their_results_take_no_record_with_them(joined: Apart) -> None:
    ended = set()
    for round_ in range(20):
        holder = Holder.options(num_cpus=0).remote()
        refs = [holder.pid.remote() for _ in range(5)]
        pid = get(refs)[0]
        if round_ % 2:
            stoker.kill(holder)
        else:
            kill(pid)
        refs.append(holder.pid.remote())
        with pytest.raises((exceptions.ActorDiedError, exceptions.ActorUnavailableError)):
            get(refs[-1])
        ended.update(ref.task_id for ref in refs)
    until_told(joined, ended)


def test_history_outlives_an_absent_gcs_and_a_killed_nodelet(joined: Apart) -> None:
    refs = [pid_of.remote(i) for i in range(300)]
    get(refs)
    pids: set[int] = set()

    def both_ran() -> bool:
        refs.extend(pid_of.remote(i, 0.3) for i in range(2))
        pids.update(get(refs[-2:]))
        return len(pids) >= 2

    # A worker that never ran it would ask the gcs for the function.
    until(both_ran, 60.0, "both workers ran a task")
    joined.gcs.kill()
    later = [pid_of.remote(i) for i in range(300)]
    get(later)
    joined.nodelets[0].kill()
    joined.gcs.start()
    joined.nodelets[0].start()
    last = [pid_of.remote(i) for i in range(100)]
    get(last)
    until_told(joined, {ref.task_id for ref in (*refs, *later, *last)})


def test_history_of_a_node_that_never_comes_back_is_forwarded_by_another_on_its_machine(
    joined: Apart,
) -> None:
    refs = [pid_of.remote(i) for i in range(300)]
    get(refs)
    joined.gcs.kill()
    later = [pid_of.remote(i) for i in range(300)]
    get(later)
    joined.nodelets[0].kill()
    joined.gcs.start()
    joined.add_nodelet()  # a node of its own, in a session of its own
    last = [pid_of.remote(i) for i in range(10)]
    get(last)
    until_told(joined, {ref.task_id for ref in (*refs, *later, *last)})


@stoker.remote
def train(reported: str, goes_on: str) -> int:
    for step in range(100):
        stoker.train.report(step, loss=float(step))
    Path(reported).touch()
    until(Path(goes_on).exists, GET_S, "the gcs is away", interval_s=0.01)
    for step in range(100, 200):
        stoker.train.report(step, loss=float(step))
    return os.getpid()


def test_what_training_reports_outlives_its_worker_and_a_gcs_that_is_away(
    joined: Apart, tmp_path: Path
) -> None:
    job_id = stoker.get_runtime_context().job_id
    reported, goes_on = tmp_path / "reported", tmp_path / "goes-on"
    ref = train.remote(str(reported), str(goes_on))
    until(reported.exists, GET_S, "half of it is reported")
    joined.gcs.kill()
    goes_on.touch()
    os.kill(get(ref), signal.SIGKILL)
    joined.gcs.start()

    def curve() -> dict[str, Any] | None:
        path = f"/v1/training-runs/{job_id}/default"
        try:
            found = joined.client.call("GET", path, reply=dict[str, Any])
        except exceptions.NotFoundError:
            return None
        return found if found["run"]["newest_step"] == 199 else None

    found = until(curve, 60.0, "all that was reported is in SQL")
    assert found["metrics"]["loss"]["mean"] == [float(step) for step in range(200)]
