"""The start of a local cluster, for ``stoker.init()`` and ``stoker start --head``.

Spawns ``python -m stoker.launch head`` and waits for its one ready line. It runs inside the user's
driver, so it imports little and never loads a service; the head imports them in a process of its own
while the driver goes on with its own imports (``spawn_local``, then ``wait_ready``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec

from stoker.local.sessions import LocalInfo, new_session, prepare, session_root, with_token
from stoker_wire.errors import StartError, error_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
_LOG_LINES = 20
_LONGEST_ARGUMENT = 128 * 1024 // 4  # 128 KiB of UTF-8
_DROPPED_X_OPTIONS = {"dev", "importtime", "tracemalloc", "showrefcount", "perf", "frozen_modules"}
# They name the cluster of this process, which one of its own must not inherit.
_NOT_INHERITED = (
    "STOKER_ADDRESS", "STOKER_GCS_URL", "STOKER_JOB_ATTEMPT", "STOKER_JOB_ID", "STOKER_NODE_ID",
    "STOKER_PORT", "STOKER_SESSION_DIR", "STOKER_WORKER_ID",
)  # fmt: skip
_EMBEDDED_NOT_INHERITED = ("STOKER_TOKEN", "STOKER_TOKEN_FILE", "STOKER_HOST", "STOKER_DATABASE_URL",
                     "STOKER_REDIS_URL")  # fmt: skip


class LocalCluster:
    """A head process that this process started.

    An embedded one ends when this process does, however that dies: it holds the reading end of a
    pipe whose writing end is this process's.
    """

    def __init__(
        self,
        proc: subprocess.Popen[bytes],
        session_dir: Path,
        mode: str,
        ready_fd: int,
        lifeline_fd: int | None,
    ) -> None:
        self.session_dir = session_dir
        self._mode = mode
        self._proc = proc
        self._ready_fd: int | None = ready_fd
        self._lifeline_fd = lifeline_fd
        self._embedded = lifeline_fd is not None
        self._info: LocalInfo | None = None
        self._owner_pid = os.getpid()

    @property
    def info(self) -> LocalInfo:
        """The addresses of the cluster, with its token. Only after ``wait_ready``."""
        if self._info is None:
            raise StartError("the local cluster is not ready\ncall wait_ready() first")
        return self._info

    @property
    def pid(self) -> int:
        """Process id of the head."""
        return self._proc.pid

    @property
    def log_path(self) -> Path:
        """The file of the head's output."""
        return self.session_dir / "logs" / f"{self._mode}.log"

    def is_alive(self) -> bool:
        """Return whether the head still runs."""
        return self._proc.poll() is None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> LocalInfo:
        """Wait until all services answer. On failure the head is gone, and the error says why."""
        if self._info is not None:
            return self._info
        try:
            line = self._ready_line(timeout_s)
            message: dict[str, Any] = msgspec.json.decode(line) if line else {}
            if "error" in message:
                raise error_for(message["error"]["code"], message["error"]["message"])
            if not message:
                code = self._proc.wait(timeout=5)
                raise StartError(
                    f"the {self._mode} of the local cluster {_exit_text(code)}{self._last_lines()}"
                )
            self._info = with_token(msgspec.convert(message, LocalInfo))
        except BaseException:
            self.stop(timeout_s=2.0)
            raise
        return self._info

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the head and all that it started; after ``timeout_s`` it is killed. Idempotent.

        In a forked child this only forgets the cluster: it is the parent's.
        """
        self._close_fds()
        if os.getpid() != self._owner_pid or self._proc.returncode is not None:
            return
        # Besides the lifeline, of which a forked child of this process may hold a copy.
        with contextlib.suppress(ProcessLookupError):
            self._proc.send_signal(signal.SIGTERM)
        try:
            self._proc.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._proc.kill()
            self._proc.wait(timeout=5.0)

    def detach(self) -> None:
        """Have the head outlive this process (only a head without a lifeline can)."""
        if self._embedded:
            raise StartError("an embedded cluster ends with its driver and cannot be detached")
        self._close_fds()
        self._proc.returncode = 0  # else Popen warns that its child still runs

    def __enter__(self) -> LocalCluster:
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _close_fds(self) -> None:
        for fd in (self._ready_fd, self._lifeline_fd):
            if fd is not None:
                os.close(fd)
        self._ready_fd = self._lifeline_fd = None

    def _ready_line(self, timeout_s: float) -> bytes:
        """Return the head's line; empty if it ended without one."""
        assert self._ready_fd is not None
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._ready_fd], [], [], left_s)[0]:
                raise StartError(
                    f"the local cluster was not ready within {timeout_s:g} s (its {self._mode}, pid "
                    f"{self.pid}, runs but has not said so){self._last_lines()}"
                )
            chunk = os.read(self._ready_fd, 65536)
            if not chunk:
                return b""
            line += chunk
        return line

    def _last_lines(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        shown = "".join(f"\n  {line}" for line in lines) or "\n  (nothing)"
        return f"\nthe last lines of {self.log_path}:{shown}"


class ClusterSpec(TypedDict, total=False):
    """The resources of a head or a node, and its address; None, and what is left out: the default."""

    num_cpus: float | None
    """Those of this machine unless given, as are the next two."""
    num_gpus: float | None
    memory: int | None
    """In bytes."""
    resources: Mapping[str, float] | None
    labels: Mapping[str, str] | None
    taints: str | None
    """Of the node, separated by commas: key=value:NoSchedule."""
    host: str | None
    """Loopback unless given."""
    port: int
    """0 takes a free one."""
    gateway_port: int
    """Of a head: that of its gateway, which there is only if this is given."""
    session_dir: str | Path | None
    """A new one unless given."""


def start_local(
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    **spec: Unpack[ClusterSpec],
) -> LocalCluster:
    """Start an embedded cluster and wait until it is ready. See ``spawn_local``."""
    cluster = spawn_local(environ=environ, **spec)
    cluster.wait_ready(timeout_s)
    return cluster


def spawn_local(
    *,
    environ: Mapping[str, str] | None = None,
    embedded: bool = True,
    **spec: Unpack[ClusterSpec],
) -> LocalCluster:
    """Start a head process and return at once; ``wait_ready`` of the result waits for it.

    ``environ`` is added to this process's environment, for the head and its workers. With
    ``embedded`` (the default) the cluster has a fresh token, listens on loopback, keeps everything
    in its session, and ends with this process; else it is one to be joined by others.
    """
    return _spawn("head", spec, {}, _environment(environ, embedded), embedded)


def spawn_node(
    address: str, *, token: str, token_file: str = "", **spec: Unpack[ClusterSpec]
) -> LocalCluster:
    """Start a nodelet that joins the cluster at ``address``, and return at once.

    With a ``token_file`` it follows that, and so a rotation of the secret.
    """
    env = _environment(secret_variables(token, token_file), embedded=False)
    return _spawn("node", spec, {"address": address}, env, embedded=False)


def secret_variables(token: str, token_file: str) -> dict[str, str]:
    """Return the variables by which a service gets its secret: from the file, if there is one."""
    if token_file:
        return {
            "STOKER_TOKEN_FILE": os.path.abspath(os.path.expanduser(token_file)),
            "STOKER_TOKEN": "",
        }
    return {"STOKER_TOKEN": token}


def _arguments(spec: ClusterSpec) -> dict[str, Any]:
    """Return the command line's options (``stoker.local.options``) and their values."""
    unknown = spec.keys() - ClusterSpec.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    arguments: dict[str, Any] = {"port": 0, **spec}
    arguments.pop("session_dir", None)
    for name in ("resources", "labels"):
        if amounts := arguments.pop(name, None):
            arguments[name] = msgspec.json.encode(dict(amounts)).decode()
    return {name.replace("_", "-"): value for name, value in arguments.items()}


def _spawn(
    mode: str,
    spec: ClusterSpec,
    extra: dict[str, str],
    env: dict[str, str],
    embedded: bool,
) -> LocalCluster:
    arguments, session_dir = {**extra, **_arguments(spec)}, spec.get("session_dir")
    session = (
        prepare(Path(session_dir).absolute()) if session_dir else new_session(session_root(env))
    )
    flags = _interpreter_flags() if embedded else []
    command = [sys.executable, *flags, "-P", "-m", "stoker.launch", mode]
    command += ["--session-dir", str(session)]
    for name, value in arguments.items():
        if value is not None:
            command += [f"--{name}", _argument(session, name, str(value))]
    with contextlib.ExitStack() as on_error:
        ready_r, ready_w = _pipe(on_error)
        child_fds = [ready_w]
        command += ["--ready-fd", str(ready_w)]
        lifeline_w = None
        if embedded:
            lifeline_r, lifeline_w = _pipe(on_error)
            child_fds.append(lifeline_r)
            command += ["--lifeline-fd", str(lifeline_r)]
        with open(session / "logs" / f"{mode}.log", "ab", opener=_private) as log:
            proc = subprocess.Popen(
                command,
                pass_fds=child_fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        on_error.pop_all()
    for fd in child_fds:
        os.close(fd)
    return LocalCluster(proc, session, mode, ready_r, lifeline_w)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _argument(session: Path, name: str, value: str) -> str:
    """Return ``value``, or the name of its file where Linux takes no argument as long (E2BIG)."""
    if len(value) < _LONGEST_ARGUMENT:
        return value
    path = session / f"{name}.json"
    path.write_text(value)
    return f"@{path}"


def _interpreter_flags() -> list[str]:
    """Return the flags of this Python for its workers.

    Not ``-S``, with which no package is found, and no ``-X`` that slows or traces the head.
    """
    given = iter(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
    flags: list[str] = []
    for flag in given:
        if flag == "-X":
            option = next(given)
            if option.partition("=")[0] not in _DROPPED_X_OPTIONS:
                flags += [flag, option]
        elif flag not in ("-S", "-v", "-d"):
            flags.append(flag)
    return flags


def _pipe(on_error: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        on_error.callback(os.close, fd)
    return ends


def _environment(environ: Mapping[str, str] | None, embedded: bool) -> dict[str, str]:
    dropped = _NOT_INHERITED + _EMBEDDED_NOT_INHERITED if embedded else _NOT_INHERITED
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(environ or {})
    return env


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name} before it was ready"
    return f"ended with exit code {code} before it was ready"
