"""An actor inside its worker: its instance, and the threads or loops that run its methods.

Sync actors run in order on the main thread; threaded ones on a pool per concurrency group; async
ones (any method is a coroutine function or async generator) on an event loop per concurrency group,
that of the default group on the main thread. Callers send as soon as there is a worker; no method runs
before the constructor has returned and the gcs has the actor as ALIVE, so calls sent to one that never was
can be sent again. Calls run in the order in which they came (per group). Its end is
:mod:`~stoker.runtime.worker.actor_exit`'s.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError, ObjectLostError, SerializationError, StokerError
from stoker.runtime.actors.info import RESTORE, SAVE, TERMINATE, ActorPayload, is_async
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.tracing.context import RECORDED, TRACES
from stoker.runtime.serialization.exceptions import decode_error, encode_exception, error_info
from stoker.runtime.worker.actor_exit import (
    ActorExit,
    ExitReason,
    requested_reason,
    self_exit_reason,
    system_exit_reason,
)
from stoker.runtime.worker.actor_state.saved_state import SavedState
from stoker.runtime.worker.actor_state.state_saver import StateSaver
from stoker.runtime.worker.event_loops import ConcurrencyGroupLoop, run_loop, start_thread
from stoker_wire.data.frames import FrameCodec
from stoker_wire.errors import FencedError
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.data import Failed, Run
from stoker_wire.messages.work import Actor, ActorState, ReportActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from stoker.runtime.job import JobContext
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.call import Outcome, ReceivedCall
    from stoker.runtime.worker.execute import CallExecutor
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import ActorSpec

_REPORT_S = 60.0
_ASYNC_CONCURRENCY = 1000
_JOIN_S = 2.0
"""How long the other groups of an async actor may take to cancel what has not finished."""
_POLL_S = 0.02
_ABSENT = object()
_RESTORING = f"in {RESTORE}, with the state that an earlier incarnation saved"


class ActorHost:
    """The actor that this worker hosts."""

    def __init__(
        self,
        spec: ActorSpec,
        payload: ActorPayload,
        executor: CallExecutor,
        io: IoThread,
        gcs: Client,
        job: JobContext,
        peer_id: str,
        leave: Callable[[], Awaitable[object]],
        objects: ObjectStore,
    ) -> None:
        self.spec = spec
        self.path = f"/v1/actors/{spec.actor_id}/report"
        self.calls = executor.calls
        self.invoker = executor.invoker
        self.reader = executor.reader
        self.send = executor.report
        self.instance: Any = None
        self.exit = ActorExit(self, io, gcs, peer_id, leave)
        self._executor = executor
        self._io = io
        self._gcs = gcs
        self._job = job
        self._peer_id = peer_id
        self._payload = payload
        self._objects = objects
        self.saver: StateSaver | None = None
        """The saves of its state, if its class has the hooks."""
        self.is_up = False
        """Whether its constructor has returned."""
        self._early: list[ReceivedCall] | None = []
        """Calls that came before it was ALIVE; None from then on."""
        self._is_async = False
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._loops: dict[str, ConcurrencyGroupLoop] = {}
        self._lock = threading.Lock()

    # -- the main thread -------------------------------------------------------------------------

    def serve(self) -> None:
        """Construct the instance, report, and run calls until the actor or its worker ends."""
        try:
            cls, args, kwargs = self._load_constructor()
        except BaseException as error:
            self._constructor_failed(error)
        else:
            self._is_async = is_async(cls)
            if self._is_async:
                run_loop(self, self._serve_async(cls, args, kwargs))
            else:
                self._serve_calls(cls, args, kwargs)
                if self._pools and (saver := self._exit_saver) is not None:
                    saver.save()  # what runs may not end in time
                self.exit.wait_for_calls()
                if (saver := self._exit_saver) is not None:
                    saver.save()
                if self.is_up and (hook := self.exit.call_shutdown_hook()) is not None:
                    asyncio.run(hook)
        if self.exit.begun:
            self.exit.exit_process()

    def _serve_calls(self, cls: type, args: Any, kwargs: dict[str, Any]) -> None:
        try:
            self.instance = cls(*args, **kwargs)
            if (restoring := self._restore()) is not None:
                asyncio.run(restoring)
        except BaseException as error:
            self._constructor_failed(error)
        if self.exit.begun:
            return
        self._start_pools()
        self._begin_calls()
        while (received := self._executor.next_call()) is not None:
            outcome = self.invoker.invoke(received, self.callable_of(received))
            if self.saver is None:
                self.report(outcome)
            else:
                self._answer(outcome, self.saver)
            del received, outcome  # idle workers hold no arguments and no refs

    def _load_constructor(self) -> tuple[type, Any, dict[str, Any]]:
        (run,) = FrameCodec().decode(self._payload.frame)
        assert isinstance(run, Run)
        call, template = run.calls[0], run.templates[0]
        CELLS.enter_actor(template.cell)
        if call.trace:
            TRACES.enter_process(call.trace.lstrip(RECORDED))
        cls = self.invoker.load_function(template.function, self._payload.blob)
        args, kwargs = self.invoker.load_arguments(call)
        return cls, args, kwargs  # type: ignore[return-value]

    def _start_pools(self) -> None:
        threads = self._payload.max_concurrency or 1
        groups = self._payload.concurrency_groups
        if threads > 1 or groups:
            self._pools[""] = ThreadPoolExecutor(threads, "stoker-actor")
            for name, count in groups.items():
                self._pools[name] = ThreadPoolExecutor(count, f"stoker-actor-{name}")

    async def _serve_async(self, cls: type, args: Any, kwargs: dict[str, Any]) -> None:
        try:
            if inspect.iscoroutinefunction(cls.__init__):  # type: ignore[misc]
                self.instance = cls.__new__(cls, *args, **kwargs)
                await self.instance.__init__(*args, **kwargs)
            else:
                self.instance = cls(*args, **kwargs)
            if (restoring := self._restore()) is not None:
                await restoring
        except BaseException as error:
            self._constructor_failed(error)
            return
        if self.exit.begun:
            return
        limit = self._payload.max_concurrency or _ASYNC_CONCURRENCY
        main = ConcurrencyGroupLoop(self, limit, reads=True)
        threads = []
        for name, count in self._payload.concurrency_groups.items():
            self._loops[name] = ConcurrencyGroupLoop(self, count)
            threads.append(start_thread(self, self._loops[name], name))
        self._loops[""] = main
        async with asyncio.TaskGroup() as group:
            saving = group.create_task(self.saver.serve()) if self.saver is not None else None
            await main.serve(self._begin_calls)
            await asyncio.to_thread(_join_all, threads, self.exit.finish_s + _JOIN_S)
            if (saver := self._exit_saver) is not None:
                await asyncio.wrap_future(saver.request())
            if saving is not None:
                saving.cancel()
        if (hook := self.exit.call_shutdown_hook()) is not None:
            await hook

    # -- its state -------------------------------------------------------------------------------

    @property
    def _exit_saver(self) -> StateSaver | None:
        """The saves of its state, if it is to be saved as the actor exits."""
        reason = self.exit.reason
        return self.saver if self.is_up and reason is not None and reason.moves else None

    def _restore(self) -> Coroutine[Any, Any, None] | None:
        """Give ``__stoker_restore__`` an earlier state; return its coroutine, if it is one."""
        restore = self.method(RESTORE)
        if restore is None:
            return None
        saved = SavedState(self.spec, self._io, self._gcs, self._objects)
        self.saver = StateSaver(saved, self._call_save_hook, self._payload.save_interval_s)
        try:
            states = saved.load()
        except (ObjectLostError, SerializationError):
            raise
        except StokerError as error:  # the next incarnation may read it
            cause = ErrorInfo(code="actor_died", message=f"its saved state was not read\n{error}")
            self.exit.begin(ExitReason(1, cause, restart=True))
            return None
        try:
            for state in states:
                result = restore(state)
                if inspect.isawaitable(result):
                    return _noted(result)
        except Exception as error:
            error.add_note(_RESTORING)
            raise
        return None

    def _call_save_hook(self) -> Any:
        save = self.method(SAVE)
        assert save is not None
        return save()

    def _begin_calls(self) -> None:
        """Report that the actor is ALIVE, and then run the calls that have come."""
        self.is_up = True
        report = ReportActor(
            state=ActorState.ALIVE,
            incarnation=self.spec.incarnation,
            worker_id=self._peer_id,
        )
        call = self._gcs.call("POST", self.path, report, timeout_s=_REPORT_S)
        try:
            self._io.run(call, _REPORT_S + 1)
        except FencedError as error:
            # Killed meanwhile, and the nodelet is about to end this process.
            self.exit.begin(self_exit_reason(error.message))
            return
        with self._lock:  # calls that arrive now come behind those that waited
            assert self._early is not None
            self._route(self._early)
            self._early = None

    def _constructor_failed(self, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            self.exit.begin(system_exit_reason(error, "its constructor", restart=False))
            return
        failed = encode_exception(error)
        text = str(
            decode_error(Failed(failed.code, failed.message, failed.type_name, failed.traceback))
        )
        cause = ErrorInfo(code=error_info(failed).code, message=f"its constructor raised {text}")
        self.exit.begin(ExitReason(1, cause))

    @functools.cached_property
    def record(self) -> Actor:
        """The gcs's record of the actor (any thread of the user)."""
        path = f"/v1/actors/{self.spec.actor_id}"
        return self._job.http.call("GET", path, reply=Actor)

    # -- what a call runs ------------------------------------------------------------------------

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method of the class, or None; an attribute of the instance does not hide it."""
        instance = self.instance
        cls = type(instance)
        for base in cls.__mro__:
            attribute = base.__dict__.get(name, _ABSENT)
            if attribute is not _ABSENT:
                bind = getattr(type(attribute), "__get__", None)
                return attribute if bind is None else bind(attribute, instance, cls)  # type: ignore[no-any-return]
        return None

    def callable_of(self, received: ReceivedCall) -> Callable[..., Any]:
        """Return the function that a call of this actor runs; its errors come when it is called."""
        name = received.template.function
        try:
            method = self.method(name)
        except Exception as error:  # a descriptor of the user's
            return functools.partial(_raise, error)
        if method is not None:
            return method
        if name == "__stoker_ready__":
            return lambda: None
        if name == "__stoker_call__":
            return lambda function, *args, **kwargs: function(self.instance, *args, **kwargs)
        if name == TERMINATE:
            earlier = self._calls_before(received)
            return self._terminate_async(earlier) if self._is_async else self._terminate(earlier)
        cls = type(self.instance).__name__
        text = f"{cls} has no method {name!r}"
        return functools.partial(_raise, BadRequestError(text, field="method"))

    def _calls_before(self, received: ReceivedCall) -> list[str]:
        """Return the calls that go on while this one begins; those of its own group are behind it."""
        group, own_id = received.template.group, received.call.task_id
        queued = self.calls.queued.copy().values()
        return [
            *(task_id for task_id in self.calls.running.copy() if task_id != own_id),
            *(other.call.task_id for other in queued if other.template.group != group),
        ]

    def _terminate(self, earlier: list[str]) -> Callable[..., None]:
        def terminate(why: str = "") -> None:
            self._wait_for(earlier)
            self.exit.begin(requested_reason(why))

        return terminate

    def _terminate_async(self, earlier: list[str]) -> Callable[..., Any]:
        async def terminate(why: str = "") -> None:
            await asyncio.to_thread(self._wait_for, earlier)
            self.exit.begin(requested_reason(why))

        return terminate

    def _wait_for(self, task_ids: list[str]) -> None:
        running, queued = self.calls.running, self.calls.queued
        while not self.exit.begun and any(i in running or i in queued for i in task_ids):
            time.sleep(_POLL_S)

    def _answer(self, outcome: Outcome, saver: StateSaver) -> None:
        """Report the end of a call, once the state after it is saved if that is due (no loop)."""
        if not saver.is_due or saver.save():
            self.report(outcome)
        else:
            self.drop(outcome)

    def drop(self, outcome: Outcome) -> None:
        """Leave a call without an answer: the actor goes on elsewhere, without what it did (any thread)."""
        self.calls.running.pop(outcome.received.call.task_id, None)

    def report(self, outcome: Outcome) -> None:
        """Report the end of a call, unless the exit withholds it (any thread)."""
        if not self.exit.begun or not self.exit.withholds(outcome):
            self.send(outcome)

    # -- the loop thread -------------------------------------------------------------------------

    def submit(self, batch: list[ReceivedCall]) -> None:
        """Take new calls, in order; they wait until the actor is ALIVE."""
        if self.exit.begun:
            return  # its loops may be closed; callers learn of the end from the gcs
        with self._lock:
            if self._early is not None:
                self._early += batch
            else:
                self._route(batch)

    def _route(self, batch: list[ReceivedCall]) -> None:
        if self._loops:
            if len(self._loops) == 1:
                self._loops[""].submit(batch)
                return
            by_group: dict[str, list[ReceivedCall]] = {}
            for received in batch:
                by_group.setdefault(received.template.group, []).append(received)
            for group, calls in by_group.items():
                self._loops.get(group, self._loops[""]).submit(calls)
            return
        if self._pools:
            for received in batch:
                pool = self._pools.get(received.template.group, self._pools[""])
                pool.submit(self._run_in_thread, received)
            return
        for received in batch:
            self._executor.enqueue(received)

    def interrupt(self, received: ReceivedCall) -> bool:
        """Cancel a running call of an async actor, or ask one of a threaded actor to stop.

        False for a sync actor, whose main thread must be interrupted by a signal.
        """
        if any(loop.cancel(received.call.task_id) for loop in self._loops.values()):
            return True
        return bool(self._pools or self._loops)

    # -- any thread ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start no more calls, and have the main thread run the exit."""
        if (saver := self._exit_saver) is not None:
            saver.after_each_call = True
            if self._loops:  # what runs may not end in time
                saver.request()
        self._executor.stop()
        for loop in list(self._loops.values()):
            loop.stop()

    def _run_in_thread(self, received: ReceivedCall) -> None:
        if not self.exit.begun and self.calls.take(received):
            try:
                outcome = self.invoker.invoke(received, self.callable_of(received))
                if self.saver is None:
                    self.report(outcome)
                else:
                    self._answer(outcome, self.saver)
            except BaseException as error:  # the pool would swallow it
                self.calls.running.pop(received.call.task_id, None)
                self.exit.on_crash(error)


def _join_all(threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait until all of them have ended, but for this long at most."""
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


async def _noted(restoring: Awaitable[None]) -> None:
    """Await a hook; an error says that it is the hook's."""
    try:
        await restoring
    except Exception as error:
        error.add_note(_RESTORING)
        raise


def _raise(error: Exception, *args: Any, **kwargs: Any) -> None:
    raise error
