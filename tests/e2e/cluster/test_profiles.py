"""Stacks and profiles of processes that run, in every way that there is to take them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import stoker
from stoker.jobs import JobSubmissionClient
from stoker.runtime.current import runtime
from stoker.runtime.net.http import Content, HttpClient
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    StokerError,
)
from stoker_wire.messages.node_api import Stacks, StackWay
from tests.e2e._cluster import WAIT_S, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

SPIN_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_STACK_TIMEOUT_S", "30")  # this machine may be busy
        with embedded(tmp_path_factory.mktemp("profiles"), num_cpus=4, num_gpus=0):
            yield


def http() -> HttpClient:
    client: HttpClient = runtime().job.http
    return client


@stoker.remote(max_retries=0)
def slumber_until(path: str) -> str:
    def lies_in_this_function() -> None:
        while not Path(path).exists():
            time.sleep(0.02)

    lies_in_this_function()
    return "woken"


@stoker.remote(max_retries=0)
def spin_until(path: str) -> int:
    def turns_in_this_function() -> int:
        total = 0
        while not Path(path).exists():
            total += sum(range(2000))
        return total

    return turns_in_this_function()


@stoker.remote
class Sleeper:
    async def wait_in_this_coroutine(self, path: str) -> str:
        import asyncio

        while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)
        return "woken"


def running_task(ref: Any) -> dict[str, Any]:
    """The record of the task that makes a ref, once the history knows that it runs."""
    task_id = ref.task_id

    def runs() -> dict[str, Any] | None:
        try:
            found = http().call("GET", f"/v1/tasks/{task_id}", reply=dict[str, Any])
        except NotFoundError:
            return None
        return found if found["state"] == "RUNNING" else None

    found = until(runs, WAIT_S, f"{task_id} runs")
    assert found is not None
    return found


def stacks_of(target: str) -> Stacks:
    return http().call("GET", "/v1/stacks", reply=Stacks, query={"target": target})


def functions_of(stacks: Stacks) -> list[str]:
    return [
        frame.function
        for process in stacks.processes
        for thread in (*process.threads, *process.coroutines)
        for frame in thread.frames
    ]


def profile(target: str, **options: Any) -> Content:
    body = msgspec.json.encode({"target": target, "seconds": 1.0, **options})
    return http().call(
        "POST", "/v1/profiles", msgspec.json.decode(body), reply=Content, timeout_s=120.0
    )


def test_a_task_is_found_in_the_function_where_it_is(tmp_path: Path) -> None:
    end = tmp_path / "end"
    ref = slumber_until.remote(str(end))
    try:
        record = running_task(ref)
        found = stacks_of(record["task_id"])
        assert [one.worker_id for one in found.processes] == [record["worker_id"]]
        assert found.processes[0].way is StackWay.PY_SPY, found.processes[0].why_not_better
        assert any("lies_in_this_function" in name for name in functions_of(found))
        assert found.processes[0].task_ids == (record["task_id"],)
    finally:
        end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "woken"


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A task that computes as long as the test runs, and ends well."""
    end = tmp_path / "end"
    ref = spin_until.remote(str(end))
    try:
        yield running_task(ref)
    finally:
        end.touch()
    assert stoker.get(ref, timeout=WAIT_S) > 0


@pytest.fixture
def sleeping_actor(tmp_path: Path) -> Iterator[str]:
    """The id of an actor one call of which waits in a coroutine as long as the test runs."""
    end = tmp_path / "end"
    actor = Sleeper.remote()
    ref = actor.wait_in_this_coroutine.remote(str(end))
    yield running_task(ref)["actor_id"]
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "woken"


def test_a_worker_and_the_beginning_of_its_id_lead_to_the_same_process(
    spinning: dict[str, Any],
) -> None:
    whole = stacks_of(spinning["worker_id"])
    begun = stacks_of(spinning["worker_id"][:-2])
    assert whole.target == begun.target == spinning["worker_id"]
    assert whole.processes[0].pid == begun.processes[0].pid
    assert any("turns_in_this_function" in name for name in functions_of(whole))


def test_the_coroutine_in_which_an_actor_waits_is_told(sleeping_actor: str) -> None:
    found = stacks_of(sleeping_actor)
    names = [frame.function for one in found.processes[0].coroutines for frame in one.frames]
    assert any("wait_in_this_coroutine" in name for name in names), found


def test_a_job_and_a_node_have_the_stacks_of_their_workers(spinning: dict[str, Any]) -> None:
    for target in (spinning["job_id"], spinning["node_id"]):
        found = stacks_of(target)
        assert spinning["worker_id"] in [one.worker_id for one in found.processes]
        assert any("turns_in_this_function" in name for name in functions_of(found))
    assert "its driver was started by hand" in stacks_of(spinning["job_id"]).note


