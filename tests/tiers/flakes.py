"""``make flakes``: the suite again and again, under fresh seeds and under load; what failed how often.

Runs at one commit add up over invocations: what is missing is run, and the summary is of all. A run
is one of

- ``quiet``: the suite as ``make test-all`` runs it, with fresh seeds (as often as ``--runs`` says);
- ``busy``: beside a busy loop on each core;
- ``nice``: at nice 19, beside a process that keeps 1 GB of memory in use.

Exits with 1 when a test failed in any run at this commit.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / ".flakes"
RUN_S = 3600.0
BUSY = "while True: pass"
PRESSURE = """
held = bytearray(1 << 30)
while True:
    for page in range(0, len(held), 4096):
        held[page] = (held[page] + 1) % 256
"""


class Run(msgspec.Struct, frozen=True):
    """One run of the suite, as it is kept in ``.flakes/COMMIT.jsonl``."""

    condition: str
    hash_seed: int
    seed: int
    exit_code: int
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: float
    log: str


@contextmanager
def load(condition: str) -> Iterator[None]:
    """Have the condition's other processes run meanwhile."""
    codes = {"busy": [BUSY] * (os.cpu_count() or 1), "nice": [PRESSURE]}.get(condition, [])
    others = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(condition: str, workers: int, extra: list[str]) -> Run:
    """Run the suite once, with fresh seeds."""
    hash_seed, seed = random.SystemRandom().randrange(2**15), random.SystemRandom().randrange(2**32)
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{condition}"
    report, log = RECORDS / f"{name}.xml", RECORDS / f"{name}.log"
    command = [
        *(("nice", "-n", "19") if condition == "nice" else ()),
        sys.executable, "-m", "pytest", "-q", "--slow", "-n", str(workers),
        "--dist", "loadfile", "--no-loadscope-reorder",
        f"--randomly-seed={seed}", f"--junitxml={report}", "-o", "junit_family=xunit1", *extra,
    ]  # fmt: skip
    began = time.monotonic()
    with load(condition), log.open("wb") as output:
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, timeout=RUN_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    outcomes = collections.Counter[str]()
    failed = []
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
            outcomes[outcome] += 1
            if outcome in ("failure", "error"):
                failed.append(f"{case.get('file')}::{case.get('name')}")
        report.unlink()
    if code and not failed:
        why = f"exit code {code}" if code > 0 else f"not over after {RUN_S:g} s"
        failed.append(f"(the run itself: {why})")
    return Run(
        condition, hash_seed, seed, code, outcomes["passed"], outcomes["skipped"],
        tuple(sorted(set(failed))), time.monotonic() - began, str(log.relative_to(ROOT)),
    )  # fmt: skip


def commit() -> str:
    """Return the commit that is tested; a tree with changes is a commit of its own each time."""

    def git(*arguments: str) -> str:
        told = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return told.stdout.strip()

    dirty = git("status", "--porcelain")
    return git("rev-parse", "--short=12", "HEAD") + (f"-dirty-{int(time.time())}" if dirty else "")


def tell(runs: list[Run], missing: list[str]) -> None:
    """Print what failed how often, and how to repeat it."""
    counts = collections.Counter(name for one in runs for name in one.failed)
    print(f"\n{len(runs)} runs, {sum(bool(one.failed) for one in runs)} with failures")
    for one in runs:
        print(
            f"  {one.condition:<6} {one.seconds:5.0f} s  {one.passed} passed, {one.skipped} skipped, "
            f"{len(one.failed)} failed  PYTHONHASHSEED={one.hash_seed} --randomly-seed={one.seed}  {one.log}"
        )
    for name, count in counts.most_common():
        where = ", ".join(one.condition for one in runs if name in one.failed)
        print(f"  failed {count} of {len(runs)} ({where}): {name}")
    if missing:
        print(f"  not run yet: {', '.join(missing)}")
    if not counts:
        print("  clean" + (" so far" if missing else ""))


def main() -> int:
    """Run what is missing at this commit, and print the summary."""
    parser = argparse.ArgumentParser(description="Run the suite until its flaky tests show.")
    parser.add_argument(
        "--runs", type=int, default=5, help="quiet runs with fresh seeds (default 5)"
    )
    parser.add_argument("--at-most", type=int, default=100, help="runs in this invocation")
    parser.add_argument("--workers", type=int, default=3, help="pytest workers (default 3)")
    parser.add_argument("extra", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    records = RECORDS / f"{commit()}.jsonl"
    runs = [
        msgspec.json.decode(line, type=Run)
        for line in (records.read_text().splitlines() if records.exists() else [])
    ]
    missing = collections.Counter({"quiet": arguments.runs, "busy": 1, "nice": 1})
    missing.subtract(one.condition for one in runs)
    # The conditions under load first: they show most.
    todo = [name for name in ("busy", "nice", "quiet") for _ in range(max(0, missing[name]))]
    for condition in todo[: arguments.at_most]:
        print(f"[flakes] {condition} run, {len(runs) + 1} of {len(runs) + len(todo)}", flush=True)
        one = run(condition, arguments.workers, arguments.extra)
        with records.open("a") as file:
            file.write(json.dumps(msgspec.to_builtins(one)) + "\n")
        runs.append(one)
        todo = todo[1:]
        print(
            f"[flakes] {one.seconds:.0f} s: {one.passed} passed, failed: {list(one.failed)}",
            flush=True,
        )
    tell(runs, todo)
    return 1 if any(one.failed for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
