"""The fork server: a small single-threaded process that forks workers from warm imports.

Both of its ends are here: how the nodelet starts it, its loop, and the first steps of a child.

``python -m stoker_nodelet.workers.forkserver`` is started by the nodelet through :func:`start_forkserver`;
the composition root, which has imported much of what workers need by then, forks it instead
(:func:`fork_forkserver`) and shares those pages with it. The process imports the worker's target
once, then forks a child per request that arrives on its control socket: 4 bytes of length, then a
msgpack map.

It is the subreaper of all that it forks, and every worker is the subreaper of what *it* starts. So
the tree under a living worker stays whole, and at a worker's death all that it left arrives here as
a child that is no known worker: that is killed. An exit is reported when nothing of the worker is
left, except resource trackers: they unlink what the worker had in shared memory, end by themselves,
and are killed only if that takes long. When the control socket closes (the nodelet is gone, however
it died) everything else is killed at once, and the folders of a killed nodelet in shared memory
and of its sockets are removed. If this process itself is killed, the *reaper* above it does all that
(:mod:`stoker_nodelet.workers.reaper`).

Of one that runs as another Unix user it forks the child, which then runs a program of its own
(:mod:`stoker_nodelet.workers.run_as`).

It must never start a thread or initialise CUDA: neither survives a fork. For the same reason nothing
here relies on a thread.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from stoker_nodelet.objects import arena
from stoker_nodelet.workers import run_as
from stoker_nodelet.workers.environ import wipe_initial
from stoker_nodelet.workers.reaper import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Owner,
    Reaper,
    fork_below_reaper,
    kill_descendants,
    prctl,
)
from stoker_wire.http.auth import SECRETS
from stoker_wire.process import process_tree
from stoker_wire.process.files import umask
from stoker_wire.process.search_path import apply_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEFAULT_TARGET = "stoker.runtime.worker.main:main"
HEAD = struct.Struct("!I")
_ORPHANS_S = 1.0  # an exit is reported at the latest after this, even if its orphans do not die
_TRACKER_S = 2.0  # the time that a dead worker's resource tracker may take to clean up
_WORKER_OOM_SCORE = 500
_MAX_OOM_SCORE = 1000
_HANDLED = (signal.SIGCHLD, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A child that was forked, with the part of ``Popen``'s interface that is used."""

    pid: int

    def wait(self) -> int:
        """Wait until it has ended."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, 0)[1]
        return 0


@dataclass(frozen=True, slots=True)
class InContainer:
    """The container of a fork server: its command, where it connects to, and what it says."""

    engine: str
    name: str
    proc: subprocess.Popen[bytes]
    socket_path: Path
    log_path: Path


@dataclass(frozen=True, slots=True)
class ForkServerHandle:
    """A started fork server: the reaper above it, which ends with it, and our end of its control socket."""

    proc: subprocess.Popen[bytes] | ForkedProcess
    sock: socket.socket
    target: str
    preload: tuple[str, ...]
    python: str
    container: InContainer | None = None
    """Where it runs, if not beside us: ``sock`` listens then, and it connects to that."""


def start_forkserver(
    *,
    target: str = DEFAULT_TARGET,
    preload: Sequence[str] = (),
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
    prefix: Sequence[str] = (),
) -> ForkServerHandle:
    """Start a fork server and return at once; it imports ``target`` while the caller goes on.

    ``target`` is ``module:function`` and is called with a ``WorkerBoot`` in each forked child. A
    function ``prepare`` of that module is called once, before the first fork. ``preload`` are
    further modules to import. ``env`` is added to this process's environment, ``prefix`` is put before the
    command.
    """
    executable = python or sys.executable
    ours, theirs = socket.socketpair()
    command = command_of(executable, target, preload, ["--fd", str(theirs.fileno())])
    with contextlib.ExitStack() as files:
        files.enter_context(theirs)
        output = files.enter_context(_log(log_path)) if log_path else None
        proc = subprocess.Popen(
            [*prefix, *command],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            umask=umask.INHERITED,
        )
    return ForkServerHandle(proc, ours, target, tuple(preload), executable)


def command_of(
    python: str, target: str, preload: Sequence[str], connection: Sequence[str]
) -> list[str]:
    """Return the command of a fork server of this process."""
    owner = Owner.current()
    command = [python, "-P", "-m", "stoker_nodelet.workers.forkserver"]
    command += ["--owner", str(owner.pid), str(owner.started)]
    command += [*connection, "--target", target]
    for module in preload:
        command += ["--preload", module]
    return command


def fork_forkserver(log_path: Path, *, target: str = DEFAULT_TARGET) -> ForkServerHandle:
    """Fork a fork server from this process, which has one thread: they share the imported pages."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    owner = Owner.current()
    gc.freeze()  # else the first collection, here or there, would write to each shared page
    pid = os.fork()
    if pid == 0:
        try:
            _detach(theirs.fileno(), log_path)
            _serve(theirs, target, (), fork_below_reaper(owner), owner)
        finally:
            os._exit(1)
    theirs.close()
    return ForkServerHandle(ForkedProcess(pid), ours, target, (), sys.executable)


