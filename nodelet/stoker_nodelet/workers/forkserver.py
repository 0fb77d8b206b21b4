"""The fork server: a small single-threaded process that forks workers from warm imports.

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
it died) everything else is killed at once, and what a killed nodelet leaves in shared memory and
sockets is removed.

It must never start a thread or initialise CUDA: both do not survive a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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
from typing import TYPE_CHECKING, Any

from stoker_nodelet.objects import arena
from stoker_nodelet.workers import process_tree
from stoker_nodelet.workers.child import PR_SET_CHILD_SUBREAPER, prctl, run_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEFAULT_TARGET = "stoker.runtime.worker.main:main"
HEAD = struct.Struct("!I")
_SWEEP_S = 1.0  # an exit is reported at the latest after this, even if its orphans do not die
_TRACKER_S = 2.0  # how long a dead worker's resource tracker may take to clean up
_END_S = 4.0  # how long the end may take before the fork server leaves all the same
_REMAINS_S = 1.0


@dataclass(frozen=True, slots=True)
class Forked:
    """A child that was forked, as far as it is like a ``Popen``."""

    pid: int

    def wait(self) -> int:
        """Wait until it has ended."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, 0)[1]
        return 0

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ForkServerHandle:
    """A started fork server: its process, and our end of its control socket."""

    proc: subprocess.Popen[bytes] | Forked
    sock: socket.socket
    target: str
    preload: tuple[str, ...]
    python: str


def start_forkserver(
    *,
    target: str = DEFAULT_TARGET,
    preload: Sequence[str] = (),
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
) -> ForkServerHandle:
    """Start a fork server and return at once; it imports ``target`` while the caller goes on.

    ``target`` is ``module:function`` and is called with a ``WorkerBoot`` in each forked child. A
    function ``prepare`` of that module is called once, before the first fork. ``preload`` are
    further modules to import. ``env`` is added to this process's environment.
    """
    executable = python or sys.executable
    ours, theirs = socket.socketpair()
    command = [executable, "-P", "-m", "stoker_nodelet.workers.forkserver"]
    command += ["--fd", str(theirs.fileno()), "--target", target]
    for module in preload:
        command += ["--preload", module]
    with contextlib.ExitStack() as files:
        files.enter_context(theirs)
        output = files.enter_context(log_path.open("ab")) if log_path else None
        proc = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    return ForkServerHandle(proc, ours, target, tuple(preload), executable)


def fork_forkserver(log_path: Path, *, target: str = DEFAULT_TARGET) -> ForkServerHandle:
    """Fork a fork server from this process, which has one thread: it shares what is imported."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the first collection, here or there, would write to each shared page
    pid = os.fork()
    if pid == 0:
        try:
            _detach(theirs.fileno(), log_path)
            _serve(theirs, target, ())
        finally:
            os._exit(1)
    theirs.close()
    return ForkServerHandle(Forked(pid), ours, target, (), sys.executable)


def _detach(kept_fd: int, log_path: Path) -> None:
    """Keep nothing of the parent's but a socket."""
    os.setsid()
    with open(os.devnull, "rb") as null, log_path.open("ab") as log:
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _close_all_but(kept_fd)


