"""``python -m benchmarks.gateway``: a driver outside of the cluster, by the gateway, beside Ray's client.

Each has a cluster of its own on this machine and a driver that reaches it as from outside: by our gateway,
by Ray's client server. In turn, A B A B, in one run. ``--ray PYTHON`` names an interpreter with
``ray[client]``. What a driver puts counts once an actor inside has read it: ours is sent then, Ray's at
the put.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import HERE, Row, append

ROUNDS = 3
DRIVER_S = 300
TOKEN = "the-token-of-a-benchmark-of-the-gateway"
DRIVER = """
import json, sys, time
import numpy as np

backend, address = sys.argv[1:]
if backend == "ray":
    import ray as api
    api.init(address)
else:
    import stoker as api
    api.init(address, log_to_driver=False)

@api.remote
def nothing(): return b"ok"

@api.remote
def ones(n): return np.ones(n, dtype=np.uint8)

@api.remote
class Actor:
    def nothing(self): return b"ok"
    def size(self, array): return array.nbytes

actor = Actor.remote()
api.get([actor.nothing.remote(), *(nothing.remote() for _ in range(4))])
found = {}

def rate(name, call, count, seconds=2.0):
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        call()
        calls += count
    found[name] = calls / (time.perf_counter() - began)

NBYTES = 100_000_000
rate("actor_sync", lambda: api.get(actor.nothing.remote()), 1)
rate("task_sync", lambda: api.get(nothing.remote()), 1)
rate("tasks_1k", lambda: api.get([nothing.remote() for _ in range(1000)]), 1000)
rate("actor_calls_1k", lambda: api.get([actor.nothing.remote() for _ in range(1000)]), 1000)
array = np.zeros(NBYTES, dtype=np.uint8)
rate("put_100MB", lambda: api.get(actor.size.remote(api.put(array))), NBYTES / 1e9)
rate("get_100MB", lambda: api.get(ones.remote(NBYTES)).nbytes, NBYTES / 1e9)
print(json.dumps(found))
api.shutdown()
"""
UNITS = {"put_100MB": "GB/s", "get_100MB": "GB/s"}


def driver(python: str, backend: str, address: str, folder: Path, env: dict[str, str]) -> Any:
    """Return the figures that a driver finds."""
    script = folder / "driver.py"
    script.write_text(DRIVER)
    done = subprocess.run(
        [python, str(script), backend, address],
        env={**env, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=DRIVER_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{backend} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def stoker_round(folder: Path) -> dict[str, float]:
    """Start a head with a gateway, and measure."""
    from stoker.launch import spawn_local
    from stoker_wire.http.server.request_guard import outward_address

    own = {"STOKER_TOKEN": TOKEN, "STOKER_SESSION_ROOT": str(folder)}
    cluster = spawn_local(
        environ=own, embedded=False, host=outward_address(), num_cpus=2, num_gpus=0, gateway_port=0
    )
    try:
        address = cluster.wait_ready().gateway_url
        found: dict[str, float] = driver(
            sys.executable, "stoker", address, folder, {**os.environ, **own}
        )
        return found
    finally:
        cluster.stop()


def ray_round(python: str, folder: Path) -> dict[str, float]:
    """Start Ray with its client server, and measure."""
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
    ray = str(Path(python).parent / "ray")
    start = ("start", "--head", "--num-cpus", "2", "--ray-client-server-port", "10001")
    subprocess.run(
        [ray, *start, "--include-dashboard", "false"], env=env, check=True, capture_output=True
    )
    try:
        time.sleep(3.0)  # its client server starts after it has returned
        found: dict[str, float] = driver(python, "ray", "ray://127.0.0.1:10001", folder, env)
        return found
    finally:
        subprocess.run([ray, "stop", "--force"], env=env, check=False, capture_output=True)


def main() -> None:
    """Measure in turn, print medians and their ratio, and append them to the table of results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with ray[client]")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"stoker": [], "ray": []}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds["stoker"].append(stoker_round(Path(folder)))
        if given.ray:
            python = shutil.which(given.ray) or given.ray
            with tempfile.TemporaryDirectory() as folder:
                rounds["ray"].append(ray_round(python, Path(folder)))
    medians = {
        backend: {case: statistics.median(one[case] for one in found) for case in found[0]}
        for backend, found in rounds.items()
        if found
    }
    print(f"{'':16} {'stoker':>10} {'ray client':>12} {'ratio':>8}")
    for case, ours in medians["stoker"].items():
        theirs = medians.get("ray", {}).get(case)
        beside = f"{theirs:>12.4g} {ours / theirs:>8.1f}" if theirs else ""
        print(f"{case:16} {ours:>10.4g} {beside} {UNITS.get(case, '1/s')}")
    for backend, found in medians.items():
        rows = [
            Row(f"gateway_{case}", value, UNITS.get(case, "1/s")) for case, value in found.items()
        ]
        append(HERE / "results.csv", backend, _version(backend, given.ray), rows)


def _version(backend: str, python: str | None) -> str:
    if backend == "stoker":
        from stoker_wire.version import VERSION

        return VERSION
    line = [str(python), "-c", "import ray; print(ray.__version__)"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
