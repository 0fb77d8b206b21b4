"""The start of a process as another Unix user: what a forked child does between its fork and its exec.

The child of a fork server that is root opens the log and binds the socket as root, gives up root for
good, and only then runs a program: an interpreter of its own for a worker (``exec_worker``), a shell for a
driver. So the user's process has nothing of what root's have in memory and open, and root runs no import of
the user's; the price is the start of an interpreter, and pages that are not shared. What fails is told
through a pipe that a successful exec closes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_nodelet.unix_users import BecomeError, UnixUser, become, execute
from stoker_nodelet.workers.reaper import PR_SET_PDEATHSIG, prctl
from stoker_wire.http.server.unix_socket import private_socket

if TYPE_CHECKING:
    from typing import NoReturn

_PERSONAL = (
    *("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK", "MAIL", "SUDO_USER", "SUDO_UID", "SUDO_GID"),
)
"""Variables of the nodelet's own user, which lead another to what is not his."""
_TOLD_S = 5.0
_MAX_TOLD = 4096


def wait_for_exec(told: int) -> str:
    """Return why a child did not become the user's program; nothing once it has."""
    text = b""
    while select.select([told], [], [], _TOLD_S)[0]:
        part = os.read(told, _MAX_TOLD)
        if not part:
            return text.decode(errors="replace")
        text += part
    # A home on a file server that does not answer: it is the worker's start that takes so long.
    return ""


def start(request: dict[str, Any], target: str, parent: int, tell: int) -> NoReturn:
    """Become the user and the program of a request; end this process if that fails."""
    user = msgspec.convert(request["user"], UnixUser)
    try:
        program, kept = _program(request, target)
        _close_all_but(tell, *kept)
        become(user)
        # The change of user has taken this away.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _enter(request["cwd"], user)
        for name in _PERSONAL:
            if name not in request["env"]:
                os.environ.pop(name, None)
        execute(user, program)
    except (OSError, BecomeError) as error:
        os.write(tell, f"run_as: {error}".encode()[:_MAX_TOLD])
    finally:
        os._exit(1)


def _enter(cwd: str, user: UnixUser) -> None:
    """Go to the folder of the runtime environment, else to the user's home, if there is one."""
    if cwd:
        try:
            os.chdir(cwd)
        except OSError as error:
            raise BecomeError(
                f"Unix user {user.name!r} cannot enter {cwd}: {error.strerror}\n"
                "start the driver in a folder that this user can read, or give runtime_env a working_dir"
            ) from None
        return
    try:
        os.chdir(user.home)
    except OSError:
        os.chdir("/")


def _program(request: dict[str, Any], target: str) -> tuple[list[str], tuple[int, ...]]:
    """Return the command to run, and the descriptors that it is to have."""
    if request["argv"]:
        return list(request["argv"]), ()
    listener = private_socket(request["socket_path"])
    start = {
        "boot": request["boot"],
        "socket_fd": listener.fileno(),
        "target": target,
        "sys_path": request["sys_path"],
        "preload": request["preload"],
    }
    # No file, and no argument: the token of the worker is in it.
    boot = os.memfd_create("boot", 0)
    os.write(boot, msgspec.msgpack.encode(start))
    os.lseek(boot, 0, os.SEEK_SET)
    fds = (boot, listener.detach())
    for fd in fds:
        os.set_inheritable(fd, True)
    python = request["python"] or sys.executable
    return [python, "-P", "-m", "stoker_nodelet.workers.exec_worker", str(boot)], fds


def _close_all_but(*fds: int) -> None:
    begin = 3
    for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
        os.closerange(begin, fd)
        begin = fd + 1
