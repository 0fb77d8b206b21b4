"""Shared memory that other programs use as well: objects go to disk by what is really free there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 120.0
OWN_MEMORY = ("unshare", "--mount", "sh", "-c")
"""A shell whose mounts are its own, so that it can have another /dev/shm."""
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"

PROGRAM = """
import glob, os, sys
import stoker
from stoker.local.sessions import running_sessions

NBYTES, COUNT = 4 << 20, 15

def fill(name, nbytes):
    with open(f"/dev/shm/{name}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)

@stoker.remote
def block(number):
    return bytes([number]) * NBYTES

stoker.init(num_cpus=2)
fill("of-another-program", 40 << 20)
refs = [block.remote(number) for number in range(COUNT)]
ready, _ = stoker.wait(refs, num_returns=COUNT, timeout=60)
print(len(ready), all(stoker.get(ref) == bytes([n]) * NBYTES for n, ref in enumerate(refs)))
ref = stoker.put(bytes([77]) * NBYTES)
fill("the-rest", os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize)
more = [block.remote(100), stoker.put(bytes([101]) * NBYTES), ref]
print([stoker.get(one, timeout=60)[0] for one in more])
(session,) = running_sessions()
print("spilled", len(glob.glob(f"{session.session_dir}/**/o_*", recursive=True)) > 0)
stoker.shutdown()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    probe = subprocess.run([*OWN_MEMORY, MOUNT], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_what_others_take_of_shared_memory_is_not_counted_on(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*OWN_MEMORY, f"{MOUNT} && exec {sys.executable} {program}"],
        env={**os.environ, "STOKER_SESSION_ROOT": str(tmp_path / "s")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stdout == "15 True\n[100, 101, 77]\nspilled True\n", done.stderr
    assert done.returncode == 0, done.stderr
