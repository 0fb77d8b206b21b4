"""The process of a head or a node: the one place that imports services, to run them in one process.

``python -m stoker.launch head`` is a whole cluster in one process and one loop: gcs, scheduler and
nodelet on SQLite and memory, which talk HTTP over loopback as they would between machines.
``python -m stoker.launch node`` is a nodelet that joins a cluster. Both are spawned by
:mod:`stoker.local.cluster`, for ``stoker.init()`` and ``stoker start``, which imports nothing of this.

The order in ``_run`` is about time and memory: import what services and workers have in common, fork
the fork server, which shares those pages and imports the rest on another core, and only then import
the services.

The process ends by a signal, by the end of its driver's lifeline, or (for a lifeline that a forked child
of the dead driver still holds) when it finds that it has another parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stoker.local.gateway_process import GatewayProcess
from stoker.local.options import json_object, parser
from stoker.local.sessions import (
    DATABASE_NAME,
    TOKEN_NAME,
    LocalInfo,
    new_session,
    prepare,
    process_started,
    session_root,
    sweep,
    write_info,
)
from stoker_wire.constraints.label_selectors import HEAD_LABEL
from stoker_wire.errors import DeadlineExceededError, StokerError, UnavailableError
from stoker_wire.http.auth import check_length, is_loopback, write_private
from stoker_wire.http.cluster_secret import ClusterSecret, find_secret
from stoker_wire.process import garbage
from stoker_wire.process.background import first_cause
from stoker_wire.process.files import umask
from stoker_wire.process.files.open_files import raise_open_files
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stoker_nodelet.service import Nodelet
    from stoker_nodelet.workers.forkserver import ForkServerHandle
    from stoker_wire.http.server.tokens import TokenSigner

_log = logging.getLogger(__name__)
READY_TIMEOUT_S = 60.0
"""How long the services may take until all of them can do their work."""

_READY_POLL_S = 0.005
_ORPHAN_CHECK_S = 1.0


class Running(Protocol):
    """A service that runs, as its ``serve`` returns it."""

    @property
    def url(self) -> str:
        """The address at which the service listens."""
        ...

    async def stop(self) -> None:
        """Stop in good order."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a head or a node until a signal, or the end of its driver; return the exit code."""
    options = parser().parse_args(argv)
    try:
        _run(options)
    except StokerError as error:
        _report(options, {"error": {"code": error.code, "message": str(error)}})
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    for fd in (options.ready_fd, options.lifeline_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    raise_open_files()
    root = session_root()
    session = prepare(options.session_dir) if options.session_dir else new_session(root)

    # Nothing that imports create is garbage; collecting meanwhile costs a tenth of the start.
    gc.disable()
    _import_common()

    from stoker_nodelet.workers.forkserver import fork_forkserver
    from stoker_wire.process.event_loop import new_loop

    forkserver = fork_forkserver(session / "logs" / "forkserver.log")
    umask.restrict()  # workers have that of the user
    settings = Settings.from_env(
        host=options.host,
        port=options.port,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        memory=options.memory,
        resources=json_object("resources", options.resources),
        labels=json_object("labels", options.labels),
        taints=options.taints,
    )

    from stoker_wire.process import log

    log.configure(settings.log_level, settings.log_format)
    serve = _serve_head if options.mode == "head" else _serve_node
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve_until_stopped(serve, options, settings, session, forkserver))
    sweep(root)


def _import_common() -> None:
    """Import what is large and used by services and workers alike."""
    from stoker_wire.process import fast_imports

    fast_imports.import_aiohttp()
    for name in ("aiohttp.web", "uvloop", "stoker_wire.http.client.client"):
        with contextlib.suppress(ModuleNotFoundError):  # uvloop is not everywhere
            importlib.import_module(name)


class _Serve(Protocol):
    async def __call__(
        self,
        options: argparse.Namespace,
        settings: Settings,
        session: Path,
        forkserver: ForkServerHandle,
        running: list[Running],
    ) -> LocalInfo: ...


