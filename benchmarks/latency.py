"""``python -m benchmarks.latency``: how long one call takes, alone and while others flood the node.

One node of two CPUs. A driver of its own, or another thread of this one, floods it with empty tasks
meanwhile; each case prints the median, the 99th percentile and the worst of single calls. At the
end a hundred actors are made, and the files and threads of each process are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

import stoker
from benchmarks.results import Row, append, show
from stoker.launch import LocalCluster, spawn_local

FLOOD = 100_000
WAIT_S = 120.0
_FLOOD_PROGRAM = """
import stoker
stoker.init(log_to_driver=False)
@stoker.remote
def noop():
    return b"ok"
stoker.get(noop.remote())
while True:
    refs = [noop.remote() for _ in range({flood})]
    print("flooding", flush=True)
    stoker.get(refs)
    print("done", flush=True)
    del refs
"""


@stoker.remote
def noop() -> bytes:
    """Do nothing."""
    return b"ok"


@stoker.remote
def other() -> bytes:
    """Do nothing, as another function."""
    return b"ok"


@stoker.remote(num_cpus=0)
class Actor:
    """Does nothing."""

    def call(self) -> bytes:
        """Do nothing."""
        return b"ok"


def percentile(sorted_values: list[float], part: float) -> float:
    """Return the value below which ``part`` of all lie."""
    return sorted_values[min(len(sorted_values) - 1, int(part * len(sorted_values)))]


def timed(case: str, call: Callable[[], Any], count: int, pause_s: float = 0.0) -> list[Row]:
    """Return the latency of single calls, made one after another."""
    took: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e3)
        if pause_s:
            time.sleep(pause_s)
    took.sort()
    return [
        Row(f"{case}_p50", percentile(took, 0.5), "ms"),
        Row(f"{case}_p99", percentile(took, 0.99), "ms"),
        Row(f"{case}_max", took[-1], "ms"),
    ]


@contextlib.contextmanager
def another_driver_floods(cluster: LocalCluster) -> Iterator[None]:
    """Another process keeps a hundred thousand tasks queued."""
    env = {
        **os.environ,
        "STOKER_ADDRESS": cluster.info.gcs_url,
        "STOKER_TOKEN": cluster.info.token,
    }
    program = _FLOOD_PROGRAM.format(flood=FLOOD)
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the flood could not begin"
        yield
    finally:
        process.kill()
        process.communicate()
        _wait_for_its_places()


def _wait_for_its_places() -> None:
    """Wait until the killed driver's leases are gone: it has three seconds to come back."""
    deadline_s = time.monotonic() + WAIT_S
    while stoker.available_resources()["CPU"] < stoker.cluster_resources()["CPU"]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the killed driver's leases were there for {WAIT_S:g} s")
        time.sleep(0.1)


@contextlib.contextmanager
def another_thread_floods() -> Iterator[None]:
    """Another thread of this driver keeps a hundred thousand tasks queued."""
    begun, over = threading.Event(), threading.Event()

    def flood() -> None:
        while not over.is_set():
            refs = [noop.remote() for _ in range(FLOOD)]
            begun.set()
            stoker.get(refs)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert begun.wait(WAIT_S)
        yield
    finally:
        over.set()
        thread.join()


def calls(prefix: str, actor: Any, count: int) -> list[Row]:
    """Time single calls of a task and of an actor."""
    return [
        *timed(f"{prefix}_task", lambda: stoker.get(other.remote(), timeout=WAIT_S), count),
        *timed(f"{prefix}_actor", lambda: stoker.get(actor.call.remote(), timeout=WAIT_S), count),
    ]


def first_calls(prefix: str, count: int) -> list[Row]:
    """Time calls that must get a worker first: the lease of the one before is given back."""

    def call() -> None:
        stoker.get(other.remote(), timeout=WAIT_S)

    return timed(f"{prefix}_first_task", call, count, pause_s=1.0)


def handles(cluster: LocalCluster, actors: int) -> list[Row]:
    """Count files and threads of each kind of process while so many actors live."""
    made = [Actor.remote() for _ in range(actors)]
    stoker.get([a.call.remote() for a in made], timeout=WAIT_S)
    head = psutil.Process(cluster.info.pid)
    workers = [p for p in head.children(recursive=True) if not p.children() and p.num_threads() > 1]
    rows = []
    for name, group in (("driver", [psutil.Process()]), ("head", [head]), ("worker", workers)):
        rows.append(Row(f"fds_{name}_{actors}_actors", max(p.num_fds() for p in group), ""))
        rows.append(Row(f"threads_{name}_{actors}_actors", max(p.num_threads() for p in group), ""))
    for actor in made:
        stoker.kill(actor)
    return rows


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="calls per case (default 1000)")
    parser.add_argument("--actors", type=int, default=100, help="for the count of files")
    parser.add_argument("--csv", default="", help="append results to this file")
    options = parser.parse_args()
    cluster = spawn_local(embedded=False, num_cpus=2, num_gpus=0)
    rows: list[Row] = []
    try:
        cluster.wait_ready()
        stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
        actor = Actor.remote()
        stoker.get([noop.remote(), other.remote(), actor.call.remote()], timeout=WAIT_S)
        rows += calls("quiet", actor, options.calls)
        rows += first_calls("quiet", max(3, options.calls // 100))
        with another_driver_floods(cluster):
            rows += first_calls("other_driver_floods", max(3, options.calls // 100))
            rows += calls("other_driver_floods", actor, options.calls)
        with another_thread_floods():
            rows += calls("other_thread_floods", actor, options.calls)
        rows += handles(cluster, options.actors)
        stoker.shutdown()
    finally:
        cluster.stop()
    show(rows)
    if options.csv:
        append(options.csv, "stoker", stoker.__version__, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
