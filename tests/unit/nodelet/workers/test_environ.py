"""What ``/proc`` shows of a process's environment once its secrets are wiped."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from stoker_nodelet.workers.environ import wipe_initial

def shown():
    with open("/proc/self/environ", "rb") as file:
        return file.read()

assert b"hidden" in shown()
wipe_initial({"STOKER_TOKEN", "STOKER_NONE"})
assert b"hidden" not in shown()
assert b"STOKER_TOKENS=stays" in shown() and b"LAST=stays" in shown()
assert os.environ["STOKER_TOKEN"] == "hidden=value", "the copy of this process is its own business"
pid = os.fork()
if pid == 0:
    os._exit(b"hidden" in shown())
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_wiped_variable_is_in_no_environment_that_the_kernel_shows() -> None:
    environ = {
        "STOKER_TOKENS": "stays",
        "STOKER_TOKEN": "hidden=value",
        "EMPTY": "",
        "LAST": "stays",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True, timeout=60)
