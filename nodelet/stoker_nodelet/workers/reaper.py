"""The reaper: a small process above each fork server that ends what is left when that is killed.

The kernel ends the workers of a fork server that is killed (PR_SET_PDEATHSIG), but not what their tasks had
started: that becomes the child of the nearest *subreaper* above. So each fork server has one above
it, which is there for nothing else: nodelet, reaper, fork server, workers, in this line. What comes
to it descends from a task; it kills that, and removes the folders of a nodelet that is dead as well.

While all is well it is a shell that waits for the end of a pipe (a Python process would keep megabytes);
the kernel keeps its children and its role when it turns into a program. The fork server holds the other
end of the pipe: it writes the folders to remove, a line each, and an empty line when it ends and
has left nothing. At the end of the pipe without one the shell turns into :func:`main`. A fork server
whose reaper is killed ends itself, and the nodelet starts another: only who kills nodelet, reaper and
fork server in the same moment leaves a task's processes behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from stoker_wire.process import process_tree

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_SCRIPT = """
ended=
while IFS= read -r line; do
    if [ "$line" ]; then set -- "$@" "$line"; else ended=1; fi
done
[ "$ended" ] || exec "$@"
"""
_TRACKER_S = 2.0  # the time that a dead worker's resource tracker may take to clean up
_END_S = 4.0  # after this nobody waits any longer for what does not die
_OWNER_S = 1.0  # the time in which a killed nodelet must count as dead


@dataclass(frozen=True, slots=True)
class Owner:
    """The nodelet of a fork server, as a process that no later one can be taken for."""

    pid: int
    started: int

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        return cls(os.getpid(), process_tree.start_time(os.getpid()))

    def is_dead(self) -> bool:
        """Return whether it has ended; one that was just killed has a moment to do so."""
        deadline_s = time.monotonic() + _OWNER_S
        while process_tree.start_time(self.pid) == self.started:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)
        return True


@dataclass(frozen=True, slots=True)
class Reaper:
    """The reaper above this process: our end of its pipe, which is readable when it is gone."""

    fd: int

    def add_folder(self, path: Path) -> None:
        """Have a folder removed if its nodelet is killed together with this process."""
        self._write(os.fsencode(path))

    def dismiss(self) -> None:
        """Have it end with this process: nothing is left to do."""
        self._write(b"")

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.fd, line + b"\n")


def fork_below_reaper(owner: Owner) -> Reaper:
    """Fork: this process becomes the reaper, and its child returns, to be the fork server."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    theirs, ours = os.pipe()
    if os.fork() == 0:
        os.close(theirs)
        os.setsid()  # whoever kills a process group is not to hit both
        return Reaper(ours)
    try:
        _become_shell(theirs, owner)
    except OSError as error:
        sys.stderr.write(f"cannot run /bin/sh, without which no fork server can be: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(1)


def _become_shell(pipe: int, owner: Owner) -> None:
    os.dup2(pipe, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends with the fork server, which hears them too
    program = [sys.executable, "-P", "-m", "stoker_nodelet.workers.reaper"]
    program += [str(owner.pid), str(owner.started)]
    os.execv("/bin/sh", ["sh", "-c", _SCRIPT, "reaper", *program])


def main() -> None:
    """End what a killed fork server has left: ``PID STARTED FOLDER...`` say whose it was."""
    pid, started, *paths = sys.argv[1:]
    kill_descendants()
    if Owner(int(pid), int(started)).is_dead():
        # Only now: until it has killed, this process is to be as quick as it can be.
        from stoker_nodelet.objects import arena

        arena.remove_left([Path(path) for path in paths])


def kill_descendants() -> bool:
    """Kill all that descends from this process; return whether all of it was gone in time.

    Resource trackers have a while: they unlink what the others leave in shared memory, and end.
    """
    started_at_s = time.monotonic()
    while (passed_s := time.monotonic() - started_at_s) < _END_S:
        # Children first: a parent's death would only give them another.
        for pid in reversed(process_tree.descendants(os.getpid())):
            if passed_s < _TRACKER_S and process_tree.is_resource_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.wait4(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.005)
    return False


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


if __name__ == "__main__":
    main()
