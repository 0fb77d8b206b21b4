"""What one call does: its function, its arguments, the user's code, its results as locations."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from stoker.exceptions import BadRequestError, SerializationError, StokerError, TaskError
from stoker.runtime.objects.refs import REF_MARK, wire_ref
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.serialization.exceptions import error_of, failed_by, failed_with
from stoker.runtime.serialization.pickling import noted_refs, pack, unpack
from stoker.runtime.tasks.streams import AHEAD
from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Call, Dep, Failed, Item, Location, Result

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.values import ValueStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.worker.cancellation import Cancellation
    from stoker_wire.messages.common import Address

_END = object()
_FUNCTIONS = 1000
"""How many functions a worker remembers: a driver may make new ones in a loop."""
_LOAD_S = 60.0
_CREDIT_WAIT_S = 600.0


class Invoker:
    """Runs calls to their end, on whichever thread or loop it is asked."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        clients: ClusterClients,
        job: JobContext,
        values: ValueStore,
        calls: CallTable,
        cancellation: Cancellation,
        send_item: Callable[[ReceivedCall, Item, list[Any]], None],
    ) -> None:
        self.functions: dict[str, Any] = {}
        """Functions and classes that were unpickled, by their hash."""
        self.on_exit: Callable[[ReceivedCall, SystemExit], None] | None = None
        """In an actor: takes the ``SystemExit`` that a call raised."""
        self._address = address
        self._io = io
        self._clients = clients
        self._job = job
        self._values = values
        self._calls = calls
        self._cancellation = cancellation
        self._send_item = send_item
        self._pid = os.getpid()

    def _actor_id(self) -> str:
        lease = self._job.lease
        return lease.actor_id if lease is not None else ""

    def invoke(self, work: ReceivedCall, method: Callable[..., Any] | None = None) -> Outcome:
        """Run one call to its end on the calling thread. Never raises."""
        call, template = work.call, work.template
        actor_id = self._actor_id()
        token = current_task.set(TaskInfo(call.task_id, template.name, call.attempt, actor_id))
        work.started_at_s = time.time()
        began = time.perf_counter()
        try:
            try:
                function = method or self.load_function(template.function)
                args, kwargs = self.load_arguments(call)
                with self._cancellation.allowed(work):
                    value = function(*args, **kwargs)
                    if inspect.iscoroutine(value):
                        value = _run_coroutine(value)
                    if inspect.isasyncgen(value):
                        value = _stepped(value)
                    if template.num_returns > 1 and inspect.isgenerator(value):
                        taken: list[Any] = []
                        try:
                            taken.extend(value)
                        except Exception as error:
                            return self._partial(work, taken, error, began)
                        value = taken
                if work.interrupt is not None and actor_id:
                    raise work.interrupt  # it noticed, and what it returned is not what was asked for
                if template.streaming:
                    return self._streamed(work, value, began)
                return self._outcome(work, value, began)
            except BaseException as error:
                if os.getpid() != self._pid:
                    _end_fork(error)
                return self.failure(work, error, began)
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # user code forked, and its copy came back: there is one worker only
            current_task.reset(token)

    def load_function(self, digest: str, blob: bytes = b"") -> Callable[..., Any]:
        """Return a function (or class) by its hash; fetched from the gcs the first time, if need be."""
        cache = self.functions
        found = cache.get(digest)
        if found is None:
            blob = blob or self._io.run(self._clients.load_function(digest), _LOAD_S)
            try:
                found = cloudpickle.loads(blob)
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
                cache[digest] = found
        return found  # type: ignore[no-any-return]

    def load_arguments(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with the values of top-level refs in their places."""
        values = self._values
        if isinstance(call.args, Failed):
            raise error_of(call.args)
        data, buffers = values.bytes_of(call.args, "")
        args, kwargs, where = unpack(data, buffers, what="an argument")
        for position, dep in zip(where, call.deps, strict=True):
            value = self._value_of(dep)
            if isinstance(position, int):
                args[position] = value
            else:
                kwargs[position] = value
        return args, kwargs

    def _value_of(self, dep: Dep) -> Any:
        if isinstance(dep.location, Failed):
            raise error_of(dep.location)
        data, buffers = self._values.bytes_of(dep.location, dep.ref.object_id)
        return unpack(data, buffers, what=f"the argument {dep.ref.object_id}")

    def _outcome(self, work: ReceivedCall, value: Any, began: float) -> Outcome:
        duration_s = time.perf_counter() - began
        call, template = work.call, work.template
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
        locations, contained, nbytes = self._stored(work, values)
        result = Result(call.task_id, call.attempt, locations, duration_s)
        return Outcome(work, result, time.time(), nbytes, contained)

    def _partial(
        self, work: ReceivedCall, values: list[Any], error: Exception, began: float
    ) -> Outcome:
        """Return the outcome of a generator that raised: what it yielded before that are values."""
        outcome = self.failure(work, error, began)
        missing = work.template.num_returns - len(values)
        if work.interrupt is None and not outcome.result.retry and values and missing > 0:
            locations, contained, outcome.result_nbytes = self._stored(work, values)
            outcome.result.returns = (*locations, *outcome.result.returns * missing)
            outcome.contained += contained
        return outcome

    def _stored(
        self, work: ReceivedCall, values: list[Any]
    ) -> tuple[tuple[Location, ...], tuple[Any, ...], int]:
        """Return the locations of results, the refs inside of them, and their bytes."""
        call = work.call
        # All are packed before the first is stored: one that does not pickle leaves nothing behind.
        packs = [pack(item, what=f"result of {work.template.name}") for item in values]
        locations: list[Location] = []
        contained: list[Any] = []
        nbytes = 0
        for index, packed in enumerate(packs):
            location = self._values.store(
                return_id(call.task_id, index), packed, work.channel.peer.peer_id
            )
            locations.append(location)
            contained += packed.refs
            nbytes += packed.nbytes
        return tuple(locations), tuple(contained), nbytes

    def failure(self, work: ReceivedCall, error: BaseException, began: float) -> Outcome:
        """Return the outcome of a call whose code (or whose packing) raised."""
        call = work.call
        if isinstance(error, SystemExit) and self.on_exit is not None:
            self.on_exit(work, error)
        refs: list[Any] = []
        if work.interrupt is not None:
            failed, retry = failed_with(work.interrupt), False
            error.__traceback__ = None  # its frames hold the arguments, and are held by `work`
        else:
            with noted_refs() as refs:
                retry = _should_retry(work, error)  # first: it may have something to add
                failed = failed_by(error, task=work.template.name)
            failed.refs = tuple(wire_ref(r, self._address) for r in refs)
        result = Result(
            call.task_id, call.attempt, (failed,), time.perf_counter() - began, retry=retry
        )
        return Outcome(work, result, time.time(), contained=tuple(refs))

    def _streamed(self, work: ReceivedCall, values: Any, began: float) -> Outcome:
        call = work.call
        if not isinstance(values, Iterator):
            raise BadRequestError(
                f"{work.template.name} has num_returns='streaming' but returned a "
                f"{type(values).__name__}, not a generator",
                field="num_returns",
            )
        index, nbytes = 0, 0
        try:
            while True:
                # Interrupted in user code or while it waits, never while an item is being stored.
                with self._cancellation.allowed(work):
                    value = next(values, _END)
                    self.wait_for_credit(work, index)
                if value is _END:
                    break
                if work.interrupt is not None:
                    raise work.interrupt
                item, refs, size = self._item(work, index, value)
                self._send_item(work, item, refs)
                nbytes += size
                index += 1
        finally:
            if inspect.isgenerator(values):
                values.close()  # cancelled outside of it: its own finally runs now, not some time
        result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
        return Outcome(work, result, time.time(), nbytes)

    def _item(self, work: ReceivedCall, index: int, value: Any) -> tuple[Item, list[Any], int]:
        call = work.call
        packed = pack(value, what=f"result of {work.template.name}")
        location = self._values.store(
            return_id(call.task_id, index), packed, work.channel.peer.peer_id
        )
        return Item(call.task_id, call.attempt, index, location), packed.refs, packed.nbytes

    def wait_for_credit(self, work: ReceivedCall, index: int) -> None:
        """Wait until the caller has taken enough of the items yielded before."""
        task_id = work.call.task_id
        if index - self._calls.credits.get(task_id, 0) < AHEAD:
            return
        with self._calls.credit_changed:
            if not self._calls.credit_changed.wait_for(
                lambda: (
                    index - self._calls.credits.get(task_id, 0) < AHEAD
                    or work.channel.closed
                    or work.interrupt is not None
                ),
                timeout=_CREDIT_WAIT_S,
            ):
                raise StokerError(
                    f"{work.template.name} yielded {index} items and its caller took none for "
                    f"{_CREDIT_WAIT_S:g} s"
                )

    async def invoke_async(self, work: ReceivedCall, method: Callable[..., Any]) -> Outcome:
        """Run one call of an async actor on its event loop. Never raises, but for its loop's end."""
        call, template = work.call, work.template
        actor_id = self._actor_id()
        current_task.set(TaskInfo(call.task_id, template.name, call.attempt, actor_id))
        work.started_at_s = time.time()
        began = time.perf_counter()
        try:
            if self._is_remote(call):
                import asyncio

                args, kwargs = await asyncio.to_thread(self.load_arguments, call)
            else:
                args, kwargs = self.load_arguments(call)
            value = method(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            if work.interrupt is not None:
                raise work.interrupt  # it noticed, and what it returned is not what was asked for
            if template.streaming:
                if isinstance(value, AsyncIterator):
                    return await self._streamed_async(work, value, began)
                return self._streamed(work, value, began)
            return self._outcome(work, value, began)
        except BaseException as error:
            return self.failure(work, error, began)

    async def _streamed_async(
        self, work: ReceivedCall, values: AsyncIterator[Any], began: float
    ) -> Outcome:
        import asyncio

        call = work.call
        index, nbytes = 0, 0
        async for value in values:
            if index - self._calls.credits.get(call.task_id, 0) >= AHEAD:
                await asyncio.to_thread(self.wait_for_credit, work, index)
            if work.interrupt is not None:
                raise work.interrupt
            item, refs, size = self._item(work, index, value)
            self._send_item(work, item, refs)
            nbytes += size
            index += 1
        result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
        return Outcome(work, result, time.time(), nbytes)

    def _is_remote(self, call: Call) -> bool:
        """Whether an argument lies on another node, so that loading it would block the loop."""
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


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _stepped(values: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterate over an async generator from a thread without a loop."""
    import asyncio

    async def step() -> Any:
        return await anext(values, _END)

    with asyncio.Runner() as runner:
        while (value := runner.run(step())) is not _END:
            yield value


def _should_retry(work: ReceivedCall, error: BaseException) -> bool:
    wanted = work.template.retry_exceptions
    if not wanted:
        return False
    try:
        kinds = cloudpickle.loads(wanted)
        if kinds is True:
            own = isinstance(error, StokerError) and not isinstance(error, TaskError)
            return isinstance(error, Exception) and not own
        return isinstance(error, tuple(kinds))
    except BaseException as problem:  # of the user's code, a module that is not here for one
        said = "".join(traceback.format_exception_only(problem)).strip()
        with contextlib.suppress(Exception):
            error.add_note(f"not tried again: this worker cannot read its retry_exceptions\n{said}")
        return False
