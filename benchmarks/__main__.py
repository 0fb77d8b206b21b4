"""``python -m benchmarks``: Stoker and its peers in turn, A B A B, as ratios of medians.

A peer is timed where it can be found: in this interpreter, or in the one named by
``--peer ray=/path/to/python`` (or ``STOKER_BENCH_RAY``, ``STOKER_BENCH_DASK``). Each result is
appended to ``benchmarks/results.csv`` with the commit, the machine and the versions.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("ray", "dask")
LOWER_IS_BETTER = ("s", "MB", "")
RUN_TIMEOUT_S = 900
COLUMNS = ("at", "commit", "machine", "python", "backend", "version", "case", "value", "unit")


def interpreters(named: list[str]) -> dict[str, str]:
    """Return the Python of each backend that can be timed."""
    found = {"stoker": sys.executable}
    given = dict(item.split("=", 1) for item in named)
    for peer in PEERS:
        path = given.get(peer) or os.environ.get(f"STOKER_BENCH_{peer.upper()}")
        if path:
            found[peer] = path
        elif importlib.util.find_spec(peer) is not None:
            found[peer] = sys.executable
    return found


def run_once(
    backend: str, python: str, seconds: float, cases: list[str]
) -> dict[str, tuple[float, str]]:
    """Run the workloads of one backend once; return value and unit by case."""
    command = [python, str(HERE / "workloads.py"), backend, str(seconds), *cases]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd="/"
    )
    results: dict[str, tuple[float, str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            if "error" in said:
                print(f"  {backend}: {said['case']}: {said['error']}")
            else:
                results[said["case"]] = (said["value"], said["unit"])
    if done.returncode:
        print(f"  {backend} ended with exit code {done.returncode}: {done.stderr[-800:]}")
    return results


def version_of(backend: str, python: str) -> str:
    """Return a backend's version as its own interpreter knows it."""
    code = f"import importlib.metadata as m; print(m.version({backend!r}))"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def commit() -> str:
    """Return the commit that is measured, with a + if the tree has changes."""
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        cwd=HERE,
        check=False,
    )
    return head.stdout.strip()


def show(measured: dict[str, dict[str, list[tuple[float, str]]]]) -> None:
    """Print a table: medians, and each peer's ratio with its spread over the rounds."""
    peers = [b for b in measured if b != "stoker"]
    print(
        f"\n{'case':28} {'stoker':>14}" + "".join(f" {p:>12} {'ratio (spread)':>22}" for p in peers)
    )
    for case, ours in measured["stoker"].items():
        unit = ours[0][1]
        mine = statistics.median(v for v, _ in ours)
        row = f"{case:28} {mine:>10.5g} {unit:3}"
        for peer in peers:
            theirs = measured[peer].get(case)
            if not theirs:
                row += f" {'-':>12} {'':>22}"
                continue
            other = statistics.median(v for v, _ in theirs)
            pairs = [
                (b / a if unit in LOWER_IS_BETTER else a / b)
                for (a, _), (b, _) in zip(ours, theirs, strict=False)
                if a and b
            ]
            spread = (
                f"{statistics.median(pairs):.1f}x ({min(pairs):.1f}-{max(pairs):.1f})"
                if pairs
                else "-"
            )
            row += f" {other:>12.5g} {spread:>22}"
        print(row)
    print("ratio: how many times better Stoker is (faster, smaller, fewer); rounds alternate.")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=2, help="A B rounds (default 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case (default 1)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument(
        "--csv", default=str(HERE / "results.csv"), help="append results here ('' = no)"
    )
    options = parser.parse_args()
    pythons = interpreters(options.peer)
    for peer in PEERS:
        if peer not in pythons:
            print(
                f"{peer} is not installed here: give --peer {peer}=/path/to/its/python to compare"
            )
    measured: dict[str, dict[str, list[tuple[float, str]]]] = {b: {} for b in pythons}
    for number in range(options.rounds):
        for backend, python in pythons.items():
            print(f"round {number + 1}: {backend}", flush=True)
            for case, result in run_once(backend, python, options.seconds, options.cases).items():
                measured[backend].setdefault(case, []).append(result)
    if not measured["stoker"]:
        return 1
    show(measured)
    if options.csv:
        append(Path(options.csv), measured, {b: version_of(b, p) for b, p in pythons.items()})
    return 0


def append(
    path: Path, measured: dict[str, dict[str, list[tuple[float, str]]]], versions: dict[str, str]
) -> None:
    """Add the medians to the CSV that is kept with the code."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = f"{os.cpu_count()} x {platform.machine()}"
    known = path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        if not known:
            rows.writerow(COLUMNS)
        for backend, cases in measured.items():
            for case, results in cases.items():
                value = statistics.median(v for v, _ in results)
                rows.writerow(
                    (
                        now,
                        commit(),
                        machine,
                        platform.python_version(),
                        backend,
                        versions[backend],
                        case,
                        f"{value:.5g}",
                        results[0][1],
                    )
                )


if __name__ == "__main__":
    sys.exit(main())