async def _serve_until_stopped(
    serve: _Serve,
    options: argparse.Namespace,
    settings: Settings,
    session: Path,
    forkserver: ForkServerHandle,
) -> None:
    """Start the services, report it, wait for the end, stop in the reverse order."""
    stopping = _stop_event(options)
    running: list[Running] = []
    try:
        info = await serve(options, settings, session, forkserver, running)
        write_info(info, session_root())
        _report(options, msgspec.to_builtins(info))
        garbage.settle()
        await _wait_for_stop(stopping, orphaned=options.lifeline_fd is not None)
    finally:
        for service in reversed(running):
            await service.stop()


async def _serve_head(
    options: argparse.Namespace,
    settings: Settings,
    session: Path,
    forkserver: ForkServerHandle,
    running: list[Running],
) -> LocalInfo:
    """Start gcs, then scheduler and nodelet side by side; return when all can do their work."""
    from stoker_gcs.service import serve as serve_gcs
    from stoker_scheduler.service import serve as serve_scheduler
    from stoker_wire.http.server.tokens import TokenSigner

    embedded = options.lifeline_fd is not None
    secret = _head_secret(settings, session, embedded)
    signer, token = TokenSigner(secret), secret.values[0]
    database = f"sqlite+aiosqlite:///{session / DATABASE_NAME}"
    gcs = await serve_gcs(
        settings,
        token=signer,
        database_url=database if embedded else settings.database_url or database,
        redis_url=None if embedded else settings.redis_url or None,
        host=settings.host,
        port=settings.port,
    )
    running.append(gcs)

    async def scheduler_ready() -> Running:
        scheduler = await serve_scheduler(
            settings, token=signer, gcs_url=gcs.url, host=settings.host, port=0
        )
        running.append(scheduler)
        await _until_ready("scheduler", scheduler.url, token, settings)
        return scheduler

    async def nodelet_ready() -> Nodelet:
        of_head = msgspec.structs.replace(settings, labels={HEAD_LABEL: "true", **settings.labels})
        nodelet = await _start_nodelet(of_head, signer, gcs.url, 0, session, forkserver)
        running.append(nodelet)
        await _until_ready("nodelet", nodelet.url, token, settings)
        return nodelet

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_until_ready("gcs", gcs.url, token, settings))
            scheduler = group.create_task(scheduler_ready())
            nodelet = group.create_task(nodelet_ready())
    except ExceptionGroup as failed:
        raise first_cause(failed) from failed
    info = _info(
        session, secret, "head", gcs.url, scheduler.result().url, nodelet.result(), embedded
    )
    if options.gateway_port is None:
        return info
    gateway = GatewayProcess(settings, gcs.url, options.gateway_port)
    running.append(await gateway.start())
    return msgspec.structs.replace(info, gateway_url=gateway.url)


async def _serve_node(
    options: argparse.Namespace,
    settings: Settings,
    session: Path,
    forkserver: ForkServerHandle,
    running: list[Running],
) -> LocalInfo:
    """Start a nodelet that joins the cluster at ``options.address``."""
    from stoker_nodelet.service import end_process
    from stoker_wire.http.server.tokens import TokenSigner

    secret = find_secret(settings)
    for one in secret.values:
        check_length(one, settings.host)
    _copy_token(session, secret)
    nodelet = await _start_nodelet(
        settings,
        TokenSigner(secret),
        options.address,
        settings.port,
        session,
        forkserver,
        end_process,
    )
    running.append(nodelet)
    await _until_ready("nodelet", nodelet.url, secret.values[0], settings)
    return _info(session, secret, "node", options.address, "", nodelet, embedded=False)


async def _start_nodelet(
    settings: Settings,
    signer: TokenSigner,
    gcs_url: str,
    port: int,
    session: Path,
    forkserver: ForkServerHandle,
    end: Callable[[], None] | None = None,
) -> Nodelet:
    from stoker_nodelet.service import serve

    return await serve(
        settings,
        token=signer,
        gcs_url=gcs_url,
        host=settings.host,
        port=port,
        session_dir=session,
        num_cpus=settings.num_cpus,
        num_gpus=settings.num_gpus,
        memory=settings.memory,
        resources=settings.resources,
        labels=settings.labels,
        forkserver=forkserver,
        end=end,
    )


