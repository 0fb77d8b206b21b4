"""Programs that hold the interpreter, or are stopped, for longer than any heartbeat lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BUSY = """
import ctypes, os, sys, time
import stoker

def hold_the_interpreter(seconds):
    ctypes.PyDLL(None).sleep(seconds)

@stoker.remote(max_retries=0)
def later(number, seconds):
    time.sleep(seconds)
    return number

@stoker.remote(max_retries=0)
def parent(seconds):
    refs = [later.remote(number, seconds / 2) for number in range(2)]
    stoker.wait(refs, timeout=0.5)
    hold_the_interpreter(seconds)
    return stoker.get(refs)

@stoker.remote
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

stoker.init(num_cpus=5)
counter = Counter.remote()
print(stoker.get(counter.add.remote()))
refs = [parent.remote(int(sys.argv[1])), *(later.remote(n, 2.0) for n in range(2))]
stoker.wait(refs, timeout=0.2)
print("busy", flush=True)
if sys.argv[2] == "hold":
    hold_the_interpreter(int(sys.argv[1]))
else:
    sys.stdin.readline()
print(stoker.get(refs), stoker.get(counter.add.remote()), stoker.get(later.remote(7, 0)))
"""
SILENT_S = 10
ANSWERS = "1\nbusy\n[[0, 1], 0, 1] 2 7\n"
IMPATIENT = {
    "STOKER_DRIVER_RECONNECT_S": "0.5",
    "STOKER_LEASE_TTL_S": "2",
}
"""As impatient as may be: a session and a lease of a silent owner ended after 8 s and 2 s before."""


def test_drivers_that_hold_the_interpreter_or_are_stopped_lose_nothing(tmp_path: Path) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY)

    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(program), str(SILENT_S), how],
            env={**os.environ, **IMPATIENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    holding, stopped = start("hold"), start("stop")
    try:
        assert stopped.stdout is not None and stopped.stdin is not None
        seen = stopped.stdout.readline() + stopped.stdout.readline()
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(SILENT_S)  # that long it is away
        stopped.send_signal(signal.SIGCONT)
        rest, errors = stopped.communicate("\n", timeout=60)
        assert (seen + rest, stopped.returncode) == (ANSWERS, 0), errors
        out, errors = holding.communicate(timeout=60)
        assert (out, holding.returncode) == (ANSWERS, 0), errors
    finally:
        for process in (holding, stopped):
            process.kill()
            process.communicate()
