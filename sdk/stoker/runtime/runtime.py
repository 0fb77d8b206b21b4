"""One runtime per process: the loop thread, and what user threads may ask of it.

Made by ``stoker.init()`` in drivers and by :mod:`stoker.runtime.worker.main` in workers. It composes objects,
tasks, actors, peers and history, and knows the services' clients; it decides nothing itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.api.context import current_task
from stoker.api.init import LocalNode
from stoker.exceptions import StokerError
from stoker.runtime.actors.calls import ActorCalls
from stoker.runtime.driver.wait_notices import Notices
from stoker.runtime.environment.runtime_env import make_runtime_env, uploader
from stoker.runtime.net.channels import Handler, Peers
from stoker.runtime.net.clients import Services
from stoker.runtime.net.http import HttpClient
from stoker.runtime.net.task_events import History
from stoker.runtime.objects.store import Objects
from stoker.runtime.serialization.exceptions import failed_with
from stoker.runtime.tasks.streams import take_item
from stoker.runtime.tasks.submitter import Tasks
from stoker_wire.arena import Arena
from stoker_wire.errors import DeadlineExceededError
from stoker_wire.messages.common import Address, RuntimeEnv
from stoker_wire.messages.data import (
    Borrow,
    Borrowed,
    Cancel,
    DataMessage,
    Done,
    Failed,
    Item,
    Ref,
    ReleaseBorrow,
    Resolve,
    Resolved,
    Retire,
    Returned,
)
from stoker_wire.messages.work import Owner
from stoker_wire.process import host_identity
from stoker_wire.process.background import Background
from stoker_wire.process.event_loop import new_loop

if TYPE_CHECKING:
    from stoker.runtime.driver.driver import Driver
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.objects.waiters import ThreadWaiter
    from stoker.runtime.worker.execute import Execution
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.work import Job
    from stoker_wire.settings import Settings

T = TypeVar("T")

_TICK_S = 0.1
_IDLE_TICK_S = 0.5
_START_S = 20.0
_JOB_S = 15.0
_BRIEF_S = 0.002
"""A wait shorter than this does not give the CPU back: telling the scheduler would cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is and whom it talks to. ``node`` is the nodelet it shares memory with."""

    peer_id: str
    job_id: str
    namespace: str
    gcs_url: str
    token: str
    node: LocalNode | None
    socket_path: str
    tcp_host: str | None = None
    is_worker: bool = False


class Runtime:
    """The runtime of this process. Thread-safe where a method does not say "loop thread"."""

    def __init__(self, identity: Identity, settings: Settings) -> None:
        self.settings = settings
        self.identity = identity
        self.job_id = identity.job_id
        self._namespace = identity.namespace
        self.token = identity.token
        self.node = identity.node
        self.host_id = host_identity.host_id()
        self.address = Address(
            identity.peer_id,
            identity.node.node_id if identity.node else "",
            self.host_id,
            identity.socket_path,
            "",
        )
        self.arena = Arena(identity.node.arena_dir) if identity.node else None
        self.running = True
        self.lost: Failed | None = None
        """Why nothing can run any more, once the cluster is gone."""
        self.execution: Execution | None = None
        self.driver: Driver | None = None
        self._job_env: RuntimeEnv | None = None
        self._lease_env: RuntimeEnv | None = None
        self.loop = new_loop()
        self.function_cache: dict[str, Any] = {}
        self._awake = False
        self._thread: threading.Thread | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()

    # -- life ------------------------------------------------------------------------------------

    def start(self, routes: dict[tuple[str, str], Handler] | None = None) -> None:
        """Start the loop thread; returns when the process can be reached by others."""
        self._thread = threading.Thread(target=self._run_loop, name="stoker-io", daemon=True)
        self._thread.start()
        self.run(self._start(routes or {}), _START_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self, routes: dict[tuple[str, str], Handler]) -> None:
        self.background = Background(self.identity.peer_id)
        self.services = Services(self)
        self.gcs = self.services.gcs
        self.objects = Objects(self)
        self.history = History(self)
        self.peers = Peers(self, self._on_messages, self._on_lost)
        self.tasks = Tasks(self)
        self.actors = ActorCalls(self)
        self.notices = Notices(self)
        port = await self.peers.listen(self.identity.socket_path, self.identity.tcp_host, routes)
        if port:
            self.address = Address(
                self.address.peer_id,
                self.address.node_id,
                self.address.host_id,
                self.address.unix,
                f"http://{self.identity.tcp_host}:{port}",
            )
        self.background.spawn(self.history.run(), name="history")
        self.loop.call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Give leases back, send the last records, close lines, end the loop thread."""
        if not self.running:
            return
        self.running = False
        with contextlib.suppress(StokerError, TimeoutError):
            self.run(self._stop(), 8.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not None:
            self._thread.join(5.0)
        if not self.loop.is_running():
            self.loop.close()

    async def _stop(self) -> None:
        self.objects.unseen.job_ends()
        await self.tasks.close()
        self.objects.close()
        self.objects.flush()
        with contextlib.suppress(StokerError, TimeoutError):
            await asyncio.wait_for(self.history.flush(), 3.0)
        await self.peers.close()
        await self.background.close(2.0)
        self.history.close()
        await self.services.close()
        await self.loop.shutdown_default_executor()

    # -- threads ---------------------------------------------------------------------------------

    def on_loop_thread(self) -> bool:
        """Return whether the caller is the loop thread, which must not wait."""
        return threading.current_thread() is self._thread

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` on the loop thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def wake(self) -> None:
        """Have the loop thread take in what user threads left (one wake-up per batch)."""
        if not self._awake:
            self._awake = True
            self.loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._awake = False
        self.tasks.flush()
        self.actors.flush()
        self.objects.flush()

    def lose_cluster(self, error: StokerError) -> None:
        """The cluster is gone for good: fail what waits, and all that comes (loop thread)."""
        self.lost = failed_with(error)
        for task in list(self.tasks.pending.values()):
            self.tasks.fail(task, self.lost, report=False)

    def _tick(self) -> None:
        if self.running:
            self._flush()  # a signal may have come between what a thread left and its wake-up
            self.tasks.tick()
            self.notices.tick()
            if self.execution is not None:
                self.execution.tick()
            busy = self.tasks.busy or (self.execution is not None and self.execution.busy)
            self.loop.call_later(_TICK_S if busy else _IDLE_TICK_S, self._tick)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop thread and wait for it. Not from the loop thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            name = getattr(work, "__qualname__", "a call")
            raise DeadlineExceededError(f"{name} passed its deadline of {timeout_s:g} s") from None

    def wait_on(
        self, waiter: ThreadWaiter, timeout_s: float | None, what: str, entries: Sequence[Entry]
    ) -> bool:
        """Wait for objects; a worker gives its CPU back meanwhile. False if the time passed.

        ``what`` waits for ``entries``, as a driver says where it takes long.
        """
        execution = self.execution
        if execution is None:
            wait = self.notices.begin(what, entries)
            try:
                return waiter.wait(timeout_s)
            except KeyboardInterrupt as stop:
                self.notices.interrupted(wait, stop)
                raise
            finally:
                self.notices.end(wait)
        if not execution.on_task_thread():
            return waiter.wait(timeout_s)
        brief = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        if waiter.wait(brief):
            return True
        with execution.blocked():
            return waiter.wait(None if timeout_s is None else timeout_s - brief)

    async def wait_on_async(
        self, future: asyncio.Future[None], what: str, entries: Sequence[Entry]
    ) -> None:
        """Like :meth:`wait_on`, for a coroutine of a user's loop. Other calls of an async actor
        go on meanwhile; a task that is a coroutine gives its CPU back."""
        execution = self.execution
        if execution is None:
            wait = self.notices.begin(what, entries)
            try:
                await future
            finally:
                self.notices.end(wait)
            return
        if execution.actor is not None or not execution.on_task_thread():
            await future
            return
        if not (await asyncio.wait([future], timeout=_BRIEF_S))[0]:
            with execution.blocked():
                await future

    # -- the job ---------------------------------------------------------------------------------

    def join_job(self, job: Job) -> None:
        """This process works for ``job`` from now on."""
        self.job_id, self._namespace, self._job_env = job.job_id, job.namespace, job.runtime_env

    def as_owner(self) -> Owner:
        """Return this process as the owner of the actors that it creates."""
        execution, mine = self.execution, self.address
        lease = execution.lease if execution is not None else None
        if execution is None or lease is None:
            return Owner(peer_id=mine.peer_id)
        actor = execution.actor.spec if execution.actor is not None else None
        return Owner(
            peer_id=mine.peer_id,
            node_id=lease.node_id,
            node_incarnation=lease.node_incarnation,
            actor_id=actor.actor_id if actor is not None else "",
            incarnation=actor.incarnation if actor is not None else 0,
        )

    def work_for(self, job_id: str, env: RuntimeEnv | None) -> None:
        """This worker has a lease of ``job_id`` now; what it starts inherits the lease's ``env``.

        Of the job it asks for more when it must.
        """
        self._lease_env = env
        if job_id != self.job_id:
            self.job_id, self._namespace, self._job_env = job_id, "", None

    @property
    def namespace(self) -> str:
        """The namespace of the job's named actors (not on the loop thread of a worker)."""
        self._env_of_job()
        return self._namespace

    def _env_of_job(self) -> RuntimeEnv:
        if self._job_env is None:
            lease = self.execution.lease if self.execution is not None else None
            actor_id = lease.actor_id if lease is not None else ""
            self.join_job(self.run(self.services.job_of(self.job_id, actor_id), _JOB_S))
        assert self._job_env is not None
        return self._job_env

    def runtime_env_of(self, user: Any) -> RuntimeEnv:
        """Return the environment of a task or actor that this process starts.

        What its options do not name it has from the task or actor that starts it, in a driver from
        the job. Variables are merged by name, ``py_modules`` and ``kernels`` are added.
        """
        base = self._lease_env or self._env_of_job()
        if not user:
            return base
        made = self.uploaded_env(user)
        return RuntimeEnv(
            env_vars={**base.env_vars, **made.env_vars},
            working_dir=made.working_dir or base.working_dir,
            py_modules=(*base.py_modules, *made.py_modules),
            pip=made.pip or base.pip,
            preload=made.preload or base.preload,
            sys_path=base.sys_path,
            cwd=None if made.working_dir else base.cwd,
            kernels=(*base.kernels, *(k for k in made.kernels if k not in base.kernels)),
        )

    def uploaded_env(self, user: Any) -> RuntimeEnv:
        """Check a user's runtime_env, upload the folders that it names, return it as it travels."""
        if not user:
            return RuntimeEnv()
        return make_runtime_env(user, uploader(self.http))

    @functools.cached_property
    def http(self) -> HttpClient:
        """A synchronous client of the gcs, for user threads."""
        return HttpClient(self.identity.gcs_url, token=self.token)

    # -- messages (loop thread) ------------------------------------------------------------------

    def _on_messages(self, line: Channel, messages: list[DataMessage]) -> None:
        for message in messages:
            kind = type(message)
            if kind is Done:
                self._on_done(line, message)  # type: ignore[arg-type]
            elif kind is Resolve:
                self.objects.borrowing.on_resolve(line, message)  # type: ignore[arg-type]
            elif kind is Resolved:
                self.objects.borrowing.on_resolved(message)  # type: ignore[arg-type]
            elif kind is Borrow:
                self.objects.borrowing.on_borrow(line, message)  # type: ignore[arg-type]
            elif kind is Borrowed:
                self.objects.borrowing.on_borrowed(message)  # type: ignore[arg-type]
            elif kind is ReleaseBorrow:
                self.objects.borrowing.on_unborrow(line, message)  # type: ignore[arg-type]
            elif kind is Returned:
                self.tasks.on_returned(line, message.task_ids)  # type: ignore[union-attr]
            elif kind is Item:
                take_item(self, line, message)  # type: ignore[arg-type]
            elif kind is Retire:
                self.tasks.on_retire(line)
            elif kind is Cancel and message.task_id in self.tasks.pending:  # type: ignore[union-attr]
                # Ours, and a borrower of its ref wants it stopped.
                self.cancel_now(message.task_id, force=message.force, recursive=message.recursive)  # type: ignore[union-attr]
            elif self.execution is not None:
                self.execution.on_message(line, message)

    def _on_done(self, line: Channel, message: Done) -> None:
        escaped: list[str] = []
        for result in message.results:
            if result.task_id not in self.tasks.pending:
                self.objects.discard(result.returns)
            if result.escaped:
                escaped.append(result.task_id)
        rest = self.actors.on_done(line, message.results)
        if rest:
            self.tasks.on_done(line, rest)
        if escaped:
            self.objects.borrowing.release(line, escaped)

    def _on_lost(self, line: Channel) -> None:
        if self.running:
            self.objects.borrowing.on_line_lost(line)
            self.tasks.lost_line(line)
            self.actors.lost_line(line)
        if self.execution is not None:
            self.execution.lost_line(line)

    # -- looking ---------------------------------------------------------------------------------

    def current_task_id(self) -> str:
        """Return the id of the task that the calling thread or coroutine runs, or ''."""
        info = current_task.get()
        return info.task_id if info is not None else ""

    def wire_ref(self, ref: ObjectRef[Any]) -> Ref:
        """Return a ref as it travels."""
        return Ref(ref._entry.object_id, ref._entry.owner or self.address)

    def cancel_task(self, task_id: str, *, force: bool = False, recursive: bool = True) -> None:
        """Stop a task of this process, wherever it is."""
        self.call_soon(lambda: self.cancel_now(task_id, force=force, recursive=recursive))

    def cancel_at(self, owner: Address, task_id: str, *, force: bool, recursive: bool) -> None:
        """Have another process stop a task that it submitted; nothing to do where that is gone."""

        async def tell() -> None:
            with contextlib.suppress(StokerError):
                (await self.peers.line(owner)).post(Cancel(task_id, force, recursive))

        self.call_soon(lambda: self.background.spawn(tell(), name="cancel"))

    def cancel_now(self, task_id: str, *, force: bool, recursive: bool) -> None:
        """Like ``cancel_task`` (loop thread)."""
        if not self.actors.cancel(task_id, force=force, recursive=recursive):
            self.tasks.cancel(task_id, force=force, recursive=recursive)

    def describe_wait(self, entries: list[Entry]) -> str:
        """Say what unsettled objects wait for (at most three of them), a line each."""
        lines = [self.tasks.reports.describe_entry(entry) for entry in entries[:3]]
        more = [f"and {len(entries) - 3} more"] if len(entries) > 3 else []
        return "\n".join((*lines, *more))
