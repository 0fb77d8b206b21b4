"""The node's shared-memory folder: private, marked with its owner, swept when that is dead.

A nodelet that was killed with SIGKILL cannot clean up. So each arena holds an ``.owner`` file that
names its process for ever (pid namespace, pid and start time), and every nodelet that starts removes
the arenas whose owner is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

from stoker_wire.arena.extents import SPILL
from stoker_wire.process import process_tree

SHM = Path("/dev/shm")
SOCKETS = Path("/tmp")
_OWNER = ".owner"
_MAKING = ".making-"
"""Before the owner in the name of a folder that does not have its mark yet."""


def arena_path(session_dir: Path, node_id: str, root: Path = SHM) -> Path:
    """Return the path of this node's arena."""
    session_id = re.sub(r"[^A-Za-z0-9_.]", "_", session_dir.name)[:64]
    return root / f"stoker-{session_id}-{node_id}"


def socket_folder(session_dir: Path, node_id: str) -> Path:
    """Return where this node's Unix sockets lie: in the session, unless its path is too long."""
    folder = session_dir / "sockets"
    longest = folder / "w_0123456789abcdef.sock"
    return folder if len(os.fsencode(longest)) < 104 else SOCKETS / f"stoker-sock-{node_id}"


def create_owned(path: Path) -> None:
    """Make a folder (mode 0700) and mark it as ours; at no moment it is there without its owner."""
    owner = f"{_pid_namespace()} {os.getpid()} {_own_start()}"
    making = path.with_name(path.name + _MAKING + owner.replace(" ", "-"))
    making.mkdir(mode=0o700)
    (making / _OWNER).write_text(owner)
    making.rename(path)


def remove_owned(path: Path) -> None:
    """Remove the folder, all that is in it, and what it has spilled to disk."""
    spilled = path / SPILL
    if spilled.is_symlink():
        shutil.rmtree(os.path.realpath(spilled), ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path = SHM, pattern: str = "stoker-*") -> list[Path]:
    """Remove the folders of dead nodelets of this user; return what was removed."""
    removed = []
    for path in root.glob(pattern):
        try:
            ours = path.is_dir() and path.lstat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if ours and _is_abandoned(path):
            remove_owned(path)
            removed.append(path)
    return removed


def remove_abandoned(path: Path) -> None:
    """Remove one folder if its nodelet is dead; in a session's folder, the sockets without a listener."""
    if not (path / _OWNER).exists():
        for name in path.glob("*.sock"):
            _remove_without_listener(name)
    elif _is_abandoned(path):
        remove_owned(path)


def remove_left(paths: list[Path]) -> None:
    """Remove what a dead nodelet has left in folders; without any, the folders of all dead ones."""
    for path in paths:
        remove_abandoned(path)
    if not paths:
        sweep()
        sweep(SOCKETS, "stoker-sock-*")


def _remove_without_listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


def _is_abandoned(path: Path) -> bool:
    try:
        owner = (path / _OWNER).read_text()
    except OSError:
        owner = ""
    if not owner:  # it is in the making
        owner = path.name.rpartition(_MAKING)[2].replace("-", " ")
    try:
        namespace, pid, started = owner.split()
    except ValueError:
        return False  # not one of ours
    if namespace != _pid_namespace():
        return False  # another container's; its pids mean nothing here
    return process_tree.start_time(int(pid)) != int(started)


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _own_start() -> int:
    return process_tree.start_time(os.getpid())
