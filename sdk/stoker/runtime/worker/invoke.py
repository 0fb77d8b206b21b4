"""The run of one call: its function, its arguments, the user's code, its results as locations.

Owned by :class:`~stoker.runtime.worker.execute.CallExecutor` and shared by all ways to run: main thread,
pools and event loops. ``invoke`` never raises: each error of the user's code is an outcome, and the
thread that runs calls goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from stoker.exceptions import (
    BadRequestError,
    ObjectLostError,
    SerializationError,
    StokerError,
    TaskError,
)
from stoker.runtime.objects.detached import DetachedResult
from stoker.runtime.objects.refs import CURRENT, REF_MARK, ObjectRef, wire_ref
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.serialization.exceptions import decode_error, encode_error, encode_exception
from stoker.runtime.serialization.pickling import collected_refs, pack, unpack
from stoker.runtime.tasks.streams import AHEAD
from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
from stoker.runtime.worker.process_setup import ProcessSetup
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Call, Failed, Item, Location, Ref, Result, Template

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.net.direct_reader import DirectReader
    from stoker.runtime.objects.values import ValueStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.cancellation import Cancellation
    from stoker_wire.messages.common import Address

_END = object()
_FUNCTIONS = 1000
"""How many functions a worker remembers: a driver may make new ones in a loop."""
_LOAD_S = 86_400.0
"""How long a function may take to come: as long as the gcs may be away."""
_CREDIT_WAIT_S = 600.0


class Invoker:
    """The runner of single calls, on the thread or loop that asks."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        reader: DirectReader,
        clients: ClusterClients,
        job: JobContext,
        values: ValueStore,
        load_argument: Callable[[Ref, Location], Any],
        calls: CallTable,
        cancellation: Cancellation,
        send_item: Callable[[ReceivedCall, Item, list[Any]], None],
    ) -> None:
        self.functions: dict[str, Any] = {}
        """Functions and classes that were unpickled, by their hash."""
        self.on_system_exit: Callable[[ReceivedCall, SystemExit], None] | None = None
        """In an actor: takes the ``SystemExit`` of a call."""
        self._address = address
        self._io = io
        self._reader = reader
        self._clients = clients
        self._job = job
        self._values = values
        self._load_argument = load_argument
        self._calls = calls
        self._cancellation = cancellation
        self._send_item = send_item
        self._process_setup = ProcessSetup()
        self._pid = os.getpid()

    def _actor_id(self) -> str:
        lease = self._job.lease
        return lease.actor_id if lease is not None else ""

    def _task_info(self, call: Call, template: Template, actor_id: str) -> TaskInfo:
        if template.cell:
            CELLS.follow_tasks()
        if call.trace:
            TRACES.begin()
        return TaskInfo(
            call.task_id, template.name, call.attempt, actor_id, template.cell, call.trace
        )

    def invoke(self, received: ReceivedCall, method: Callable[..., Any] | None = None) -> Outcome:
        """Run one call to its end on the calling thread. Never raises."""
        call, template = received.call, received.template
        actor_id = self._actor_id()
        info = self._task_info(call, template, actor_id)
        token, attached = current_task.set(info), None
        received.started_at_s = time.time()
        began = time.perf_counter()
        try:
            try:
                function = method or self.load_function(template.function, template.blob)
                args, kwargs = self.load_arguments(call)
                if info.trace:
                    attached = TRACES.attach_task(info)
                with self._cancellation.interruptible(received):
                    value = function(*args, **kwargs)
                    if inspect.iscoroutine(value):
                        value = _run_coroutine(value)
                    if inspect.isasyncgen(value):
                        value = _iterate_async(value)
                    if template.num_returns > 1 and inspect.isgenerator(value):
                        yielded: list[Any] = []
                        try:
                            yielded.extend(value)
                        except Exception as error:
                            return self._partial_failure(received, yielded, error, began)
                        value = yielded
                    if template.dynamic:
                        value = _refs_to(value, received)
                if received.stop_error is not None and actor_id:
                    raise received.stop_error  # it saw the request, and its value is not a result
                if template.streaming:
                    return self._stream(received, value, began)
                return self._success(received, value, began)
            except BaseException as error:
                if os.getpid() != self._pid:
                    _end_fork(error)
                return self.failure(received, error, began)
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # user code forked and the child returned here: it is no worker
            if attached is not None:
                TRACES.detach(attached)
            current_task.reset(token)

    def load_function(self, digest: str, blob: bytes = b"") -> Callable[..., Any]:
        """Return a function (or class) by its hash; fetch it from the gcs the first time, if need be."""
        if hook := self._job.worker_process_setup:
            self._process_setup.ensure(hook)
        cache = self.functions
        function = cache.get(digest)
        if function is None:
            blob = blob or self._io.run(self._clients.load_function(digest), _LOAD_S)
            if hashlib.sha256(blob).hexdigest() != digest:
                raise SerializationError(
                    "the function is not what it is named by: this worker does not run it\n"
                    f"the SHA-256 of its {len(blob)} bytes is not {digest}"
                )
            try:
                function = cloudpickle.loads(blob)
            except Exception as error:
                raise SerializationError(
                    "the function cannot be unpickled on this worker\n"
                    f"{type(error).__name__}: {error}\n"
                    "a module that it imports must be importable here: ship it with "
                    "runtime_env={'working_dir': ...} or 'py_modules'"
                ) from error
            if REF_MARK not in blob:  # else it would keep objects alive that nobody can reach
                while len(cache) >= _FUNCTIONS:
                    cache.pop(next(iter(cache)), None)
                cache[digest] = function
        return function  # type: ignore[no-any-return]

    def load_arguments(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with the values of top-level refs in their places."""
        values = self._values
        if isinstance(call.args, Failed):
            raise decode_error(call.args)
        data, buffers = values.bytes_of(call.args, "")
        args, kwargs, positions = unpack(data, buffers, what="an argument")
        for position, dep in zip(positions, call.deps, strict=True):
            value = self._load_argument(dep.ref, dep.location)
            if isinstance(position, int):
                args[position] = value
            else:
                kwargs[position] = value
        return args, kwargs

    def _success(self, received: ReceivedCall, value: Any, began: float) -> Outcome:
        duration_s = time.perf_counter() - began
        call, template = received.call, received.template
        count = template.num_returns
        values: list[Any] = [value] if count == 1 else []
        if count > 1:
            sequence = isinstance(value, (tuple, list))
            if not sequence or len(value) != count:
                got = f"{len(value)} values" if sequence else type(value).__name__
                raise BadRequestError(
                    f"{template.name} has num_returns={count} but returned {got}\n"
                    f"a tuple or list of {count} values is needed",
                    field="num_returns",
                )
            values = list(value)
        locations, contained_refs, nbytes = self._store_results(received, values)
        result = Result(call.task_id, call.attempt, locations, duration_s)
        return Outcome(received, result, time.time(), nbytes, contained_refs)

    def _partial_failure(
        self, received: ReceivedCall, values: list[Any], error: Exception, began: float
    ) -> Outcome:
        """Return the outcome of a generator that raised: its values are those yielded before."""
        outcome = self.failure(received, error, began)
        missing = received.template.num_returns - len(values)
        if received.stop_error is None and not outcome.result.retry and values and missing > 0:
            locations, contained_refs, outcome.result_nbytes = self._store_results(received, values)
            outcome.result.returns = (*locations, *outcome.result.returns * missing)
            outcome.contained_refs += contained_refs
        return outcome

    def _store_results(
        self, received: ReceivedCall, values: list[Any]
    ) -> tuple[tuple[Location, ...], tuple[Any, ...], int]:
        """Store results; return their locations, the refs inside them, and their bytes."""
        call = received.call
        # All are packed before the first is stored: one that does not pickle leaves no object behind.
        what = f"result of {received.template.name}"
        if type(values[0]) is DetachedResult:
            return (values[0].location,), (), values[0].nbytes
        packs = [pack(item, what=what) for item in values]
        locations: list[Location] = []
        contained_refs: list[Any] = []
        nbytes = 0
        for index, packed in enumerate(packs):
            location = self._values.store_result(
                return_id(call.task_id, index), packed, received.channel.peer.peer_id
            )
            locations.append(location)
            contained_refs += packed.refs
            nbytes += packed.nbytes
        return tuple(locations), tuple(contained_refs), nbytes

    def failure(self, received: ReceivedCall, error: BaseException, began: float) -> Outcome:
        """Return the outcome of a call whose code (or whose packing) raised."""
        call = received.call
        if isinstance(error, SystemExit) and self.on_system_exit is not None:
            self.on_system_exit(received, error)
        refs: list[Any] = []
        if received.stop_error is not None:
            failed, retry = encode_error(received.stop_error), False
            error.__traceback__ = None  # its frames hold the arguments, and `received` holds it
        else:
            with collected_refs() as refs:
                retry = _should_retry(received, error)  # first: it may add a note
                failed = encode_exception(error, task=received.template.name)
            failed.refs = tuple(wire_ref(r, self._address) for r in refs)
        result = Result(
            call.task_id, call.attempt, (failed,), time.perf_counter() - began, retry=retry
        )
        return Outcome(received, result, time.time(), contained_refs=tuple(refs))

    def _stream(self, received: ReceivedCall, values: Any, began: float) -> Outcome:
        call = received.call
        if not isinstance(values, Iterator):
            raise BadRequestError(
                f"{received.template.name} has num_returns='streaming' but returned a "
                f"{type(values).__name__}, not a generator",
                field="num_returns",
            )
        index, nbytes = 0, 0
        try:
            while True:
                # Interrupted in user code or while it waits, never while an item is being stored.
                with self._cancellation.interruptible(received):
                    value = next(values, _END)
                    self.wait_for_credit(received, index)
                if value is _END:
                    break
                if received.stop_error is not None:
                    raise received.stop_error
                item, refs, size = self._store_item(received, index, value)
                self._send_item(received, item, refs)
                nbytes += size
                index += 1
        finally:
            if inspect.isgenerator(values):
                values.close()  # cancelled outside of it: its own finally runs now, not at collection
        result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
        return Outcome(received, result, time.time(), nbytes)

    def _store_item(
        self, received: ReceivedCall, index: int, value: Any
    ) -> tuple[Item, list[Any], int]:
        call = received.call
        packed = pack(value, what=f"result of {received.template.name}")
        location = self._values.store(
            return_id(call.task_id, index), packed, received.channel.peer.peer_id
        )
        return Item(call.task_id, call.attempt, index, location), packed.refs, packed.nbytes

    def wait_for_credit(self, received: ReceivedCall, index: int) -> None:
        """Wait until the caller has taken enough of the items yielded before."""
        task_id = received.call.task_id
        if index - self._calls.credits.get(task_id, 0) < AHEAD:
            return
        self._reader.demand()
        with self._calls.credit_changed:
            if not self._calls.credit_changed.wait_for(
                lambda: (
                    index - self._calls.credits.get(task_id, 0) < AHEAD
                    or received.channel.closed
                    or received.stop_error is not None
                ),
                timeout=_CREDIT_WAIT_S,
            ):
                raise StokerError(
                    f"{received.template.name} yielded {index} items and its caller took none for "
                    f"{_CREDIT_WAIT_S:g} s"
                )

    async def invoke_async(self, received: ReceivedCall, method: Callable[..., Any]) -> Outcome:
        """Run one call of an async actor on its event loop. Never raises, but at its loop's end."""
        call, template = received.call, received.template
        actor_id = self._actor_id()
        info = self._task_info(call, template, actor_id)
        current_task.set(info)
        received.started_at_s = time.time()
        began = time.perf_counter()
        try:
            if self._is_remote(call):
                args, kwargs = await asyncio.to_thread(self.load_arguments, call)
            else:
                try:
                    args, kwargs = self.load_arguments(call)
                except ObjectLostError:
                    args, kwargs = await asyncio.to_thread(self.load_arguments, call)
            if info.trace:
                TRACES.attach_task(info)  # in this call's context, which ends with it
            value = method(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            if received.stop_error is not None:
                raise received.stop_error  # it saw the request, and its value is not a result
            if template.dynamic:
                if isinstance(value, AsyncIterator):
                    value = iter([each async for each in value])
                value = _refs_to(value, received)
            if template.streaming:
                if isinstance(value, AsyncIterator):
                    return await self._stream_async(received, value, began)
                return self._stream(received, value, began)
            return self._success(received, value, began)
        except BaseException as error:
            return self.failure(received, error, began)

    async def _stream_async(
        self, received: ReceivedCall, values: AsyncIterator[Any], began: float
    ) -> Outcome:
        import asyncio

        call = received.call
        index, nbytes = 0, 0
        async for value in values:
            if index - self._calls.credits.get(call.task_id, 0) >= AHEAD:
                await asyncio.to_thread(self.wait_for_credit, received, index)
            if received.stop_error is not None:
                raise received.stop_error
            item, refs, size = self._store_item(received, index, value)
            self._send_item(received, item, refs)
            nbytes += size
            index += 1
        result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
        return Outcome(received, result, time.time(), nbytes)

    def _is_remote(self, call: Call) -> bool:
        """Return whether an argument is on another node, so that loading it would block the loop."""
        locations = [call.args, *(d.location for d in call.deps)]
        return not all(self._values.is_local(location) for location in locations)


def _end_fork(error: BaseException) -> None:
    """End a process that user code forked, as an interpreter would end it."""
    if isinstance(error, SystemExit):
        code = error.code
        os._exit((code if isinstance(code, int) else int(code is not None)) & 0xFF)
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _refs_to(values: Iterable[Any], received: ReceivedCall) -> tuple[ObjectRef[Any], ...]:
    """Return refs, which this process owns, to all that a generator yields; the last to its error, if any.

    An error for which the call is to be tried again is raised.
    """
    if not isinstance(values, Iterator):
        raise TypeError(
            f"{received.template.name} has num_returns='dynamic' but returned a "
            f"{type(values).__name__}, not a generator"
        )
    objects = CURRENT.get().objects
    refs: list[ObjectRef[Any]] = []
    try:
        for value in values:
            refs.append(objects.put(value))  # noqa: PERF401 (those before an error are kept)
    except Exception as error:
        if not refs or _should_retry(received, error):
            raise
        refs.append(objects.put_failed(encode_exception(error, task=received.template.name)))
    return tuple(refs)


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _iterate_async(values: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterate over an async generator from a thread without a loop."""
    import asyncio

    async def step() -> Any:
        return await anext(values, _END)

    with asyncio.Runner() as runner:
        while (value := runner.run(step())) is not _END:
            yield value


def _should_retry(received: ReceivedCall, error: BaseException) -> bool:
    retry_on = received.template.retry_exceptions
    if not retry_on:
        return False
    try:
        kinds = cloudpickle.loads(retry_on)
        if kinds is True:
            own = isinstance(error, StokerError) and not isinstance(error, TaskError)
            return isinstance(error, Exception) and not own
        return isinstance(error, tuple(kinds))
    except BaseException as problem:  # of the user's code, a module that is not here for one
        text = "".join(traceback.format_exception_only(problem)).strip()
        with contextlib.suppress(Exception):
            error.add_note(f"not tried again: this worker cannot read its retry_exceptions\n{text}")
        return False