def _detach(kept_fd: int, log_path: Path) -> None:
    """Leave the parent's session and close all that is its, but one socket."""
    os.setsid()
    with open(os.devnull, "rb") as null, _log(log_path) as log:
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _close_all_but(kept_fd)


def _log(path: Path) -> BinaryIO:
    return open(path, "ab", opener=umask.private)


def _close_all_but(*fds: int) -> None:
    start = 3
    for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
        os.closerange(start, fd)
        start = fd + 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run the fork server until its control socket closes."""
    parser = argparse.ArgumentParser(prog="python -m stoker_nodelet.workers.forkserver")
    connection = parser.add_mutually_exclusive_group(required=True)
    connection.add_argument("--fd", type=int)
    connection.add_argument("--connect")
    parser.add_argument("--owner", type=int, nargs=2, required=True)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--preload", action="append", default=[])
    options = parser.parse_args(argv)
    owner = Owner(*options.owner)
    reaper = fork_below_reaper(owner)
    if options.connect:
        control = socket.socket(socket.AF_UNIX)
        control.connect(options.connect)
    else:
        control = socket.socket(fileno=options.fd)
    _serve(control, options.target, options.preload, reaper, owner)


def _serve(
    sock: socket.socket, target: str, preload: Sequence[str], reaper: Reaper, owner: Owner
) -> None:
    for name in SECRETS:
        os.environ.pop(name, None)
    wipe_initial(SECRETS)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with sock:
        sock.set_inheritable(False)
        started_at_s = time.monotonic()
        try:
            for extra in preload:
                importlib.import_module(extra)
            function = import_target(target)
        except BaseException as error:
            import traceback

            text = "".join(traceback.format_exception_only(error)).strip()
            _send(sock, {"ev": "import_failed", "error": text})
            raise
        _ForkLoop(sock, function, target, reaper, owner).serve(time.monotonic() - started_at_s)


def import_target(target: str) -> Callable[[Any], None]:
    """Return the function of a worker, with what it and its module need."""
    name, _, function = target.partition(":")
    module = importlib.import_module(name)
    entry: Callable[[Any], None] = getattr(module, function)
    importlib.import_module("stoker_wire.messages.cluster")
    if (prepare := getattr(module, "prepare", None)) is not None:
        prepare()
    return entry


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    import msgspec

    body = msgspec.msgpack.encode(message)
    sock.sendall(HEAD.pack(len(body)) + body)


class _ForkLoop:
    """The loop of the process: requests in, forks and exits out."""

    def __init__(
        self,
        sock: socket.socket,
        target: Callable[[Any], None],
        target_name: str,
        reaper: Reaper,
        owner: Owner,
    ) -> None:
        self._sock = sock
        self._target = target
        self._target_name = target_name
        self._reaper = reaper
        self._owner = owner
        self._workers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._exits: list[tuple[float, dict[str, Any]]] = []
        self._spared: dict[str, set[int]] = {}
        """Worker that was sent SIGTERM -> its descendants then: they have time until it is sent SIGKILL."""
        self._trackers: dict[int, float] = {}
        """Resource trackers of dead workers, and when each was first seen."""
        self._buffer = bytearray()
        self._ends = False
        self._shutdown = False
        """The nodelet stops in good order, and removes its folders itself."""
        self._cleanup_paths: list[Path] = []
        """Folders that a killed nodelet leaves behind."""
        # A process that the imports started (a resource tracker) is not an orphan.
        self._helpers = set(process_tree.children(os.getpid()))
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)

    def _terminated(self, *_: object) -> None:
        self._ends = True

    def serve(self, import_s: float) -> None:
        self._report({"ev": "ready", "import_s": import_s})
        # Objects that exist now never move to another generation, so their pages stay shared.
        gc.collect()
        gc.freeze()
        gc.disable()
        while not self._ends:
            timeout_s = 0.05 if self._exits or self._trackers else None
            control = self._sock.fileno()
            reaper = self._reaper.fd
            readable, _, _ = select.select([control, self._wake_r, reaper], [], [], timeout_s)
            self._ends |= reaper in readable
            if self._wake_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if control in readable:
                self._receive()
            self._reap()
        self._end()

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the end of the socket is seen by _receive
            _send(self._sock, message)

    def _receive(self) -> None:
        import msgspec

        try:
            chunk = self._sock.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._ends = True
            return
        self._buffer += chunk
        while len(self._buffer) >= HEAD.size:
            (nbytes,) = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + nbytes:
                return
            body = bytes(self._buffer[HEAD.size : HEAD.size + nbytes])
            del self._buffer[: HEAD.size + nbytes]
            request = msgspec.msgpack.decode(body)
            if request["op"] == "fork":
                self._fork(request)
            elif request["op"] == "cleanup_path":
                self._cleanup_paths.append(path := Path(request["path"]))
                self._reaper.add_folder(path)
            elif request["op"] == "shutdown":
                self._shutdown = True
            else:
                self._signal(request["worker_id"], request["signum"])

    def _fork(self, request: dict[str, Any]) -> None:
        worker_id = request["worker_id"]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            error = "CUDA is initialised in the fork server (by a preloaded module); cannot fork"
            self._report({"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        parent = os.getpid()
        user = request.get("user")
        told, tell = os.pipe() if user else (-1, -1)
        # One that is sent to the child at once waits until it has handlers of its own: ours would take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
        except OSError as failure:
            _close(told, tell)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            error = f"fork: {failure.strerror}"
            self._report({"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        if pid == 0:
            self._sock.close()
            os.close(self._reaper.fd)
            os.close(self._wake_r)
            os.close(self._wake_w)
            if user:
                _run_as(request, self._target_name, parent, tell)
            _run_child(request, self._target, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        if user:
            os.close(tell)
            error = run_as.wait_for_exec(told)
            os.close(told)
            if error:
                self._report({"ev": "fork_failed", "worker_id": worker_id, "error": error})
                return
        self._workers[worker_id] = pid
        self._names[pid] = worker_id
        self._report({"ev": "forked", "worker_id": worker_id, "pid": pid})

    def _signal(self, worker_id: str, signum: int) -> None:
        pid = self._workers.get(worker_id)
        if pid is not None:
            # It is not reaped yet, so the pid is still this worker's.
            told = _signal_tree(pid, signum)
            if signum == signal.SIGTERM:
                # A shell dies at once, while what it runs may save what it has.
                self._spared.setdefault(worker_id, told)
        if signum == signal.SIGKILL and self._spared.pop(worker_id, set()):
            self._kill_orphans()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._helpers.discard(pid)
            worker_id = self._names.pop(pid, None)
            if worker_id is not None:
                del self._workers[worker_id]
                message = {"ev": "exited", "worker_id": worker_id, "pid": pid, "status": status}
                message["peak_rss_bytes"] = usage.ru_maxrss * 1024
                message["cpu_s"] = usage.ru_utime + usage.ru_stime
                self._exits.append((time.monotonic(), message))
        if self._exits or self._trackers:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill the orphans of dead workers; report the exits once none is left, or it is late."""
        now_s = time.monotonic()
        orphans = set(process_tree.children(os.getpid())) - self._names.keys() - self._helpers
        trackers = filter(process_tree.is_resource_tracker, orphans)
        self._trackers = {pid: self._trackers.get(pid, now_s) for pid in trackers}
        orphans -= {pid for pid, at_s in self._trackers.items() if now_s - at_s < _TRACKER_S}
        doomed = orphans.difference(*self._spared.values())
        for orphan in doomed:
            _signal_tree(orphan, signal.SIGKILL)
        pending = []
        for at_s, message in self._exits:
            late = at_s <= now_s - _ORPHANS_S
            if (doomed and not late) or self._spared.get(message["worker_id"], set()) & orphans:
                pending.append((at_s, message))
            else:
                self._spared.pop(message["worker_id"], None)
                self._report(message)
        self._exits = pending

    def _end(self) -> None:
        signal.set_wakeup_fd(-1)
        # This ends a tracker that the imports started.
        _close_all_but(self._sock.fileno(), self._reaper.fd)
        gone = kill_descendants()
        self._sock.close()
        if not self._shutdown and self._owner.is_dead():
            arena.remove_left(self._cleanup_paths)
        if gone:
            self._reaper.dismiss()
        os._exit(0)


