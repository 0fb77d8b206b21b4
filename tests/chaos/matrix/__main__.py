"""``make chaos``: every workload through every fault, and a table of how long calls stood still."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests import leaks
from tests.chaos.matrix.cell import Outcome, run_cell
from tests.chaos.matrix.faults import FAULTS
from tests.chaos.matrix.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterable

TIME_WAS_UP = "the time was up"


def table(outcomes: Iterable[Outcome]) -> str:
    """The report, as Markdown."""
    cells = {(one.fault, one.workload): one for one in outcomes}
    columns = [name for name in WORKLOADS if any(name == column for _, column in cells)]
    lines = [
        "Longest time in which no call ended / slowest call that was open during the fault, in seconds.",
        "",
        f"| fault | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for fault in [name for name in FAULTS if any(name == row for row, _ in cells)]:
        lines.append(f"| {fault} | {' | '.join(_text(cells.get((fault, c))) for c in columns)} |")
    ran = [one for one in cells.values() if not one.skipped]
    skipped = Counter(one.skipped for one in cells.values() if one.skipped)
    failed = sum(sum(one.failed_once.values()) for one in ran)
    calls, attempts = sum(one.calls for one in ran), sum(one.attempts for one in ran)
    lines += ["", f"{len(ran)} of {len(cells)} cells ran, {calls} calls in {attempts} attempts."]
    lines += [f"{count} cells did not run: {reason}" for reason, count in skipped.items()]
    lines += [f"{failed} calls that are not to be retried failed, each with its cause."]
    lines += [f"{sum(bool(one.broken) for one in ran)} cells broken."]
    for one in cells.values():
        head = f"\n**{one.workload} / {one.fault}** (seed {one.seed})"
        notes = [f"- {text}" for text in one.broken]
        notes += [f"- {call} waited {s} s: {why}" for call, (s, why) in list(one.waits.items())[:3]]
        if notes:
            lines += [head, *notes]
    return "\n".join(lines) + "\n"


def _text(one: Outcome | None) -> str:
    if one is None:
        return ""
    if one.skipped:
        return "skipped"
    times = f"{one.gap_s:g}" + (f" / {one.slowest_s:g}" if one.slowest_s else "")
    return f"**broken** {times}" if one.broken else times


def main() -> int:
    """Run the cells that are asked for; return 1 if one is broken, or the time was up before it began."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix", description=__doc__)
    parser.add_argument("--workloads", nargs="*", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS], default=[*FAULTS])
    parser.add_argument("--seed", type=int, help="decides whom a fault meets (default: random)")
    parser.add_argument("--budget-s", type=float, default=3500, help="begin no cell after this")
    parser.add_argument("--report", type=Path, default=Path("chaos-report.md"))
    parser.add_argument("--keep", action="store_true", help="keep the folders of broken cells")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its cluster too
    leaks.mark_this_run()
    began_s, outcomes = time.monotonic(), []
    root = Path(tempfile.mkdtemp(prefix="stk-chaos-"))
    for fault in options.faults:
        for workload in options.workloads:
            if time.monotonic() - began_s > options.budget_s:
                print(f"the time is up; not run: {workload} / {fault}", flush=True)
                outcomes.append(Outcome(workload, fault, seed, skipped=TIME_WAS_UP))
                continue
            folder = root / f"{len(outcomes)}"
            before = leaks.Snapshot.take()
            one = run_cell(workload, fault, seed, folder)
            one.broken += [f"leaked: {text}" for text in before.leaks()]
            outcomes.append(one)
            print(json.dumps({"verdict": one.verdict, **asdict(one)}), flush=True)
            if not (options.keep and one.broken):
                shutil.rmtree(folder, ignore_errors=True)
            options.report.write_text(table(outcomes))
    if not options.keep:
        shutil.rmtree(root, ignore_errors=True)
    options.report.write_text(table(outcomes))
    print(table(outcomes))
    print(f"{time.monotonic() - began_s:.0f} s; the report is {options.report}")
    return int(any(one.broken or one.skipped == TIME_WAS_UP for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
