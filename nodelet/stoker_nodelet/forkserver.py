"""The fork server: a small single-threaded process that forks workers from warm imports.

``python -m stoker_nodelet.forkserver`` is started by the nodelet (or, before anything heavy is
imported, by the composition root) through :func:`start_forkserver`, which needs nothing but the
standard library. The process imports the worker's target once, then forks a child per request
that arrives on its control socket: 4 bytes of length, then a msgpack map.

It is the subreaper of all that it forks, and every worker is the subreaper of what *it* starts. So
the tree under a living worker stays whole, and at a worker's death all that it left arrives here as
a child that is no known worker: that is killed. An exit is reported when nothing of the worker is
left. When the control socket closes (the nodelet is gone, however it died) everything is killed.

It must never start a thread or initialise CUDA: both do not survive a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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

from stoker_nodelet import arena, proctree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEFAULT_TARGET = "stoker.worker:main"
HEAD = struct.Struct("!I")
_SWEEP_S = 1.0  # an exit is reported at the latest after this, even if its orphans do not die
_END_S = 4.0  # how long the end may take before the fork server leaves all the same
_REMAINS_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ForkServerHandle:
    """A started fork server: its process, and our end of its control socket."""

    proc: subprocess.Popen[bytes]
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
    command = [executable, "-P", "-m", "stoker_nodelet.forkserver"]
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the fork server until its control socket closes."""
    parser = argparse.ArgumentParser(prog="python -m stoker_nodelet.forkserver")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--preload", action="append", default=[])
    options = parser.parse_args(argv)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=options.fd) as sock:
        sock.set_inheritable(False)
        started_at_s = time.monotonic()
        try:
            target = _imported(options.target, options.preload)
        except BaseException as error:
            import traceback

            text = "".join(traceback.format_exception_only(error)).strip()
            _send(sock, {"ev": "import_failed", "error": text})
            raise
        _send(sock, {"ev": "ready", "import_s": time.monotonic() - started_at_s})
        _Forks(sock, target).serve()


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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


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
        self._buffer = bytearray()
        self._over = False
        self._dismissed = False
        self._remains: list[Path] = []
        """What a nodelet that is killed leaves in shared memory."""
        # Whatever the imports started (a resource tracker) is not an orphan.
        self._ours = set(proctree.children(os.getpid()))
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)

    def _terminated(self, *_: object) -> None:
        self._over = True

    def serve(self) -> None:
        # Objects that exist now never move to another generation, so their pages stay shared.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while not self._over:
                timeout_s = 0.05 if self._exits else None
                control = self._sock.fileno()
                readable, _, _ = select.select([control, self._wake_r], [], [], timeout_s)
                if self._wake_r in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                if control in readable:
                    self._receive()
                self._reap()
        except OSError:
            pass  # the nodelet is gone in the middle of a message
        self._end()

    def _receive(self) -> None:
        import msgspec

        chunk = self._sock.recv(1 << 16)
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
            _send(self._sock, {"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as failure:
            error = f"fork: {failure.strerror}"
            _send(self._sock, {"ev": "fork_failed", "worker_id": worker_id, "error": error})
            return
        if pid == 0:
            self._sock.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            _run_child(request, self._target, parent)
        self._workers[worker_id] = pid
        self._names[pid] = worker_id
        _send(self._sock, {"ev": "forked", "worker_id": worker_id, "pid": pid})

    def _signal(self, worker_id: str, signum: int) -> None:
        pid = self._workers.get(worker_id)
        if pid is None:
            return
        # Not reaped yet, so the pid is still this worker's. Children first: a parent's death
        # would move them here, and cost another round.
        for member in (*reversed(proctree.descendants(pid)), pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signum)

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
        if self._exits:
            self._sweep()

    def _sweep(self) -> None:
        """Kill what dead workers left; report their exits once nothing is left (or it is late)."""
        orphans = set(proctree.children(os.getpid())) - self._names.keys() - self._ours
        for orphan in orphans:
            for member in (*reversed(proctree.descendants(orphan)), orphan):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        late = time.monotonic() - _SWEEP_S
        held = []
        for at_s, message in self._exits:
            if orphans and at_s > late:
                held.append((at_s, message))
            else:
                _send(self._sock, message)
        self._exits = held

    def _end(self) -> None:
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            alive = proctree.descendants(os.getpid())
            for pid in reversed(alive):
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
        """The socket closes a moment before its owner counts as dead."""
        deadline_s = time.monotonic() + _REMAINS_S
        while self._remains and time.monotonic() < deadline_s:
            self._remains = [path for path in self._remains if not arena.remove_abandoned(path)]
            time.sleep(0.01)


def _run_child(request: dict[str, Any], target: Callable[[Any], None], parent: int) -> None:
    """Become a worker (or, with ``argv``, another program). Never returns."""
    code = 1
    try:
        _settle(request, parent)
        if request["argv"]:
            os.execvpe(request["argv"][0], request["argv"], os.environ)
        _be_a_fresh_interpreter(request)
        import msgspec

        from stoker_wire.messages.cluster import WorkerBoot

        target(msgspec.msgpack.decode(request["boot"], type=WorkerBoot))
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if isinstance(leave.code, str):
            sys.stderr.write(f"{leave.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _leave(code)


def _settle(request: dict[str, Any], parent: int) -> None:
    """Own session and process group, die with the fork server, log file, environment, cwd."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    os.environ.update(request["env"])
    if request["cwd"]:
        os.chdir(request["cwd"])


def _be_a_fresh_interpreter(request: dict[str, Any]) -> None:
    """Undo what a fork copies and a started interpreter would have of its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.enable()
    paths = [path for path in request["sys_path"] if path not in sys.path]
    sys.path[:0] = paths
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _leave(code: int) -> None:
    import atexit

    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