def _close_all_but(fd: int) -> None:
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the fork server until its control socket closes."""
    parser = argparse.ArgumentParser(prog="python -m stoker_nodelet.workers.forkserver")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--preload", action="append", default=[])
    options = parser.parse_args(argv)
    _serve(socket.socket(fileno=options.fd), options.target, options.preload)


def _serve(sock: socket.socket, target: str, preload: Sequence[str]) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with sock:
        sock.set_inheritable(False)
        started_at_s = time.monotonic()
        try:
            function = _imported(target, preload)
        except BaseException as error:
            import traceback

            text = "".join(traceback.format_exception_only(error)).strip()
            _send(sock, {"ev": "import_failed", "error": text})
            raise
        _Forks(sock, function).serve(time.monotonic() - started_at_s)


def _imported(target: str, preload: Sequence[str]) -> Callable[[Any], None]:
    import importlib

    for module in preload:
        importlib.import_module(module)
    name, _, function = target.partition(":")
    home = importlib.import_module(name)
    found: Callable[[Any], None] = getattr(home, function)
    importlib.import_module("stoker_wire.messages.cluster")
    if (prepare := getattr(home, "prepare", None)) is not None:
        prepare()
    return found


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    import msgspec

    body = msgspec.msgpack.encode(message)
    sock.sendall(HEAD.pack(len(body)) + body)


class _Forks:
    """The loop: requests in, forks and exits out."""

    def __init__(self, sock: socket.socket, target: Callable[[Any], None]) -> None:
        self._sock = sock
        self._target = target
        self._workers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._exits: list[tuple[float, dict[str, Any]]] = []
        self._trackers: dict[int, float] = {}
        """Resource trackers of dead workers, and since when."""
        self._buffer = bytearray()
        self._over = False
        self._dismissed = False
        self._remains: list[Path] = []
        """What a nodelet that is killed leaves in shared memory."""
        self._owner = os.getppid()
        # Whatever the imports started (a resource tracker) is not an orphan.
        self._ours = set(process_tree.children(os.getpid()))
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)

    def _terminated(self, *_: object) -> None:
        self._over = True

    def serve(self, import_s: float) -> None:
        self._tell({"ev": "ready", "import_s": import_s})
        # Objects that exist now never move to another generation, so their pages stay shared.
        gc.collect()
        gc.freeze()
        gc.disable()
        while not self._over:
            timeout_s = 0.05 if self._exits or self._trackers else None
            control = self._sock.fileno()
            readable, _, _ = select.select([control, self._wake_r], [], [], timeout_s)
            if self._wake_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if control in readable:
                self._receive()
            self._reap()
        self._end()

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # its end is read where its requests end
            _send(self._sock, message)

    def _receive(self) -> None:
        import msgspec

        try:
            chunk = self._sock.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._over = True
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
            elif request["op"] == "remains":
                self._remains.append(Path(request["path"]))
            elif request["op"] == "dismiss":
                self._dismissed = True
            else:
                self._signal(request["worker_id"], request["signum"])

    def _fork(self, request: dict[str, Any]) -> None:
        worker_id = request["worker_id"]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            error = "CUDA is initialised in the fork server (by a preloaded module); cannot fork"
            self._tell({"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as failure:
            error = f"fork: {failure.strerror}"
            self._tell({"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        if pid == 0:
            self._sock.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            run_child(request, self._target, parent)
        self._workers[worker_id] = pid
        self._names[pid] = worker_id
        self._tell({"ev": "forked", "worker_id": worker_id, "pid": pid})

    def _signal(self, worker_id: str, signum: int) -> None:
        pid = self._workers.get(worker_id)
        if pid is None:
            return
        # Not reaped yet, so the pid is still this worker's. Children first: a parent's death
        # would move them here, and cost another round.
        _signal_tree(pid, signum)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._ours.discard(pid)
            worker_id = self._names.pop(pid, None)
            if worker_id is not None:
                del self._workers[worker_id]
                message = {"ev": "exited", "worker_id": worker_id, "pid": pid, "status": status}
                message["peak_rss_bytes"] = usage.ru_maxrss * 1024
                self._exits.append((time.monotonic(), message))
        if self._exits or self._trackers:
            self._sweep()

    def _sweep(self) -> None:
        """Kill what dead workers left; report their exits once nothing is left (or it is late)."""
        now_s = time.monotonic()
        orphans = set(process_tree.children(os.getpid())) - self._names.keys() - self._ours
        trackers = filter(process_tree.is_resource_tracker, orphans)
        self._trackers = {pid: self._trackers.get(pid, now_s) for pid in trackers}
        orphans -= {pid for pid, at_s in self._trackers.items() if now_s - at_s < _TRACKER_S}
        for orphan in orphans:
            _signal_tree(orphan, signal.SIGKILL)
        held = []
        for at_s, message in self._exits:
            if orphans and at_s > now_s - _SWEEP_S:
                held.append((at_s, message))
            else:
                self._tell(message)
        self._exits = held

    def _end(self) -> None:
        signal.set_wakeup_fd(-1)
        _close_all_but(self._sock.fileno())  # a tracker that the imports started ends by that
        started_at_s = time.monotonic()
        while (passed_s := time.monotonic() - started_at_s) < _END_S:
            alive = process_tree.descendants(os.getpid())
            for pid in reversed(alive):
                if passed_s < _TRACKER_S and process_tree.is_resource_tracker(pid):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.wait4(-1, os.WNOHANG)[0]:
                    pass
            if not alive:
                break
            time.sleep(0.005)
        if not self._dismissed:
            self._remove_remains()
        os._exit(0)

    def _remove_remains(self) -> None:
        """Clean up after a nodelet that was killed, or that ended before it could say what is its.

        The socket closes a moment before its owner counts as dead, which our new parent shows.
        """
        deadline_s = time.monotonic() + _REMAINS_S
        while os.getppid() == self._owner and time.monotonic() < deadline_s:
            time.sleep(0.005)
        for path in self._remains:
            arena.remove_abandoned(path)
        if not self._remains:
            arena.sweep()
            arena.sweep(arena.SOCKETS, "stoker-sock-*")


def _signal_tree(pid: int, signum: int) -> None:
    """Signal a process and its descendants, children first; trackers below it live on."""
    below = [
        one for one in process_tree.descendants(pid) if not process_tree.is_resource_tracker(one)
    ]
    for member in (*reversed(below), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signum)


if __name__ == "__main__":
    main()
