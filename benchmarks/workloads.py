"""One set of workloads for every backend: what users of Ray and Dask do, timed from the driver.

Run by ``benchmarks.__main__`` in the backend's own interpreter:
``python workloads.py BACKEND SECONDS [CASE ...]``; prints one JSON line per case. ``BACKEND`` is
``stoker``, ``ray`` (both through the Ray-shaped API), ``dask``, or a pool of processes on this machine:
``multiprocessing``, ``concurrent.futures`` or ``loky``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def say(case: str, value: float, unit: str) -> None:
    """Print one result."""
    print(json.dumps({"case": case, "value": round(value, 4), "unit": unit}), flush=True)


def processes() -> dict[int, float]:
    """Return the proportional set size in MB of every process that this user can see."""
    found: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "smaps_rollup").read_text()
            except OSError:
                continue
            sizes = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")]
            found[int(folder.name)] = sum(sizes) / 1024
    return found


class Timer:
    """Runs a case again and again for some seconds and prints how much it did per second."""

    def __init__(self, seconds: float, only: list[str]) -> None:
        self._seconds = seconds
        self._only = only

    def rate(self, case: str, run: Callable[[], Any], per_run: float = 1, unit: str = "/s") -> None:
        """Time one case (after one run to warm up)."""
        if self._only and not any(name in case for name in self._only):
            return
        try:
            run()
            began = now = time.perf_counter()
            done = 0.0
            while now - began < self._seconds:
                run()
                done += per_run
                now = time.perf_counter()
            say(case, done / (now - began), unit)
        except Exception as error:  # a case that a backend cannot do is shown, not hidden
            print(
                json.dumps({"case": case, "error": f"{type(error).__name__}: {error}"[:200]}),
                flush=True,
            )


def ray_shaped(backend: str, timer: Timer) -> None:
    """Time a backend with Ray's API."""
    before = set(processes())
    began = time.perf_counter()
    api: Any = importlib.import_module(backend)
    say("import", time.perf_counter() - began, "s")
    ray = backend == "ray"
    quiet = {"include_dashboard": False, "log_to_driver": False} if ray else {}
    began = time.perf_counter()
    api.init(num_cpus=2, **quiet)
    say("init", time.perf_counter() - began, "s")

    @api.remote
    def noop() -> bytes:
        return b"ok"

    @api.remote
    def length(x: Any) -> int:
        return len(x)

    @api.remote
    def same(x: Any) -> Any:
        return x

    @api.remote
    def count(*xs: Any) -> int:
        return len(xs)

    @api.remote
    def nested(n: int) -> int:
        return len(api.get([noop.remote() for _ in range(n)]))

    @api.remote
    class Actor:
        def call(self) -> bytes:
            return b"ok"

    @api.remote
    class AsyncActor:
        async def call(self) -> bytes:
            return b"ok"

    api.get(noop.remote())
    say("first_result", time.perf_counter() - began, "s")
    new = {pid: size for pid, size in processes().items() if pid not in before}
    say("idle_cluster_pss", sum(new.values()) + processes()[os.getpid()], "MB")
    say("idle_cluster_processes", len(new) + 1, "")

    timer.rate("tasks_sync", lambda: api.get(noop.remote()))
    timer.rate("tasks_async_1k", lambda: api.get([noop.remote() for _ in range(1000)]), 1000)
    timer.rate("tasks_async_10k", lambda: api.get([noop.remote() for _ in range(10000)]), 10000)
    timer.rate("nested_tasks_100", lambda: api.get(nested.remote(100)), 100)
    for name, cls in (("actor", Actor), ("async_actor", AsyncActor)):
        actor = cls.options(num_cpus=0).remote()
        timer.rate(f"{name}_sync", lambda actor=actor: api.get(actor.call.remote()))
        timer.rate(
            f"{name}_async_1k",
            lambda actor=actor: api.get([actor.call.remote() for _ in range(1000)]),
            1000,
        )
    timer.rate("actor_create_call_kill_x4", lambda: actors(api, Actor), 4)
    timer.rate("put_small", lambda: api.put(1))
    small = api.put(1)
    timer.rate("get_small", lambda: api.get(small))
    big = random_bytes(100 << 20)
    timer.rate("put_100MB", lambda: api.put(big), 0.1048576, "GB/s")
    ref = api.put(big)
    timer.rate("get_100MB", lambda: api.get(ref), 0.1048576, "GB/s")
    timer.rate("task_reads_100MB_ref", lambda: api.get(length.remote(ref)))
    megabyte, ten = random_bytes(1 << 20), random_bytes(10 << 20)
    timer.rate(
        "tasks_1MB_inline_arg_x10",
        lambda: api.get([length.remote(megabyte) for _ in range(10)]),
        10,
    )
    timer.rate("task_returns_10MB", lambda: api.get(same.remote(ten)), 0.01048576, "GB/s")
    timer.rate(
        "wait_1k", lambda: api.wait([noop.remote() for _ in range(1000)], num_returns=1000), 1000
    )
    timer.rate("dependency_chain_100", lambda: api.get(chain(same)), 100)
    thousand = [api.put(i) for i in range(1000)]
    timer.rate("task_with_1k_ref_args", lambda: api.get(count.remote(*thousand)), 1000, " args/s")
    grouping = importlib.import_module(f"{backend}.util.placement_group") if ray else api
    for shape, bundles in GROUPS.items():
        timer.rate(f"placement_group_{shape}", lambda bundles=bundles: group(grouping, bundles))
    new = {pid: size for pid, size in processes().items() if pid not in before}
    say("end_cluster_pss", sum(new.values()) + processes()[os.getpid()], "MB")
    began = time.perf_counter()
    api.shutdown()
    say("shutdown", time.perf_counter() - began, "s")