def test_what_does_not_run_is_refused_with_what_it_does(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="t_0000000000000000"):
        stacks_of("t_0000000000000000")
    with pytest.raises(NotFoundError, match="there is no worker 'w_0000'"):
        stacks_of("w_0000")
    with pytest.raises(BadRequestError, match="has no process"):
        stacks_of("pg_0000")
    end = tmp_path / "end"
    ref = slumber_until.remote(str(end))
    record = running_task(ref)
    waiting = slumber_until.options(num_cpus=64).remote(str(end))
    waits = waiting.task_id
    until(lambda: known(waits), WAIT_S, "the history knows the task that waits")
    with pytest.raises(ConflictError, match=f"does not run yet.\nsee: stoker explain {waits}"):
        stacks_of(waits)
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "woken"
    until(lambda: known(record["task_id"]) == "FINISHED", WAIT_S, "the history knows its end")
    with pytest.raises(ConflictError, match="is FINISHED and runs no more"):
        stacks_of(record["task_id"])
    stoker.cancel(waiting)


def known(task_id: str) -> str:
    """The state of a task in the history; empty if it is not there."""
    try:
        record = http().call("GET", f"/v1/tasks/{task_id}", reply=dict[str, Any])
    except NotFoundError:
        return ""
    return str(record["state"])


def test_a_profile_for_speedscope_has_the_function_in_which_the_time_goes(
    spinning: dict[str, Any],
) -> None:
    content = profile(spinning["task_id"], format="speedscope")
    assert content.media_type == "application/json"
    document = msgspec.json.decode(content.data)
    assert "speedscope" in document["$schema"]
    names = [frame["name"] for frame in document["shared"]["frames"]]
    assert any("turns_in_this_function" in name for name in names)


@pytest.mark.parametrize(
    ("format_", "media_type", "begins"),
    [
        ("svg", "image/svg+xml", b"<?xml"),
        ("raw", "text/plain", b""),
        ("trace", "application/json", b"["),
    ],
)
def test_a_profile_comes_in_the_format_that_was_asked_for(
    spinning: dict[str, Any], format_: str, media_type: str, begins: bytes
) -> None:
    content = profile(spinning["worker_id"], format=format_, rate=50)
    assert content.media_type == media_type
    assert content.data.startswith(begins)
    assert b"turns_in_this_function" in content.data


def test_a_second_profile_of_a_process_is_refused_and_names_the_first(
    spinning: dict[str, Any],
) -> None:
    first: list[Content] = []
    thread = threading.Thread(
        target=lambda: first.append(profile(spinning["worker_id"], seconds=6.0, format="raw"))
    )
    thread.start()
    try:
        # Its stacks are to be had all the same, by the worker itself.
        stacks = until(lambda: by_worker(spinning["worker_id"]), WAIT_S, "the first is being taken")
        assert stacks is not None
        refused = refusal(spinning["worker_id"])
        assert isinstance(refused, ConflictError)
        assert f"a cpu profile of {spinning['worker_id']} is being taken" in refused.message
        assert "a profile of this process" in stacks.processes[0].why_not_better
        assert any("turns_in_this_function" in name for name in functions_of(stacks))
    finally:
        thread.join(WAIT_S)
    assert b"turns_in_this_function" in first[0].data


def by_worker(worker_id: str) -> Stacks | None:
    """The stacks of a worker, if it told them itself."""
    stacks = stacks_of(worker_id)
    return stacks if stacks.processes[0].way is StackWay.WORKER else None


def refusal(worker_id: str) -> StokerError | None:
    """The error with which another profile of a worker is refused; None if it was taken."""
    try:
        profile(worker_id, seconds=0.1, format="raw")
    except StokerError as error:
        return error
    return None


def test_a_caller_that_leaves_ends_the_profile(spinning: dict[str, Any]) -> None:
    body = {"target": spinning["worker_id"], "seconds": 250.0}
    with pytest.raises(StokerError):
        http().call("POST", "/v1/profiles", body, reply=Content, timeout_s=2.0)
    until(lambda: refusal(spinning["worker_id"]) is None, WAIT_S, "another is taken")


def test_bounds_and_formats_are_checked(spinning: dict[str, Any]) -> None:
    target = spinning["worker_id"]
    for options, says in (
        ({"seconds": 301.0}, "seconds"),
        ({"rate": 5000}, "rate"),
        ({"format": "html"}, "a cpu profile has no html.\ntake svg or speedscope or raw or trace"),
        ({"kind": "memory", "format": "svg"}, "a memory profile has no svg.\ntake html"),
    ):
        with pytest.raises(BadRequestError) as caught:
            profile(target, **options)
        assert says in str(caught.value)
    with pytest.raises(BadRequestError, match="has many processes"):
        profile(spinning["node_id"])
    with pytest.raises(ConflictError, match="its driver was started by hand"):
        profile(spinning["job_id"])