def _signal_tree(pid: int, signum: int) -> set[int]:
    """Signal a process and its descendants, except resource trackers; return the descendants.

    Children first: a parent's death would make them children of the fork server, for another round.
    """
    below = [
        one for one in process_tree.descendants(pid) if not process_tree.is_resource_tracker(one)
    ]
    for member in (*reversed(below), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signum)
    return set(below)


def _run_child(request: dict[str, Any], target: Callable[[Any], None], parent: int) -> NoReturn:
    """Turn the forked process into a worker (or, with ``argv``, another program)."""

    def run() -> None:
        _apply_request(request, parent)
        os.environ.update(request["env"])
        if request["cwd"]:
            os.chdir(request["cwd"])
        if request["argv"]:
            os.execvpe(request["argv"][0], request["argv"], os.environ)
        _reset_interpreter(request)
        import msgspec

        from stoker_wire.messages.node_api import WorkerBoot

        target(msgspec.msgpack.decode(request["boot"], type=WorkerBoot))

    run_target(run)


def _run_as(request: dict[str, Any], target: str, parent: int, tell: int) -> NoReturn:
    """Turn the forked process into another user's."""
    try:
        _apply_request(request, parent)
        os.fchown(1, request["user"]["uid"], request["user"]["gid"])  # for who opens /dev/stdout
        os.environ.update(request["env"])
        run_as.start(request, target, parent, tell)
    finally:
        os._exit(1)


def run_target(run: Callable[[], None]) -> NoReturn:
    """Run a worker, and end this process as an interpreter would."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            sys.stderr.write(f"{exit_.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _exit(code)


def _offer_to_oom_killer() -> None:
    """Have the kernel, where it must choose, end this process before the services."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        own = int(file.read())
        file.seek(0)
        file.write(str(min(_MAX_OOM_SCORE, own + _WORKER_OOM_SCORE)))


def _apply_request(request: dict[str, Any], parent: int) -> None:
    """Take a session of our own, end with the fork server, open the log, enter the cgroup."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    _offer_to_oom_killer()
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in _HANDLED:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    if request["cgroup"]:
        Path(request["cgroup"], "cgroup.procs").write_text("0")  # or nothing runs


def _reset_interpreter(request: dict[str, Any]) -> None:
    """Undo what a fork copies and a started interpreter would have of its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.enable()
    apply_path(request["sys_path"])
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _exit(code: int) -> NoReturn:
    import atexit

    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