def random_bytes(nbytes: int) -> Any:
    """Return a value whose bytes travel out of band: an array where numpy is there."""
    data = os.urandom(nbytes)
    try:
        import numpy
    except ImportError:
        return data
    return numpy.frombuffer(bytearray(data), numpy.uint8)


GROUPS: dict[str, list[dict[str, float]]] = {
    "tiny": [{"CPU": 0.01}],
    "of_10": [{"CPU": 0.01}] * 10,
    "whole_node": [{"CPU": 1}, {"CPU": 1}],
}
"""Shapes of placement groups; the last needs the room of the one before."""


def group(api: Any, bundles: list[dict[str, float]]) -> None:
    """Reserve places, and give them back."""
    made = api.placement_group(bundles)
    made.wait(30)
    api.remove_placement_group(made)


def actors(api: Any, cls: Any) -> None:
    """Create four actors, call each once, kill them."""
    made = [cls.options(num_cpus=0).remote() for _ in range(4)]
    api.get([a.call.remote() for a in made])
    for actor in made:
        api.kill(actor)


def chain(same: Any) -> Any:
    """Return the last of a hundred tasks that each take the one before."""
    ref = same.remote(b"x")
    for _ in range(100):
        ref = same.remote(ref)
    return ref


def dask(timer: Timer) -> None:
    """Time Dask distributed: two workers of one thread, as separate processes."""
    began = time.perf_counter()
    distributed = importlib.import_module("dask.distributed")
    say("import", time.perf_counter() - began, "s")
    began = time.perf_counter()
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    client = distributed.Client(cluster)

    def noop() -> bytes:
        return b"ok"

    class Actor:
        def call(self) -> bytes:
            return b"ok"

    def submit() -> Any:
        return client.submit(noop, pure=False)

    say("init", time.perf_counter() - began, "s")
    submit().result()
    say("first_result", time.perf_counter() - began, "s")
    timer.rate("tasks_sync", lambda: submit().result())
    timer.rate("tasks_async_1k", lambda: client.gather([submit() for _ in range(1000)]), 1000)
    timer.rate("tasks_async_10k", lambda: client.gather([submit() for _ in range(10000)]), 10000)
    actor = client.submit(Actor, actor=True).result()
    timer.rate("actor_sync", lambda: actor.call().result())
    timer.rate(
        "actor_async_1k",
        lambda: [f.result() for f in [actor.call() for _ in range(1000)]],
        1000,
    )
    timer.rate("put_small", lambda: client.scatter(1, hash=False))
    big, megabyte = random_bytes(100 << 20), random_bytes(1 << 20)
    timer.rate("put_100MB", lambda: client.scatter(big, hash=False), 0.1048576, "GB/s")
    there = client.scatter(big, hash=False)
    timer.rate("get_100MB", lambda: client.gather(there), 0.1048576, "GB/s")
    timer.rate("task_reads_100MB_ref", lambda: client.submit(len, there, pure=False).result())
    timer.rate(
        "tasks_1MB_inline_arg_x10",
        lambda: client.gather([client.submit(len, megabyte, pure=False) for _ in range(10)]),
        10,
    )
    timer.rate("wait_1k", lambda: distributed.wait([submit() for _ in range(1000)]), 1000)
    timer.rate("dependency_chain_100", lambda: dask_chain(client).result(), 100)
    began = time.perf_counter()
    client.close()
    cluster.close()
    say("shutdown", time.perf_counter() - began, "s")


