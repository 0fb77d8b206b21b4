"""An actor inside its worker: its instance, and how its methods run.

Sync actors run in order on the main thread; threaded ones on a pool per concurrency group; async
ones (any method is a coroutine function or async generator) on one event loop on the main thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker.runtime.failures import error_of, failed_by, info_of
from stoker.runtime.invocation import (
    ActorPayload,
    failure,
    invoke,
    invoke_async,
    load_arguments,
    load_function,
)
from stoker_wire.frames import FrameCodec
from stoker_wire.loops import new_loop
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.data import Failed, Run
from stoker_wire.messages.work import ActorState, ReportActor

if TYPE_CHECKING:
    from stoker.runtime.execution import Execution, Work
    from stoker_wire.messages.cluster import ActorSpec

_REPORT_S = 60.0
_ASYNC_CONCURRENCY = 1000


class ActorHost:
    """The actor that this worker is."""

    def __init__(self, execution: Execution, spec: ActorSpec, payload: ActorPayload) -> None:
        self.spec = spec
        self.instance: Any = None
        self._execution = execution
        self._payload = payload
        self._early: list[Work] = []
        self._ready = False
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._async_tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._over: asyncio.Event | None = None
        self._lock = threading.Lock()

    # -- the main thread -------------------------------------------------------------------------

    def serve(self) -> None:
        """Construct the instance, report, and run calls until the worker ends."""
        try:
            cls, args, kwargs = self._arguments()
            self._pick_mode(cls)
            if self._is_async:
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(self._serve_async(cls, args, kwargs))
                return
            self.instance = cls(*args, **kwargs)
        except BaseException as error:
            self._constructor_failed(error)
            return
        self._start_pools()
        self._alive()
        while (work := self._execution.next_call()) is not None:
            self._execution.report(invoke(self._execution, work, self._method(work)))

    def _arguments(self) -> tuple[type, Any, dict[str, Any]]:
        (run,) = FrameCodec().decode(self._payload.frame)
        assert isinstance(run, Run)
        call, template = run.calls[0], run.templates[0]
        cls = load_function(self._execution, template.function, self._payload.blob)
        args, kwargs = load_arguments(self._execution, call)
        return cls, args, kwargs  # type: ignore[return-value]

    def _pick_mode(self, cls: type) -> None:
        self._is_async = any(
            inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m)
            for _, m in inspect.getmembers(cls, inspect.isfunction)
        )

    def _start_pools(self) -> None:
        threads = self._payload.max_concurrency or 1
        groups = self._payload.concurrency_groups
        if threads > 1 or groups:
            self._pools[""] = ThreadPoolExecutor(threads, "stoker-actor")
            for name, count in groups.items():
                self._pools[name] = ThreadPoolExecutor(count, f"stoker-actor-{name}")

    async def _serve_async(self, cls: type, args: Any, kwargs: dict[str, Any]) -> None:
        limit = self._payload.max_concurrency or _ASYNC_CONCURRENCY
        self._semaphores[""] = asyncio.Semaphore(limit)
        for name, count in self._payload.concurrency_groups.items():
            self._semaphores[name] = asyncio.Semaphore(count)
        self.instance = cls(*args, **kwargs)
        self._over = asyncio.Event()
        async with asyncio.TaskGroup() as self._group:
            self._loop = asyncio.get_running_loop()
            self._alive()
            await self._over.wait()
            for task in self._async_tasks.values():
                task.cancel()

    def _alive(self) -> None:
        with self._lock:  # calls that arrive now come behind the early ones
            self._route(self._early)
            self._early = []
            self._ready = True
        self._tell(
            ReportActor(
                state=ActorState.ALIVE,
                incarnation=self.spec.incarnation,
                worker_id=self._execution.runtime.address.peer_id,
            )
        )

    def _constructor_failed(self, error: BaseException) -> None:
        failed = failed_by(error, skip_frames=1)
        text = str(
            error_of(Failed(failed.code, failed.message, failed.type_name, failed.traceback))
        )
        self._tell(
            ReportActor(
                state=ActorState.DEAD,
                incarnation=self.spec.incarnation,
                worker_id=self._execution.runtime.address.peer_id,
                error=ErrorInfo(
                    code=info_of(failed).code, message=f"its constructor raised {text}"
                ),
            )
        )

    def _tell(self, report: ReportActor) -> None:
        runtime = self._execution.runtime
        path = f"/v1/actors/{self.spec.actor_id}/report"
        runtime.run(runtime.gcs.call("POST", path, report, timeout_s=_REPORT_S), _REPORT_S + 1)

    def _method(self, work: Work) -> Any:
        name = work.template.function
        if name == "__stoker_ready__":
            return lambda: None
        method = getattr(self.instance, name, None)
        if method is None:
            cls = type(self.instance).__name__

            def missing(*args: Any, **kwargs: Any) -> None:
                raise BadRequestError(f"{cls} has no method {name!r}", field="method")

            return missing
        return method

    # -- the loop thread -------------------------------------------------------------------------

    def take(self, batch: list[Work]) -> None:
        """Take new calls, in order; they wait until the constructor has returned."""
        with self._lock:
            if not self._ready:
                self._early += batch
            else:
                self._route(batch)

    def _route(self, batch: list[Work]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_async, batch)
            return
        if self._pools:
            for work in batch:
                pool = self._pools.get(work.template.group, self._pools[""])
                pool.submit(self._run_in_thread, work)
            return
        for work in batch:
            self._execution.enqueue(work)

    def interrupt(self, work: Work) -> bool:
        """Cancel a running call of an async actor; False if it must be done another way."""
        task = self._async_tasks.get(work.call.task_id)
        if task is None or self._loop is None:
            return False
        self._loop.call_soon_threadsafe(task.cancel)
        return True

    # -- pools and the actor's loop --------------------------------------------------------------

    def _run_in_thread(self, work: Work) -> None:
        task_id = work.call.task_id
        if self._execution.unstarted.pop(task_id, None) is not None:
            self._execution.running[task_id] = work
            self._execution.report(invoke(self._execution, work, self._method(work)))

    def _start_async(self, batch: list[Work]) -> None:
        assert self._group is not None
        for work in batch:
            task = self._group.create_task(self._run_async(work), name=work.template.name)
            self._async_tasks[work.call.task_id] = task

    async def _run_async(self, work: Work) -> None:
        task_id = work.call.task_id
        began = time.perf_counter()
        gate = self._semaphores.get(work.template.group, self._semaphores[""])
        try:
            async with gate:
                if self._execution.unstarted.pop(task_id, None) is None:
                    return
                self._execution.running[task_id] = work
                outcome = await invoke_async(self._execution, work, self._method(work))
        except asyncio.CancelledError as error:
            if self._execution.unstarted.pop(task_id, None) is None:
                return
            outcome = failure(self._execution, work, error, began)
        finally:
            self._async_tasks.pop(task_id, None)
        self._execution.report(outcome)