def _head_secret(settings: Settings, session: Path, embedded: bool) -> ClusterSecret:
    """Return the cluster's secret; the one that signs is in the session's folder whatever its source.

    A fresh one, unless the user gave one; beyond loopback it must be given (``find_token``).
    """
    given = settings.token or "token_file" in settings.sources or not is_loopback(settings.host)
    if embedded or not given:
        return ClusterSecret.of_file(session / TOKEN_NAME)
    secret = find_secret(settings, host=settings.host)
    _copy_token(session, secret)
    return secret


def _copy_token(session: Path, secret: ClusterSecret) -> None:
    """Keep what signs in the session's folder, for the commands of this machine."""

    def copy() -> None:
        try:
            write_private(session / TOKEN_NAME, f"{secret.values[0]}\n")
        except OSError as error:
            _log.warning("cannot write %s: %s", session / TOKEN_NAME, error)

    copy()
    secret.on_change(copy)


def _info(
    session: Path,
    secret: ClusterSecret,
    role: str,
    gcs_url: str,
    scheduler_url: str,
    nodelet: Nodelet,
    embedded: bool,
) -> LocalInfo:
    return LocalInfo(
        role=role,
        gcs_url=gcs_url,
        scheduler_url=scheduler_url,
        nodelet_url=nodelet.url,
        nodelet_unix=nodelet.identity.unix,
        node_id=nodelet.node_id,
        host_id=nodelet.identity.host_id,
        arena_dir=str(nodelet.identity.arena_dir),
        session_dir=str(session),
        token_file=str(secret.path or session / TOKEN_NAME),
        pid=os.getpid(),
        pid_started=process_started(os.getpid()),
        embedded=embedded,
        started_at_s=time.time(),
    )


async def _until_ready(name: str, url: str, token: str, settings: Settings) -> None:
    """Poll ``/readyz`` until the service is ready; its last answer is the cause of a timeout."""
    from stoker_wire.http.client.client import Client

    cause = "it has not answered"
    try:
        async with (
            asyncio.timeout(READY_TIMEOUT_S),
            Client(url, token=token, peer="head", settings=settings) as client,
        ):
            while True:
                try:
                    await client.call("GET", "/readyz", retry=False)
                except UnavailableError as error:
                    cause = str(error)
                    await asyncio.sleep(_READY_POLL_S)
                else:
                    return
    except TimeoutError:
        raise DeadlineExceededError(
            f"the {name} at {url} was not ready within {READY_TIMEOUT_S:g} s\n{cause}"
        ) from None


# -- the end of the process ----------------------------------------------------------------------------


def _stop_event(options: argparse.Namespace) -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and the end of the lifeline set."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(130)  # the second signal: the fork server cleans up
        stopping.set()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    if options.lifeline_fd is not None:

        def on_lifeline() -> None:
            if not os.read(options.lifeline_fd, 4096):
                loop.remove_reader(options.lifeline_fd)
                stopping.set()

        loop.add_reader(options.lifeline_fd, on_lifeline)
    return stopping


async def _wait_for_stop(stopping: asyncio.Event, *, orphaned: bool) -> None:
    """Wait for ``stopping`` or, with ``orphaned``, until the parent is another process.

    A child that the driver forked may hold a copy of the lifeline, which then does not end.
    """
    parent = os.getppid()
    while True:
        try:
            async with asyncio.timeout(_ORPHAN_CHECK_S if orphaned else None):
                await stopping.wait()
            return
        except TimeoutError:
            if os.getppid() != parent:
                return


def _report(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Write the one line for which the spawner waits."""
    if options.ready_fd is None:
        return
    try:
        os.write(options.ready_fd, msgspec.json.encode(line) + b"\n")
        os.close(options.ready_fd)
    except OSError:
        pass  # the spawner is gone: its lifeline ends
    options.ready_fd = None
