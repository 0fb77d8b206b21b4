"""``python -m benchmarks``: Stoker and its peers in turn, A B A B, as ratios with their spread.

A peer (Ray, Dask, loky, the standard library's pools) is timed where it can be found: in the interpreter
that ``--peer ray=PYTHON`` or ``STOKER_BENCH_PEERS=ray=PYTHON,dask=PYTHON`` names, in this one, or in the
first Python on the ``PATH``. ``--only ray --only multiprocessing`` leaves the others out. Results are
appended to ``benchmarks/results.csv`` with commit, machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys

from benchmarks.results import HERE, Row, append

OURS = "stoker"
PEERS = {
    "ray": "ray",
    "dask": "distributed",
    "multiprocessing": "multiprocessing",
    "concurrent.futures": "concurrent.futures",
    "loky": "loky",
}
"""Each peer and the module that must be there to time it."""
POOL_GOALS = {"tasks_sync": 0.75, "actor_sync": 0.75, "tasks_async_1k": 1.5}
"""The ratios to ``multiprocessing.Pool`` that are wanted."""
RAY_GOALS = {
    "tasks_sync": 15,
    "tasks_async_1k": 30,
    "tasks_async_10k": 8,
    "nested_tasks_100": 5,
    "actor_sync": 8,
    "actor_async_1k": 3.5,
    "async_actor_sync": 7,
    "async_actor_async_1k": 6,
    "actor_create_call_kill_x4": 25,
    "put_small": 10,
    "get_small": 3,
    "put_100MB": 6,
    "get_100MB": 1,
    "task_reads_100MB_ref": 4,
    "tasks_1MB_inline_arg_x10": 4,
    "task_returns_10MB": 5,
    "wait_1k": 8,
    "dependency_chain_100": 5,
    "task_with_1k_ref_args": 10,
    "first_result": 6,
    "shutdown": 3,
    "idle_cluster_pss": 4,
    "idle_cluster_processes": 2,
    "end_cluster_pss": 4,
}
"""How many times better than Ray each case shall be."""
GOALS = {"ray": RAY_GOALS, "multiprocessing": POOL_GOALS}
LOWER_IS_BETTER = ("s", "MB", "")
RUN_S = 900
PROBE_S = 60

Measured = dict[str, dict[str, list[Row]]]
"""The rows of each round, by backend and case."""


def interpreters(named: list[str], only: list[str]) -> dict[str, str]:
    """Return the Python of each backend that can be timed; say why another cannot."""
    found = {OURS: sys.executable}
    items = [*os.environ.get("STOKER_BENCH_PEERS", "").split(","), *named]
    given = dict(item.strip().split("=", 1) for item in items if "=" in item)
    for name in given.keys() - PEERS:
        raise SystemExit(f"--peer {name}: only {', '.join(PEERS)} can be compared")
    on_path = [p for name in ("python3", "python") if (p := shutil.which(name))]
    for peer, module in PEERS.items():
        if only and peer not in only:
            continue
        places = [given[peer]] if peer in given else [sys.executable, *on_path]
        python = next((p for p in places if can_import(p, module)), None)
        if python is not None:
            found[peer] = python
        elif peer in given:
            raise SystemExit(f"--peer {peer}={given[peer]}: it cannot import {module}")
        else:
            print(
                f"{peer} is not compared: {module} is in none of {', '.join(dict.fromkeys(places))}."
                f" Name a Python that has it: --peer {peer}=PYTHON"
            )
    return found


def can_import(python: str, module: str) -> bool:
    """Whether an interpreter has a module (it is not imported)."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=PROBE_S, check=False).returncode == 0
    except OSError:
        return False


def run_once(backend: str, python: str, seconds: float, cases: list[str]) -> list[Row]:
    """Run the workloads of one backend once."""
    command = [python, str(HERE / "workloads.py"), backend, str(seconds), *cases]
    env = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_BENCH_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False, cwd="/", env=env
    )
    rows = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            if "error" in said:
                print(f"  {backend}: {said['case']}: {said['error']}")
            else:
                rows.append(Row(said["case"], said["value"], said["unit"]))
    if done.returncode:
        print(f"  {backend} ended with exit code {done.returncode}: {done.stderr[-800:]}")
    return rows


def version_of(backend: str, python: str) -> str:
    """Return a backend's version as its own interpreter knows it."""
    code = f"import importlib.metadata as m; print(m.version({backend!r}))"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    return done.stdout.strip() or platform.python_version()  # of the standard library


def ratios(ours: list[Row], theirs: list[Row]) -> list[float]:
    """Return how many times better ours is, round by round."""
    pairs = [(a.value, b.value) for a, b in zip(ours, theirs, strict=False) if a.value and b.value]
    less = ours[0].unit in LOWER_IS_BETTER
    return [b / a if less else a / b for a, b in pairs]


def show(measured: Measured) -> None:
    """Print a table: medians, each peer's ratio with its spread over the rounds, and the goals."""
    peers = [b for b in measured if b != OURS]
    head = f"\n{'case':30} {OURS:>18}"
    print(head + "".join(f" {p:>18} {'ratio (spread), goal':>30}" for p in peers))
    for case, ours in measured[OURS].items():
        line = f"{case:30} {statistics.median(r.value for r in ours):>10.5g} {ours[0].unit:7}"
        for peer in peers:
            theirs = measured[peer].get(case, [])
            times = ratios(ours, theirs)
            if not times:
                line += f" {'-':>18} {'':>30}"
                continue
            middle = statistics.median(times)
            spread = f"{middle:.1f}x ({min(times):.1f}-{max(times):.1f})"
            goal = GOALS.get(peer, {}).get(case)
            if goal is not None:
                spread += f" {goal:g}x {'yes' if middle >= goal else 'NO'}"
            line += f" {statistics.median(r.value for r in theirs):>18.5g} {spread:>30}"
        print(line)
    print("ratio: how many times better Stoker is (faster, smaller, fewer); rounds alternate.")
    print("goal: the ratio to that peer that is wanted on the same machine in the same run.")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=2, help="A B rounds (default 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case (default 1)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--only", action="append", default=[], choices=PEERS, help="this peer only")
    parser.add_argument(
        "--csv", default=str(HERE / "results.csv"), help="append results here ('' = no)"
    )
    options = parser.parse_args()
    pythons = interpreters(options.peer, options.only)
    measured: Measured = {backend: {} for backend in pythons}
    for number in range(options.rounds):
        for backend, python in pythons.items():
            print(f"round {number + 1}: {backend}", flush=True)
            for row in run_once(backend, python, options.seconds, options.cases):
                measured[backend].setdefault(row.case, []).append(row)
    if not measured[OURS]:
        return 1
    show(measured)
    if options.csv:
        for backend, cases in measured.items():
            medians = [
                Row(case, statistics.median(r.value for r in rows), rows[0].unit)
                for case, rows in cases.items()
            ]
            append(options.csv, backend, version_of(backend, pythons[backend]), medians)
    return 0


if __name__ == "__main__":
    sys.exit(main())
