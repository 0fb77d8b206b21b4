"""What the task history costs: ``python -m benchmarks.history``, off and on in turn, A B A B.

Each round runs the same workloads on a fresh local cluster without and with
``STOKER_TASK_HISTORY``; medians over the rounds give the ratio of rates (1.0: the history is free),
the CPU time per call of all processes together, and how long after the last result the last row
was in SQL. CPU time says more than the rate where other programs use the machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN_TIMEOUT_S = 300
COMPLETE_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, its living descendants and those that it has buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own = sum(int(ticks) for ticks in fields[11:15]) / TICKS
        below = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    return own + sum(cpu_seconds(child) for child in below)


def measure(seconds: float, only: list[str]) -> None:
    """Run the workloads once in this process and print one JSON line for each."""
    import stoker
    from stoker.runtime.current import runtime

    stoker.init(num_cpus=2)

    @stoker.remote
    def noop() -> bytes:
        return b"ok"

    @stoker.remote
    class Actor:
        def call(self) -> bytes:
            return b"ok"

    actor = Actor.options(num_cpus=0).remote()
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "tasks_sync": (1, lambda: stoker.get(noop.remote())),
        "tasks_async_10k": (
            10_000,
            lambda: stoker.get([noop.remote() for _ in range(10_000)]),
        ),
        "actor_async_1k": (
            1000,
            lambda: stoker.get([actor.call.remote() for _ in range(1000)]),
        ),
    }
    recorded = 0
    for name, (count, run) in cases.items():
        if only and name not in only:
            continue
        run()
        recorded = _complete(runtime().settings.task_history, recorded + count)
        cpu_s, began, done = cpu_seconds(os.getpid()), time.perf_counter(), 0
        while (now := time.perf_counter()) - began < seconds:
            run()
            done += count
        took_s = now - began
        recorded = _complete(runtime().settings.task_history, recorded + done)
        lag_s = time.perf_counter() - began - took_s
        cpu_s = cpu_seconds(os.getpid()) - cpu_s
        result = {
            "case": name, "rate": done / took_s, "cpu_us": cpu_s / done * 1e6, "lag_s": lag_s
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    stoker.shutdown()


def _complete(recording: bool, at_least: int) -> int:
    """Wait until SQL has that many attempts that ended; return how many it has."""
    import sqlite3

    from stoker.runtime.current import runtime

    node = runtime().identity.node
    assert node is not None
    if not recording:
        return 0
    (path,) = Path(node.session_dir).glob("*.sqlite3")
    deadline_s = time.perf_counter() + COMPLETE_S
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        while True:
            statement = "SELECT count(*) FROM tasks WHERE rank >= 4"
            (found,) = connection.execute(statement).fetchone()
            if found >= at_least:
                return int(found)
            if time.perf_counter() > deadline_s:
                raise SystemExit(f"the history has {found} of {at_least} attempts")
            time.sleep(0.05)


def run_once(history: bool, seconds: float, only: list[str]) -> dict[str, dict[str, float]]:
    """Run the workloads in a process of their own; return the results by case."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.history", "--measure", "--seconds", str(seconds), *only],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        cwd=HERE.parent,
        env={**os.environ, "STOKER_TASK_HISTORY": "true" if history else "false"},
    )
    if done.returncode:
        raise SystemExit(f"a run ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument("cases", nargs="*", help="only these cases")
    parser.add_argument("--rounds", type=int, default=3, help="A B rounds (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="per case (default 2)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.seconds, options.cases)
        return 0
    rounds = [
        (
            run_once(False, options.seconds, options.cases),
            run_once(True, options.seconds, options.cases),
        )
        for _ in range(options.rounds)
    ]
    print(
        f"{'case':18} {'off /s':>9} {'on /s':>9} {'on/off (spread)':>20} "
        f"{'cpu off us':>10} {'cpu on us':>10} {'lag s':>6}"
    )
    for case in rounds[0][0]:
        ratios = [on[case]["rate"] / off[case]["rate"] for off, on in rounds]

        def median(side: int, fact: str, case: str = case) -> float:
            return statistics.median(pair[side][case][fact] for pair in rounds)

        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(
            f"{case:18} {median(0, 'rate'):>9.0f} {median(1, 'rate'):>9.0f} {spread:>20} "
            f"{median(0, 'cpu_us'):>10.1f} {median(1, 'cpu_us'):>10.1f} {median(1, 'lag_s'):>6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
