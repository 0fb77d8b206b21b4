"""The allocations of this process while it records itself, by memray, as a page of HTML.

memray's tracker is started in the process itself: attaching from outside takes a debugger. It sees all
threads, and native allocators. The report is made by a process of the same interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from stoker_wire.errors import ConflictError

if TYPE_CHECKING:
    import threading
    from pathlib import Path

_REPORT_S = 50.0
_SAID_CHARACTERS = 300


def record_memory(seconds: float, folder: Path, stop: threading.Event) -> Path:
    """Record allocations for so long; return the report."""
    try:
        import memray
    except ImportError as error:
        raise ConflictError(
            f"memray cannot be imported in this worker\n{error}\n"
            "install stoker[profile] on its node, or have memray in its runtime_env"
        ) from None
    capture, report = folder / "capture", folder / "report.html"
    try:
        tracker = memray.Tracker(
            destination=memray.FileDestination(capture, overwrite=True),
            # Of one file per process the size follows the number of places, not of allocations.
            file_format=memray.FileFormat.AGGREGATED_ALLOCATIONS,
        )
        with tracker:
            stop.wait(seconds)
    except RuntimeError as error:  # another one is active: the program's own
        raise ConflictError(
            f"memray cannot record this process\n{error}\nit may use memray by itself"
        ) from None
    command = [sys.executable, "-m", "memray", "flamegraph", "-f", "-o", str(report), str(capture)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_REPORT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConflictError(
            f"memray's report was not done within {_REPORT_S:g} s\ntake one of fewer seconds"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ConflictError(f"memray made no report\n{said[-_SAID_CHARACTERS:]}")
    return report
