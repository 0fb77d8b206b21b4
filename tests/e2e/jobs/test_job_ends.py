"""What a job leaves when its driver is killed or fails: nothing but its detached actors."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e._cluster import driver, head, http, line_of, run_driver
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

END_S = 40.0
PYTHON = sys.executable
GONE_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("j"), num_cpus=2) as made:
        yield made


BUSY = """
    import os, sys, time
    import stoker

    stoker.init(log_to_driver=False)

    @stoker.remote
    class Holder:
        def __init__(self):
            self.data = stoker.put(b"x" * 3_000_000)
        def pid(self):
            return os.getpid()

    @stoker.remote
    def spin():
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        print("spinning", flush=True)
        time.sleep(99)

    holder = Holder.remote()
    detached = Holder.options(name="stays", lifetime="detached", namespace="n").remote()
    mine = stoker.put(b"y" * 2_000_000)
    refs = [spin.remote() for _ in range(3)]
    pids = stoker.get([holder.pid.remote(), detached.pid.remote()])
    while len(stoker.available_resources()) and stoker.available_resources().get("CPU", 0) > 0:
        time.sleep(0.02)
    print("JOB", stoker.get_runtime_context().job_id, *pids, flush=True)
    time.sleep(99)
"""


def test_a_killed_driver_takes_all_that_its_job_had_along(
    cluster: LocalCluster, record_property: Any
) -> None:
    """Workers, their children, actors, objects and leases; only the detached actor stays."""
    api = http(cluster)
    workers_before = _leases(api)
    arena_before = _arena(cluster)
    with driver(cluster, BUSY) as process:
        job_id, holder_pid, detached_pid = line_of(process, "JOB ").split()
        before = [p.pid for p in psutil.Process(cluster.pid).children(recursive=True)]
        assert len(_arena(cluster) - arena_before) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        job = until(lambda: _ended(api, job_id), GONE_S, "the job has ended")
        assert job["state"] == "FAILED"
        assert "driver died" in job["message"]

        def left() -> list[Any]:
            pids = [int(holder_pid)] if alive(int(holder_pid)) else []
            return [*pids, *(_leases(api) - workers_before), *(_sleepers(before))]

        detached = api.call("GET", "/v1/named-actors/n/stays", reply=dict[str, Any])
        keep = {detached["lease_id"]}
        until(lambda: not [x for x in left() if x not in keep], GONE_S, "nothing of it is left")
        until(lambda: len(_arena(cluster) - arena_before) <= 1, GONE_S, "its objects are gone")
        took_s = time.monotonic() - began
        sys.stdout.write(f"clean-up after a killed driver: {took_s:.1f} s\n")
        record_property("cleanup_s", took_s)
        assert alive(int(detached_pid))
    found = run_driver(
        cluster,
        """
        import stoker
        stoker.init(namespace="n", log_to_driver=False)
        actor = stoker.get_actor("stays")
        print("pid", stoker.get(actor.pid.remote(), timeout=40))
        stoker.kill(actor)
        """,
    )
    assert f"pid {detached_pid}" in found.stdout, found.stderr
    until(lambda: not alive(int(detached_pid)), 40, "the detached actor is gone")
    until(lambda: _arena(cluster) <= arena_before, GONE_S, "and its objects")


def _ended(api: Any, job_id: str) -> Any:
    job = api.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
    return job if job["state"] not in ("RUNNING", "PENDING") else None


def _leases(api: Any) -> set[str]:
    page = api.call("GET", "/v1/leases", reply=dict[str, Any], query={"limit": 1000})
    return {lease["lease_id"] for lease in page["items"]}


def _arena(cluster: LocalCluster) -> set[str]:
    return {x for x in os.listdir(cluster.info.arena_dir) if x.startswith("o_")}


def _sleepers(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if "time.sleep(99)" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.Error:
            continue
    return found


def test_a_driver_that_fails_is_a_failed_job_with_its_error(cluster: LocalCluster) -> None:
    ended = run_driver(
        cluster,
        """
        import stoker
        info = stoker.init(log_to_driver=False)
        print("JOB", info.job_id, flush=True)
        raise ValueError("bad config")
        """,
    )
    assert ended.returncode == 1
    job_id = ended.stdout.split()[1]
    job = http(cluster).call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
    assert job["state"] == "FAILED"
    assert "bad config" in job["message"]


def test_a_detached_actor_starts_work_of_its_own_after_its_driver_left(
    cluster: LocalCluster,
) -> None:
    made = run_driver(
        cluster,
        """
        import stoker
        stoker.init(namespace="n", log_to_driver=False)

        @stoker.remote
        def double(x):
            return 2 * x

        @stoker.remote
        class Service:
            def __init__(self, work):
                self.work = work
            def run(self, x):
                return stoker.get(self.work.remote(x)), stoker.get_runtime_context().namespace

        service = Service.options(name="service", lifetime="detached").remote(double)
        print(stoker.get(service.run.remote(4)))
        """,
    )
    assert "(8, 'n')" in made.stdout, made.stderr
    used = run_driver(
        cluster,
        """
        import stoker
        stoker.init(namespace="n", log_to_driver=False)
        service = stoker.get_actor("service")
        print(stoker.get(service.run.remote(21), timeout=40))
        stoker.kill(service)
        """,
    )
    assert "(42, 'n')" in used.stdout, used.stderr


ENDS = {
    "pass": ("SUCCEEDED", 0, ""),
    "sys.exit()": ("SUCCEEDED", 0, ""),
    "sys.exit(3)": ("FAILED", 3, "exit code 3"),
    "raise SystemExit('no data')": ("FAILED", 1, "exit code 1"),
    "raise ValueError('the end')": ("FAILED", 1, "ValueError: the end"),
    "raise KeyboardInterrupt": ("FAILED", 1, "KeyboardInterrupt"),
    "os._exit(0)": ("FAILED", None, "driver died"),
}


def test_the_exit_code_of_a_driver_decides_how_its_job_ended(cluster: LocalCluster) -> None:
    client = http(cluster)
    jobs = {}
    for how in ENDS:
        program = f"import os, sys, stoker\nprint(stoker.init().job_id, flush=True)\n{how}"
        done = run_driver(cluster, program)
        jobs[how] = done.stdout.strip(), done.returncode
    for how, (job_id, code) in jobs.items():
        query = {"wait_s": "30"}
        job = client.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any], query=query)
        state, exit_code, message = ENDS[how]
        assert (job["state"], job["exit_code"]) == (state, exit_code), (how, code, job)
        assert message in job["message"], (how, job)


def test_a_driver_whose_job_was_ended_by_others_is_told_and_hangs_nowhere(
    cluster: LocalCluster,
) -> None:
    program = """
        import stoker
        print("JOB", stoker.init(log_to_driver=False).job_id, flush=True)

        @stoker.remote(num_cpus=1000, on_infeasible="wait")
        def never():
            pass

        for _ in range(2):  # before its end, and after
            try:
                stoker.get(never.remote(), timeout=60)
            except stoker.exceptions.JobFinishedError as error:
                print("TOLD", *str(error).splitlines(), flush=True)
        stoker.shutdown()
        print("OVER", flush=True)
    """
    with driver(cluster, program) as process:
        job_id = line_of(process, "JOB")
        http(cluster).call("POST", f"/v1/jobs/{job_id}/stop", reply=dict[str, Any])
        for _ in range(2):
            told = line_of(process, "TOLD")
            assert f"job {job_id} is over: it is STOPPED" in told and "stoker.init()" in told
        line_of(process, "OVER")
        assert process.wait(END_S) == 0