def dask_chain(client: Any) -> Any:
    """Return the last of a hundred futures that each take the one before."""
    future = client.submit(len, b"x", pure=False)
    for _ in range(100):
        future = client.submit(lambda x: x, future, pure=False)
    return future


def pool_noop() -> bytes:
    """Do nothing, in a process of a pool."""
    return b"ok"


def pool_same(value: Any) -> Any:
    """Return the argument, from a process of a pool."""
    return value


def pool(backend: str, timer: Timer) -> None:
    """Time two processes that only call functions: no scheduler, no actors, no history.

    A call to an actor is compared with a call to such a process.
    """
    began = time.perf_counter()
    module = importlib.import_module(backend)
    say("import", time.perf_counter() - began, "s")
    began = time.perf_counter()
    close: Callable[[], Any]
    call: Callable[..., Any]
    submit: Callable[..., Any]
    gather: Callable[[list[Any]], Any]
    if backend == "multiprocessing":
        made = module.Pool(2)
        call, close = (lambda f, *args: made.apply(f, args)), made.terminate
        submit = lambda f, *args: made.apply_async(f, args)  # noqa: E731
        gather = lambda results: [result.get() for result in results]  # noqa: E731
    else:
        made = (
            module.get_reusable_executor(max_workers=2)
            if backend == "loky"
            else importlib.import_module("concurrent.futures").ProcessPoolExecutor(2)
        )
        call, close = (lambda f, *args: made.submit(f, *args).result()), made.shutdown
        submit = made.submit
        gather = lambda futures: [future.result() for future in futures]  # noqa: E731
    call(pool_noop)
    say("first_result", time.perf_counter() - began, "s")
    for case in ("tasks_sync", "actor_sync", "async_actor_sync"):
        timer.rate(case, lambda: call(pool_noop))
    for case in ("tasks_async_1k", "actor_async_1k", "async_actor_async_1k"):
        timer.rate(case, lambda: gather([submit(pool_noop) for _ in range(1000)]), 1000)
    timer.rate("tasks_async_10k", lambda: gather([submit(pool_noop) for _ in range(10000)]), 10000)
    megabyte, ten = random_bytes(1 << 20), random_bytes(10 << 20)
    timer.rate(
        "tasks_1MB_inline_arg_x10",
        lambda: gather([submit(len, megabyte) for _ in range(10)]),
        10,
    )
    timer.rate("task_returns_10MB", lambda: call(pool_same, ten), 0.01048576, "GB/s")
    began = time.perf_counter()
    close()
    say("shutdown", time.perf_counter() - began, "s")


def main() -> None:
    """Time one backend."""
    backend, timer = sys.argv[1], Timer(float(sys.argv[2]), sys.argv[3:])
    if backend == "dask":
        dask(timer)
    elif backend in ("multiprocessing", "concurrent.futures", "loky"):
        pool(backend, timer)
    else:
        ray_shaped(backend, timer)


if __name__ == "__main__":
    main()
