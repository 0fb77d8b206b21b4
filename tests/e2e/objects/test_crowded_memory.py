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

TWO_NODES = """
import glob, os, sys
import stoker
from stoker.local.cluster import spawn_node

NBYTES, COUNT = 4 << 20, 12
FOLDER = sys.argv[1]

@stoker.remote(num_cpus=0.5)
def block(number):
    return bytes([number]) * NBYTES

@stoker.remote(num_cpus=0.5)
def read(number, value):
    return value == bytes([number]) * NBYTES

info = stoker.init(num_cpus=1, resources={"first": 1})
second = spawn_node(
    info.address, token=info.token, num_cpus=1, num_gpus=0, resources={"second": 1}, session_dir=FOLDER
)
try:
    second.wait_ready()
    there = [{"first": 0.1}, {"second": 0.1}]
    refs = [block.options(resources=there[n % 2]).remote(n) for n in range(2 * COUNT)]
    ready, _ = stoker.wait(refs, num_returns=len(refs), timeout=60)
    homes = {node["node_id"]: node["arena_dir"] for node in stoker.nodes()}
    print(len(ready), len(homes), len({os.path.dirname(one) for one in homes.values()}))
    crossed = [read.options(resources=there[1 - n % 2]).remote(n, ref) for n, ref in enumerate(refs)]
    print(all(stoker.get(crossed, timeout=60)))
    print(all(stoker.get(ref, timeout=60) == bytes([n]) * NBYTES for n, ref in enumerate(refs)))
    print("spilled", len(glob.glob(f"{os.environ['STOKER_SESSION_ROOT']}/**/o_*", recursive=True)) > 0)
finally:
    second.stop()
    stoker.shutdown()
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program whose /dev/shm is its own, and small."""
    probe = subprocess.run([*OWN_MEMORY, MOUNT], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    path = folder / "program.py"
    path.write_text(program)
    sessions = folder / "s"
    return subprocess.run(
        [*OWN_MEMORY, f"{MOUNT} && exec {sys.executable} {path} {sessions}/second"],
        env={**os.environ, "STOKER_SESSION_ROOT": str(sessions)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_what_others_take_of_shared_memory_is_not_counted_on(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path)
    assert done.stdout == "15 True\n[100, 101, 77]\nspilled True\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_two_nodes_share_one_small_memory_without_losing_anything(tmp_path: Path) -> None:
    done = run(TWO_NODES, tmp_path)
    assert done.stdout == "24 2 1\nTrue\nTrue\nspilled True\n", done.stderr
    assert done.returncode == 0, done.stderr
