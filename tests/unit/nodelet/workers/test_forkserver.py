"""The fork server of a killed nodelet: it lives on only to clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path


OWNER = """
import os, pathlib, signal, sys
from stoker_nodelet.objects import arena
from stoker_nodelet.workers.forkserver import _send, fork_forkserver
log, folder = map(pathlib.Path, sys.argv[1:])
server = fork_forkserver(log, target="tests.e2e.nodelet.worker_target:main")
arena.create_owned(folder)
(folder / "object").write_text("x")
_send(server.sock, {"op": "cleanup_path", "path": str(folder)})
print(server.proc.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_fork_server_outlives_its_killed_owner_only_to_clean_up(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path / "log"), str(folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40.0, "the fork server ends")
    assert not folder.exists()
