"""The entry point of a worker process. Its main thread runs user code, its loop thread talks.

``main`` is the fork server's target: this module is imported once, before the forks, and starts no
thread at import. ``prepare`` is called once there too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from stoker.runtime.actors.info import ActorPayload
from stoker.runtime.current import set_runtime
from stoker.runtime.process.identity import Identity, LocalNode
from stoker.runtime.process.profiles.stack_signal import write_stacks_at_signal
from stoker.runtime.process.stops import STOPS
from stoker.runtime.process.tracing.context import is_configured
from stoker.runtime.runtime import Runtime
from stoker.runtime.worker.actor import ActorHost
from stoker.runtime.worker.actor_exit import moved_reason, noticed_reason
from stoker.runtime.worker.output import mark_output
from stoker_wire.data import channel
from stoker_wire.data.frames import FrameCodec
from stoker_wire.errors import ConflictError, ForbiddenError, NotFoundError
from stoker_wire.http.auth import Credential, is_loopback
from stoker_wire.http.codec import Codec
from stoker_wire.http.problems import problem_response
from stoker_wire.messages.common import Empty
from stoker_wire.messages.node_api import (
    MoveWorker,
    RegisterWorker,
    RenewToken,
    StopNotice,
    StopReply,
    WorkerBoot,
    WorkerSetup,
)
from stoker_wire.process import host_identity
from stoker_wire.process.event_loop import loop_factory
from stoker_wire.process.search_path import apply_path
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from stoker.runtime.worker.execute import CallExecutor

_REGISTER_S = 30.0
_MSGPACK = "application/msgpack"


def prepare() -> None:
    """Load and cache, once and before any fork, what each worker would make in pages of its own."""
    Settings.from_env()
    host_identity.host_id()
    loop_factory()
    FrameCodec()
    for kind in (WorkerBoot, WorkerSetup, RegisterWorker, ActorPayload, Empty):
        Codec(kind)
    web.Application().router.add_get(channel.PATH, _unrouted)


async def _unrouted(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


def main(boot: WorkerBoot) -> None:
    """Run a worker until the nodelet ends this process."""
    host = boot.nodelet_url.split("//", 1)[-1].rsplit(":", 1)[0]
    identity = Identity(
        peer_id=boot.worker_id,
        gcs_url=boot.gcs_url,
        credential=Credential(boot.token),
        host_id=host_identity.host_id(),
        node=LocalNode(boot.node_id, boot.nodelet_url, boot.arena_dir, boot.session_dir),
        socket_path=boot.socket_path,
        tcp_host=host if boot.run_as or not is_loopback(host) else None,
        is_worker=True,
        is_foreign=bool(boot.run_as),
        socket_fd=boot.socket_fd,
    )
    runtime = Runtime(identity, Settings.from_env(), job_id=boot.job_id)
    set_runtime(runtime)
    mark_output(boot.mark_key)
    write_stacks_at_signal()
    worker = _Worker(runtime)
    runtime.start(
        {
            ("POST", "/v1/assign"): worker.assign,
            ("POST", "/v1/token"): worker.renew_token,
            ("POST", "/v1/notice"): worker.notice,
            ("POST", "/v1/retire"): worker.retire,
            ("POST", "/v1/move"): worker.move,
            ("POST", "/v1/stacks"): worker.read_stacks,
            ("POST", "/v1/profile"): worker.take_profile,
        }
    )
    try:
        runtime.io.run(worker.register(boot), _REGISTER_S)
    except (ConflictError, NotFoundError):
        sys.exit(1)  # its nodelet ended it as it started, and says why
    assert runtime.worker is not None
    runtime.worker.serve()
    runtime.stop()


class _Worker:
    """The HTTP API of a worker, for its nodelet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def _executor(self) -> CallExecutor:
        assert self._runtime.worker is not None
        return self._runtime.worker

    async def register(self, boot: WorkerBoot) -> None:
        """Register this worker's address at the nodelet, and apply the setup that it answers with.

        An answer that was lost is asked for again. Meanwhile the nodelet knows this worker: it may have
        assigned it, with the token of that job, which registers nobody, and then the answer is old.
        """
        job = self._runtime.job
        try:
            setup = await self._runtime.clients.client_of(boot.nodelet_url).call(
                "POST",
                "/v1/workers/register",
                RegisterWorker(
                    worker_id=boot.worker_id,
                    pid=os.getpid(),
                    address=self._runtime.channels.address,
                ),
                reply=WorkerSetup,
                timeout_s=_REGISTER_S,
            )
        except ForbiddenError:
            if job.lease is None:
                raise
        else:
            if job.lease is None:
                self._apply(setup)

    async def assign(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/assign``: work for another lease."""
        self._apply(msgspec.msgpack.decode(await request.read(), type=WorkerSetup))
        return web.Response(body=msgspec.msgpack.encode(Empty()), content_type=_MSGPACK)

    async def renew_token(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/token``: go on with another token of the same job."""
        order = msgspec.msgpack.decode(await request.read(), type=RenewToken)
        if self._runtime.job.lease is None:
            error = ConflictError("this worker has no job yet: an older token is on its way to it")
            status, content_type, body = problem_response(error)
            return web.Response(body=body, status=status, content_type=content_type)
        self._runtime.identity.renew_token(order.token)
        return web.Response(body=msgspec.msgpack.encode(Empty()), content_type=_MSGPACK)

    async def notice(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/notice``, when the stop callbacks have run: this worker is to end."""
        notice = msgspec.msgpack.decode(await request.read(), type=StopNotice)
        lease, count = self._runtime.job.lease, 0
        if lease is not None and lease.lease_id == notice.lease_id:
            self._executor.return_queued_calls()
            count = await STOPS.give(notice.reason, notice.grace_s)
            actor = self._executor.actor
            if notice.saves and actor is not None and actor.is_up and actor.saver is not None:
                actor.exit.begin(noticed_reason(notice.reason))
                await asyncio.Event().wait()  # it ends by itself, or at its time
        reply = StopReply(callbacks=count)
        return web.Response(body=msgspec.msgpack.encode(reply), content_type=_MSGPACK)

    async def move(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/move``: end the actor in order, so that it is started elsewhere."""
        order = msgspec.msgpack.decode(await request.read(), type=MoveWorker)
        actor = self._executor.actor
        if actor is None or not actor.is_up:
            error = ConflictError(
                f"worker {self._runtime.identity.peer_id} hosts no actor that is up"
            )
            status, content_type, body = problem_response(error)
            return web.Response(body=body, status=status, content_type=content_type)
        actor.exit.begin(moved_reason(order.reason))
        return web.Response(body=msgspec.msgpack.encode(Empty()), content_type=_MSGPACK)

    async def retire(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/retire``: end, unless others still need what this process owns."""
        runtime = self._runtime
        entries = list(runtime.objects.table.entries.values())
        # What handles of others hold is the actor, which is counted by itself while it lives.
        held = sum(
            bool(e.borrowers) and e.object_id not in runtime.actors.handle_marks for e in entries
        )
        tasks, actors = len(runtime.pending), runtime.actors.owned_alive()
        if held or tasks or actors or self._executor.busy:
            why = (
                f"worker {runtime.identity.peer_id} owns {held} borrowed objects, {tasks} unfinished "
                f"calls and {actors} living actors"
            )
            error = ConflictError(why, extra={"runs": self._executor.has_calls})
            status, content_type, body = problem_response(error)
            return web.Response(body=body, status=status, content_type=content_type)
        self._executor.stop()
        return web.Response(body=msgspec.msgpack.encode(Empty()), content_type=_MSGPACK)

    async def read_stacks(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/stacks``: the stacks of all threads but this one, and what runs here."""
        from stoker.runtime.process.profiles.stacks import worker_stacks

        stacks = worker_stacks(tuple(self._executor.calls.running))
        return web.Response(body=msgspec.msgpack.encode(stacks), content_type=_MSGPACK)

    async def take_profile(self, request: web.Request) -> web.StreamResponse:
        """Answer ``POST /v1/profile``: the file of what this process records of itself."""
        from stoker.runtime.process.profiles.answer import profile_response

        return await profile_response(request)

    def _configure_tracing(self) -> None:
        """Export spans as the variables say that this worker has now, those of its job included."""
        endpoint = self._runtime.settings.otlp_endpoint
        if not is_configured(os.environ, endpoint):
            return
        from stoker.runtime.process.tracing import tracer

        tracer.configure(os.environ, endpoint, tracer.resource_of(self._runtime.identity))

    def _apply(self, setup: WorkerSetup) -> None:
        lease = setup.lease
        if setup.token:
            self._runtime.identity.credential.replace(setup.token)
        os.environ.update(setup.env_vars)
        apply_path(setup.sys_path)
        if setup.cwd and os.path.isdir(setup.cwd):
            os.chdir(setup.cwd)
        if lease is None:
            return
        STOPS.lease_began()
        self._configure_tracing()
        self._executor.take_lease(
            lease, setup.runtime_env, capture_child_tasks=setup.capture_child_tasks
        )
        if setup.actor is not None and self._executor.actor is None:
            payload = msgspec.msgpack.decode(setup.actor.payload, type=ActorPayload)
            runtime = self._runtime
            host = ActorHost(
                setup.actor,
                payload,
                self._executor,
                runtime.io,
                runtime.clients.gcs,
                runtime.job,
                runtime.identity.peer_id,
                runtime.leave,
                runtime.objects,
            )
            self._executor.become_actor(host)
        self._executor.accept_calls()
