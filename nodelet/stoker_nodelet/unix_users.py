"""Unix users as whom a nodelet that is root runs jobs (``run_as``): looked up, and given what is theirs.

The account must be known on the node: a user is named by name, whose uid and groups the node's own user
database has. Nothing here falls back to root.

``python -m stoker_nodelet.unix_users USER COMMAND...`` becomes the user of that JSON, and runs a command.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stoker_wire.errors import RuntimeEnvSetupError, StartError
from stoker_wire.http.auth import SECRETS

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_NO_NEW_PRIVS = 38


class BecomeError(Exception):
    """A process that cannot be a user's; its text says why, with the fix."""


@dataclass(frozen=True, slots=True)
class UnixUser:
    """An account of this machine that is neither root nor the nodelet's own."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that say who a process is."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def command(self, command: list[str]) -> list[str]:
        """Return a command of root's that runs ``command`` as this user."""
        user = msgspec.json.encode(self).decode()
        return [sys.executable, "-P", "-m", "stoker_nodelet.unix_users", user, *command]

    def environ(self) -> dict[str, str]:
        """Return the environment of such a process: this one's, without what is secret."""
        inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
        return {**inherited, **self.variables}


def find_user(name: str, node_id: str) -> UnixUser | None:
    """Return an account; None if it is this process's own. RuntimeEnvSetupError if it cannot be used."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise RuntimeEnvSetupError(
            f"run_as: there is no Unix user {name!r} on node {node_id}\n"
            "create it there, as on every node, or make the token for another: stoker token create --run-as"
        ) from None
    if entry.pw_uid == 0:
        raise RuntimeEnvSetupError(
            f"run_as: {name!r} is root on node {node_id}, and jobs do not run as root\n"
            "make the token for another user: stoker token create --run-as"
        )
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise RuntimeEnvSetupError(
            f"run_as: node {node_id} cannot run anything as {name!r}, as its nodelet runs as "
            f"{_name_of(os.geteuid())}\n"
            f"start it as root or as {name}, or keep the work from this node by labels"
        )
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return UnixUser(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)


def check_default(name: str, node_id: str) -> None:
    """Raise StartError if the user of ``STOKER_RUN_AS`` cannot be used here."""
    try:
        if name:
            find_user(name, node_id)
    except RuntimeEnvSetupError as error:
        problem = str(error).partition("\n")[0].removeprefix("run_as: ")
        raise StartError(
            f"STOKER_RUN_AS={name!r} is no user for this node\n{problem}\n"
            "set it to a user that is there, and start the nodelet as root"
        ) from None


@dataclass(frozen=True, slots=True)
class UnixUsers:
    """The users of one node's jobs; those of jobs that name none run as ``default``, if that is set."""

    node_id: str
    default: str = ""

    async def find(self, run_as: str) -> UnixUser | None:
        """Return the user of a job; None for the nodelet's own. RuntimeEnvSetupError says what is wrong."""
        name = run_as or self.default
        # A user database may be a server that takes its time.
        return await asyncio.to_thread(find_user, name, self.node_id) if name else None


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def become(user: UnixUser) -> None:
    """Give up root for good: groups first, which root alone may set. BecomeError if that fails."""
    uid, gid = user.uid, user.gid
    try:
        os.setgroups(user.groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise BecomeError(
            f"this nodelet cannot run anything as Unix user {user.name!r}: {error.strerror}\n"
            "root needs the capabilities SETUID and SETGID for it"
        ) from None
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise BecomeError(f"the kernel has not made this process one of {user.name!r}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise BecomeError(f"PR_SET_NO_NEW_PRIVS: {os.strerror(ctypes.get_errno())}")


def execute(user: UnixUser, command: list[str]) -> NoReturn:
    """Turn this process, which is the user's already, into a command; BecomeError if that cannot be."""
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        raise BecomeError(
            f"Unix user {user.name!r} cannot run {command[0]}: {error.strerror}\n"
            "install Stoker, and the Python that its nodelet runs, where all users can read it"
        ) from None


def main() -> None:
    """Run a command as another user."""
    user = msgspec.json.decode(sys.argv[1], type=UnixUser)
    try:
        become(user)
        execute(user, sys.argv[2:])
    except BecomeError as error:
        sys.exit(f"ERROR: {error}")


def make_enterable(folder: Path) -> None:
    """Make a folder of ours that every user can enter and none can list: what is in it has its own mode."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)


def give_folder(folder: Path, user: UnixUser) -> None:
    """Give a folder to a user; OSError if another has it already. Its parent is ours."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), user.uid):
        raise PermissionError(f"{folder} is not {user.name}'s")
    os.chown(folder, user.uid, user.gid, follow_symlinks=False)


def give_tree(folder: Path, user: UnixUser) -> None:
    """Give a folder, with all that this process has put into it, to a user who did not see it yet."""
    for _, folders, files, fd in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, user.uid, user.gid, dir_fd=fd, follow_symlinks=False)
    give_folder(folder, user)


if __name__ == "__main__":
    main()
