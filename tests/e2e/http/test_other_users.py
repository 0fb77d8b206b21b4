"""Another user of the machine reads nothing of a cluster, and connects to nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stoker
from tests.e2e.conftest import get

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
ATTEMPTS = """
import json, os, socket, stat, sys
paths = json.load(sys.stdin)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
done = []
for path, kind in paths:
    try:
        if kind == "socket":
            socket.socket(socket.AF_UNIX).connect(path)
        elif kind == "folder":
            os.listdir(path)
            done.append(path)
            open(path + "/planted", "x")
        else:
            open(path, "rb").read(1)
    except PermissionError:
        continue
    except FileNotFoundError:
        continue
    done.append(path)
json.dump(done, sys.stdout)
"""


@pytest.fixture
def session() -> Iterator[Path]:
    """The session of a cluster below a folder that all can enter, started with no umask at all."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    umask = os.umask(0)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        patch.setenv("STOKER_SESSION_ROOT", f"{folder}/sessions")
        patch.setenv("STOKER_SPILL_DIR", f"{folder}/spill")
        try:
            info = stoker.init(num_cpus=1)
            yield Path(info.session_dir)
        finally:
            os.umask(umask)
            stoker.shutdown()


def kind_of(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISSOCK(mode):
        return "socket"
    return "folder" if stat.S_ISDIR(mode) else "file"


def test_another_user_reads_nothing_and_connects_to_nothing(session: Path) -> None:
    @stoker.remote
    def writes(name: str) -> bytes:
        Path(os.environ["STOKER_JOB_OUTPUT_DIR"], name).write_text("of the job")
        return bytes(1 << 20)  # lies in the arena

    kept = writes.remote("result")
    assert len(get(kept)) == 1 << 20
    (node,) = stoker.nodes()
    roots = [session.parent.parent / "spill", session, Path(node["arena_dir"])]
    found = [path for root in roots for path in (root, *root.rglob("*")) if not path.is_symlink()]
    kinds = [kind_of(path) for path in found]
    names = {path.name for path in found}
    assert kinds.count("socket") >= 2, "of the nodelet and of a worker"
    assert {"logs", "spool", "jobs", "result"} <= names
    assert any(name.startswith("o_") for name in names), "an object in the arena"
    asked = [(str(path), kind) for path, kind in zip(found, kinds, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == []
    open_to_others = [
        f"{path} {path.lstat().st_mode & 0o777:o}"
        for path in found
        if path.lstat().st_mode & 0o077 and path.name != "result"  # the user's umask, not ours
    ]
    assert open_to_others == []
