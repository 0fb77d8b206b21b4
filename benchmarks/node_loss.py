"""The loss of a node, measured: tasks with stored results, half of whose results die with a node.

``python -m benchmarks.node_loss`` runs the same tasks twice on a head and a node: undisturbed, and with the
node killed when half of the tasks are done. All results are read and checked at the end; what was lost is
made again by lineage. The tasks sleep, so that two cores are enough for all workers.

``python -m benchmarks.node_loss deaths`` measures how long the cluster takes a dead node for alive: one whose
nodelet was killed, so that its host refuses connections, and one that is frozen with all its processes, which
only its silence tells (``dead_after_s``, and up to one sweep).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

import stoker
from stoker.launch import spawn_local
from stoker.local.cluster import spawn_node
from stoker_wire.settings import Settings
from tests.chaos._services import Apart, apart

CPUS = 4
LENGTH = 25_000
DEAD_S = 60.0
POLL_S = 0.02


@stoker.remote
def work(number: int, sleep_s: float) -> np.ndarray:
    """Return an array that shows which task made it."""
    time.sleep(sleep_s)
    return np.full(LENGTH, number)


def run(tasks: int, sleep_s: float, *, kill: bool) -> tuple[float, int]:
    """Return how long it took, and how many results were wrong or lost."""
    os.environ["STOKER_SHARE_ARENAS"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        head = spawn_local(
            embedded=False, num_gpus=0, num_cpus=CPUS, session_dir=Path(folder) / "head"
        )
        info = head.wait_ready()
        node = spawn_node(
            info.gcs_url,
            token=info.token,
            num_cpus=CPUS,
            num_gpus=0,
            session_dir=Path(folder) / "n",
        )
        node.wait_ready()
        stoker.init(info.gcs_url, token=info.token, log_to_driver=False)
        began_s = time.monotonic()
        refs = [work.remote(i, sleep_s) for i in range(tasks)]
        if kill:
            stoker.wait(refs, num_returns=tasks // 2, timeout=600)
            os.kill(node.pid, signal.SIGKILL)
        wrong = 0
        for number, ref in enumerate(refs):
            try:
                wrong += not bool((stoker.get(ref, timeout=600) == number).all())
            except stoker.exceptions.StokerError as error:
                print(error)
                wrong += 1
        took_s = time.monotonic() - began_s
        stoker.shutdown()
        node.stop()
        head.stop()
    return took_s, wrong


def until_dead(cluster: Apart, name: str) -> float:
    """Return how long it takes until a node is DEAD in the list of nodes."""
    began_s = time.monotonic()
    while cluster.nodes()[name]["state"] != "DEAD":
        assert time.monotonic() - began_s < DEAD_S, f"{name} is not DEAD"
        time.sleep(POLL_S)
    return time.monotonic() - began_s


def deaths(rounds: int) -> None:
    """Kill nodelets and freeze nodes, under the default settings; print when each was DEAD."""
    defaults = Settings()
    settings = {
        f"STOKER_{name.upper()}": str(getattr(defaults, name))
        for name in ("heartbeat_s", "suspect_after_s", "dead_after_s", "leader_ttl_s")
    }
    took: dict[str, list[float]] = {"killed": [], "frozen": []}
    with tempfile.TemporaryDirectory() as folder, apart(Path(folder), **settings) as cluster:
        for number in range(1, 2 * rounds, 2):
            cluster.add_nodelet().kill()
            took["killed"].append(until_dead(cluster, f"n{number}"))
            nodelet = psutil.Process(cluster.add_nodelet().pid)
            frozen = [nodelet, *nodelet.children(recursive=True)]
            for process in frozen:
                process.suspend()
            took["frozen"].append(until_dead(cluster, f"n{number + 1}"))
            for process in reversed(frozen):
                process.kill()
    for name, values in took.items():
        spread = f"{min(values):.2f}-{max(values):.2f}, {rounds} times"
        print(f"{name}: DEAD after {statistics.median(values):.2f} s ({spread})", flush=True)
    print(f"(dead_after_s is {defaults.dead_after_s:g}, a heartbeat {defaults.heartbeat_s:g} s)")


def main() -> None:
    """Run both, and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, default=1000, help="how many tasks (default 1000)")
    parser.add_argument("--sleep-s", type=float, default=0.5, help="length of each (default 0.5)")
    parser.add_argument("--rounds", type=int, default=5, help="of deaths (default 5)")
    parser.add_argument("what", nargs="?", choices=("lineage", "deaths"), default="lineage")
    args = parser.parse_args()
    if args.what == "deaths":
        deaths(args.rounds)
        return
    plain_s, wrong = run(args.tasks, args.sleep_s, kill=False)
    print(f"undisturbed: {plain_s:.1f} s, {wrong} of {args.tasks} wrong or lost", flush=True)
    killed_s, wrong = run(args.tasks, args.sleep_s, kill=True)
    print(f"node killed: {killed_s:.1f} s, {wrong} of {args.tasks} wrong or lost")
    print(f"ratio: {killed_s / plain_s:.2f} (half of the CPUs are gone for the second half)")


if __name__ == "__main__":
    main()