def test_the_driver_of_a_submitted_job_has_stacks_and_profiles(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys\n"
        "def drives_in_this_function():\n"
        "    while not pathlib.Path(sys.argv[1]).exists():\n"
        "        sum(range(1000))\n"
        "drives_in_this_function()\n"
    )
    end = tmp_path / "end"
    client = JobSubmissionClient(runtime().job.http.base_url, token=token())
    # A shell is its first process.
    job_id = client.submit_job(entrypoint=f"true && {sys.executable} {program} {end}; true")
    try:

        def driver() -> Stacks | None:
            try:
                found = stacks_of(job_id)
            except ConflictError:  # it has not started
                return None
            return found if "drives_in_this_function" in functions_of(found) else None

        found = until(driver, WAIT_S, "the driver is in its function")
        assert found is not None
        assert found.processes[0].task_ids is None
        profiled = profile(job_id, format="raw")
        assert b"drives_in_this_function" in profiled.data
        with pytest.raises(BadRequestError, match="a driver takes no memory profile of itself"):
            profile(job_id, kind="memory")
    finally:
        end.touch()
    until(lambda: client.get_job_status(job_id) == "SUCCEEDED", WAIT_S, f"{job_id} succeeds")


@stoker.remote(max_retries=0)
def allocate_until(path: str) -> int:
    def allocates_in_this_function() -> int:
        kept: list[bytearray] = []
        while not Path(path).exists():
            kept.append(bytearray(50_000))
            kept = kept[-100:]
            time.sleep(0.001)
        return len(kept)

    return allocates_in_this_function()


def test_a_memory_profile_has_where_it_was_allocated(tmp_path: Path) -> None:
    pytest.importorskip("memray")
    end = tmp_path / "end"
    ref = allocate_until.remote(str(end))
    record = running_task(ref)
    content = profile(record["task_id"], kind="memory")
    assert content.media_type == "text/html"
    assert b"allocates_in_this_function" in content.data
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) > 0


@stoker.remote(max_retries=0)
def multiply_until(path: str, *, own_profiler: str = "") -> str:
    import torch

    matrix = torch.randn(512, 512)  # small ones are so many that their profile is too large
    came = "no profiler"
    while not Path(path).exists():
        matrix = (matrix @ matrix).tanh()
        if own_profiler and Path(own_profiler).exists():
            from torch.profiler import profile

            with profile() as own:
                matrix = (matrix @ matrix).tanh()
            came = "aten::tanh" if "aten::tanh" in str(own.key_averages()) else "nothing"
    return came


def test_a_torch_profile_has_the_operators_of_the_task(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    end = tmp_path / "end"
    ref = multiply_until.remote(str(end))
    record = running_task(ref)
    content = profile(record["task_id"], kind="torch", seconds=2.0)
    assert content.media_type == "application/json"
    events = msgspec.json.decode(content.data)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::matmul", "aten::tanh"} <= names
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "no profiler"


def test_a_program_that_starts_its_own_torch_profiler_gets_it(tmp_path: Path) -> None:
    """torch ends a process in which two of them meet."""
    pytest.importorskip("torch")
    end, own = tmp_path / "end", tmp_path / "own"
    ref = multiply_until.remote(str(end), own_profiler=str(own))
    record = running_task(ref)
    caught: list[StokerError] = []

    def take() -> None:
        while not caught or "a cpu profile of" in caught[-1].message:  # that of who looks below
            try:
                profile(record["task_id"], kind="torch", seconds=100.0)
            except StokerError as error:
                caught.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    refused = until(lambda: refusal(record["worker_id"]), WAIT_S, "ours is being taken")
    assert "a torch profile of" in str(refused)
    own.touch()
    thread.join(WAIT_S)
    assert "the program has a torch.profiler of its own" in caught[-1].message
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "aten::tanh"


def test_a_torch_profile_of_a_program_without_torch_says_so(tmp_path: Path) -> None:
    end = tmp_path / "end"
    fresh = {"env_vars": {"NO": "worker that another test has used"}}
    ref = slumber_until.options(runtime_env=fresh).remote(str(end))
    with pytest.raises(ConflictError, match="has not imported torch"):
        profile(running_task(ref)["task_id"], kind="torch")
    end.touch()
    assert stoker.get(ref, timeout=WAIT_S) == "woken"


def test_the_command_line_writes_the_format_that_the_suffix_says(
    spinning: dict[str, Any], tmp_path: Path
) -> None:
    job = runtime().job
    environ = {**os.environ, "STOKER_ADDRESS": job.http.base_url, "STOKER_TOKEN": token()}
    for name, begins in (("flame.svg", b"<?xml"), ("x.speedscope.json", b"{")):
        path = tmp_path / name
        command = ["profile", spinning["task_id"], "--seconds", "1", "-o", str(path)]
        done = subprocess.run(
            [sys.executable, "-m", "stoker.cli", *command],
            env=environ, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"wrote {path}" in done.stdout
        assert path.read_bytes().startswith(begins)


def token() -> str:
    return runtime().identity.token
