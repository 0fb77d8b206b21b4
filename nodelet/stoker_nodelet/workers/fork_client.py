"""The nodelet's side of fork servers: forks as awaitable calls, exits as callbacks.

``ForkServer`` speaks to one fork server process; ``ForkServerPool`` keeps one per (python, preloaded
modules) and starts further ones on demand. The ``Workers`` of a node own the pool. An exit is always
reported behind the fork that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker_nodelet.environments.images import Container
from stoker_nodelet.unix_users import UnixUser
from stoker_nodelet.workers.containers import Containers, accept, remove
from stoker_nodelet.workers.forkserver import HEAD, ForkServerHandle, start_forkserver
from stoker_wire.errors import RuntimeEnvSetupError, UnavailableError
from stoker_wire.process import process_tree
from stoker_wire.process.background import Background

_FORK_S = 60.0  # covers the import of the target and of the preloaded modules
_IDLE_S = 60.0
"""How long a container stays without a worker."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """One child: a worker (``boot`` is a packed WorkerBoot) or a program (``argv``).

    ``cgroup`` is the folder of the cgroup that it enters first. With ``user`` it becomes that user's, in an
    interpreter of its own: ``python``, with ``preload``, which takes over the socket at ``socket_path``.
    """

    worker_id: str
    log_path: str
    env: dict[str, str]
    cwd: str = ""
    sys_path: tuple[str, ...] = ()
    boot: bytes = b""
    argv: tuple[str, ...] = ()
    cgroup: str = ""
    user: UnixUser | None = None
    python: str = ""
    preload: tuple[str, ...] = ()
    socket_path: str = ""


@dataclass(frozen=True, slots=True)
class ForkExit:
    """The end of a child and of all that it started. ``status`` is as wait(2) gives it.

    ``cpu_s`` is its CPU time and that of what it has waited for; 0 if nobody could tell.
    """

    worker_id: str
    pid: int
    status: int
    peak_rss_bytes: int
    cpu_s: float = 0.0


_Key = tuple[str, tuple[str, ...], Container | None]
"""The interpreter, the preloaded modules and the container of a fork server."""

OnExit = Callable[[ForkExit], None]


@dataclass(slots=True)
class ForkServer:
    """One fork server process. If it dies, so do its workers: ``on_exit`` is called for each."""

    handle: ForkServerHandle
    on_exit: OnExit
    background: Background
    import_s: float = 0.0
    lost: bool = False
    _waiting: dict[str, asyncio.Future[int]] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)
    _import_error: str = ""
    _writer: asyncio.StreamWriter | None = None
    _used_s: float = field(default_factory=time.monotonic)
    _unsent: list[bytes] = field(default_factory=list)

    def start(self) -> None:
        """Begin to read what the process says; forks may be asked for at once."""
        self.background.spawn(self._listen(), name=f"forkserver-{self.handle.proc.pid}")

    async def fork(self, request: ForkRequest) -> int:
        """Return the pid of the new child."""
        if self.lost:
            raise UnavailableError(self._import_error or "the fork server is gone")
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request.worker_id] = waiting
        self._used_s = time.monotonic()
        self._send({"op": "fork", **_fields(request)})
        try:
            async with asyncio.timeout(_FORK_S):
                return await waiting
        except TimeoutError:
            message = f"the fork server did not fork {request.worker_id} within {_FORK_S:g} s"
            raise UnavailableError(message) from None
        finally:
            self._waiting.pop(request.worker_id, None)

    def signal(self, worker_id: str, signum: int) -> None:
        """Send ``signum`` to the child and its descendants, if it still lives."""
        if not self.lost:
            self._send({"op": "signal", "worker_id": worker_id, "signum": int(signum)})

    def add_cleanup_path(self, path: Path) -> None:
        """Have a folder of ours removed if this process is killed."""
        if not self.lost:
            self._send({"op": "cleanup_path", "path": str(path)})

    async def stop(self) -> None:
        """Close the control socket; the process kills all that it forked and ends."""
        if not self.lost:
            self._send({"op": "shutdown"})
        if self._writer is not None:
            self._writer.close()
        else:
            self.handle.sock.close()
        try:
            async with asyncio.timeout(6.0):
                await asyncio.to_thread(self.handle.proc.wait)
        except TimeoutError:
            if self.handle.container is not None:
                await asyncio.to_thread(remove, self.handle.container)
                return
            # The reaper above it ends what it leaves, and itself.
            for pid in process_tree.children(self.handle.proc.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        body = msgspec.msgpack.encode(message)
        frame = HEAD.pack(len(body)) + body
        if self._writer is None:
            self._unsent.append(frame)
        elif not self._writer.is_closing():  # else it ends, and kills what it forked
            self._writer.write(frame)

    @property
    def is_idle(self) -> bool:
        """Return whether it has had no child for long."""
        if self._pids or self._waiting:
            self._used_s = time.monotonic()
            return False
        return time.monotonic() - self._used_s > _IDLE_S

    async def _listen(self) -> None:
        sock, container = self.handle.sock, self.handle.container
        if container is not None:
            try:
                sock = await accept(sock, container)
            except UnavailableError as error:
                self._import_error = error.message
                self._on_lost()
                return
        reader, self._writer = await asyncio.open_connection(sock=sock)
        for frame in self._unsent:
            self._writer.write(frame)
        self._unsent.clear()
        try:
            while True:
                (nbytes,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._on_message(msgspec.msgpack.decode(await reader.readexactly(nbytes)))
        except (asyncio.IncompleteReadError, OSError):
            self._on_lost()
        finally:
            self._writer.close()

    def _on_message(self, message: dict[str, Any]) -> None:
        match message["ev"]:
            case "ready":
                self.import_s = message["import_s"]
            case "import_failed":
                target = self.handle.target
                self._import_error = (
                    f"the fork server could not import {target}\n{message['error']}"
                )
            case "forked":
                self._pids[message["worker_id"]] = message["pid"]
                self._settle(message["worker_id"], message["pid"])
            case "fork_failed":
                self._settle(message["worker_id"], RuntimeEnvSetupError(message["error"]))
            case "exited":
                self._pids.pop(message["worker_id"], None)
                fork_exit = ForkExit(
                    message["worker_id"],
                    message["pid"],
                    message["status"],
                    message["peak_rss_bytes"],
                    message.get("cpu_s", 0.0),  # an image may have an older Stoker
                )
                # After the one who awaits the fork has run: a child may end before that.
                asyncio.get_running_loop().call_soon(self.on_exit, fork_exit)

    def _settle(self, worker_id: str, outcome: int | Exception) -> None:
        waiting = self._waiting.get(worker_id)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, Exception):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

    def _on_lost(self) -> None:
        """Report that all children are gone; kill what *they* had started, which did not die with them."""
        self.lost = True
        error = RuntimeEnvSetupError if self._import_error else UnavailableError
        for worker_id in list(self._waiting):
            self._settle(worker_id, error(self._import_error or "the fork server died"))
        for worker_id, pid in list(self._pids.items()):
            for orphan in process_tree.marked("STOKER_WORKER_ID", worker_id):
                if process_tree.is_resource_tracker(orphan):
                    continue  # it ends when those that it serves are dead
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
            self.on_exit(ForkExit(worker_id, pid, int(signal.SIGKILL), 0))
        self._pids.clear()


def _fields(request: ForkRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ForkRequest.__slots__}


@dataclass(slots=True)
class ForkServerPool:
    """The fork servers of this node, by python executable and preloaded modules.

    ``cleanup_paths`` are the folders that they remove if this process is killed, ``prefix`` is what their
    command begins with. Of an image there is one per container.
    """

    target: str
    log_dir: Path
    on_exit: OnExit
    background: Background
    cleanup_paths: tuple[Path, ...] = ()
    prefix: tuple[str, ...] = ()
    containers: Containers | None = None
    _servers: dict[_Key, ForkServer] = field(default_factory=dict)
    _stopped: bool = False

    def attach(self, handle: ForkServerHandle) -> None:
        """Take over a fork server that was started before the nodelet."""
        self._add((handle.python, handle.preload, None), handle)

    def get(
        self, python: str, preload: tuple[str, ...], container: Container | None = None
    ) -> ForkServer:
        """Return the fork server for these, starting one if there is none alive."""
        if self._stopped:
            raise UnavailableError("this node stops: nothing is forked any more")
        key = (python, preload, container)
        server = self._servers.get(key)
        if server is not None and not server.lost:
            return server
        if container is not None:
            if self.containers is None:
                raise UnavailableError("this node starts no containers")
            handle = self.containers.start(container, target=self.target, preload=preload)
        else:
            log_path = self.log_dir / f"forkserver-{len(self._servers)}.log"
            handle = start_forkserver(
                target=self.target,
                preload=preload,
                python=python,
                log_path=log_path,
                prefix=self.prefix,
            )
        return self._add(key, handle)

    def forget(self, python: str) -> None:
        """Stop the fork servers of an interpreter that is gone; none of them has a worker."""
        for key in [key for key in self._servers if key[0] == python]:
            self.background.spawn(self._servers.pop(key).stop(), name="forkserver-stop")

    def end_idle(self) -> None:
        """Stop the containers that have had no worker for long."""
        idle = [key for key, one in self._servers.items() if key[2] is not None and one.is_idle]
        for key in idle:
            self.background.spawn(self._servers.pop(key).stop(), name="container-stop")

    async def stop(self) -> None:
        """Stop all of them, and with them every worker; no other is started."""
        self._stopped = True
        async with asyncio.TaskGroup() as group:
            for server in self._servers.values():
                group.create_task(server.stop())

    def _add(self, key: _Key, handle: ForkServerHandle) -> ForkServer:
        server = ForkServer(handle, self.on_exit, self.background)
        self._servers[key] = server
        server.start()
        for path in self.cleanup_paths if handle.container is None else ():
            server.add_cleanup_path(path)
        return server
