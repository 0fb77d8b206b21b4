"""The loss of a node, measured: tasks with stored results, half of whose results die with a node.

``python -m benchmarks.node_loss`` runs the same tasks twice on a head and a node: undisturbed, and with the
node killed when half of the tasks are done. All results are read and checked at the end; what was lost is
made again by lineage. The tasks sleep, so that two cores are enough for all workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

import stoker
from stoker.launch import spawn_local
from stoker.local.cluster import spawn_node

CPUS = 4
LENGTH = 25_000


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


def main() -> None:
    """Run both, and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, default=1000, help="how many tasks (default 1000)")
    parser.add_argument("--sleep-s", type=float, default=0.5, help="length of each (default 0.5)")
    args = parser.parse_args()
    plain_s, wrong = run(args.tasks, args.sleep_s, kill=False)
    print(f"undisturbed: {plain_s:.1f} s, {wrong} of {args.tasks} wrong or lost", flush=True)
    killed_s, wrong = run(args.tasks, args.sleep_s, kill=True)
    print(f"node killed: {killed_s:.1f} s, {wrong} of {args.tasks} wrong or lost")
    print(f"ratio: {killed_s / plain_s:.2f} (half of the CPUs are gone for the second half)")


if __name__ == "__main__":
    main()
