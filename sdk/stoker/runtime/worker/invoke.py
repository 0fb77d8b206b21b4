"""What one call does: its function, its arguments, the user's code, its results as places."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from stoker.api.context import TaskInfo, current_task
from stoker.exceptions import BadRequestError, SerializationError, StokerError, TaskError
from stoker.runtime.objects.refs import REF_MARK
from stoker.runtime.serialization.exceptions import error_of, failed_by, failed_with
from stoker.runtime.serialization.pickling import noted_refs, pack, unpack
from stoker.runtime.tasks.streams import AHEAD
from stoker.runtime.worker.execute import Work
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Call, Dep, Failed, Item, Place, Result, Stored

if TYPE_CHECKING:
    from stoker.runtime.worker.execute import Execution

_END = object()
_FUNCTIONS = 1000
"""How many functions a worker remembers: a driver may make new ones in a loop."""
_LOAD_S = 60.0
_CREDIT_WAIT_S = 600.0


@dataclass(slots=True)
class Outcome:
    """How a call ended, before it is sent. ``escaped`` are refs inside its results."""

    work: Work
    result: Result
    ended_at_s: float
    result_nbytes: int = 0
    escaped: tuple[Any, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it has an error instead of values."""
        returns = self.result.returns
        return bool(returns) and isinstance(returns[0], Failed)


def invoke(execution: Execution, work: Work, method: Callable[..., Any] | None = None) -> Outcome:
    """Run one call to its end on the calling thread. Never raises."""
    call, template = work.call, work.template
    actor_id = execution.lease.actor_id if execution.lease is not None else ""
    token = current_task.set(TaskInfo(call.task_id, template.name, call.attempt, actor_id))
    work.started_at_s = time.time()
    began = time.perf_counter()
    try:
        try:
            function = method or load_function(execution, template.function)
            args, kwargs = load_arguments(execution, call)
            with execution.interruption.allowed(work):
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
                        return _partial(execution, work, taken, error, began)
                    value = taken
            if work.interrupt is not None and actor_id:
                raise work.interrupt  # it noticed, and what it returned is not what was asked for
            if template.streaming:
                return _streamed(execution, work, value, began)
            return _outcome(execution, work, value, began)
        except BaseException as error:
            if os.getpid() != execution.pid:
                _end_fork(error)
            return failure(execution, work, error, began)
    finally:
        if os.getpid() != execution.pid:
            os._exit(0)  # user code forked, and its copy came back: there is one worker only
        current_task.reset(token)


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


def load_function(execution: Execution, digest: str, blob: bytes = b"") -> Callable[..., Any]:
    """Return a function (or class) by its hash; fetched from the gcs the first time, if need be."""
    cache = execution.runtime.function_cache
    found = cache.get(digest)
    if found is None:
        runtime = execution.runtime
        blob = blob or runtime.run(runtime.services.load_function(digest), _LOAD_S)
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


def load_arguments(execution: Execution, call: Call) -> tuple[Any, dict[str, Any]]:
    """Return the arguments, with the values of top-level refs in their places."""
    values = execution.runtime.objects.values
    if isinstance(call.args, Failed):
        raise error_of(call.args)
    data, buffers = values.bytes_of(call.args, "")
    args, kwargs, where = unpack(data, buffers, what="an argument")
    for position, dep in zip(where, call.deps, strict=True):
        value = _value_of(execution, dep)
        if isinstance(position, int):
            args[position] = value
        else:
            kwargs[position] = value
    return args, kwargs


def _value_of(execution: Execution, dep: Dep) -> Any:
    if isinstance(dep.place, Failed):
        raise error_of(dep.place)
    data, buffers = execution.runtime.objects.values.bytes_of(dep.place, dep.ref.object_id)
    return unpack(data, buffers, what=f"the argument {dep.ref.object_id}")


def _outcome(execution: Execution, work: Work, value: Any, began: float) -> Outcome:
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
    places, escaped, nbytes = _stored(execution, work, values)
    result = Result(call.task_id, call.attempt, places, duration_s)
    return Outcome(work, result, time.time(), nbytes, escaped)


def _partial(
    execution: Execution, work: Work, values: list[Any], error: Exception, began: float
) -> Outcome:
    """Return the outcome of a generator that raised: what it yielded before that are values."""
    outcome = failure(execution, work, error, began)
    missing = work.template.num_returns - len(values)
    if work.interrupt is None and not outcome.result.retry and values and missing > 0:
        places, escaped, outcome.result_nbytes = _stored(execution, work, values)
        outcome.result.returns = (*places, *outcome.result.returns * missing)
        outcome.escaped += escaped
    return outcome


def _stored(
    execution: Execution, work: Work, values: list[Any]
) -> tuple[tuple[Place, ...], tuple[Any, ...], int]:
    """Return the places of results, the refs inside of them, and their bytes."""
    call = work.call
    # All are packed before the first is stored: one that does not pickle leaves nothing behind.
    packs = [pack(item, what=f"result of {work.template.name}") for item in values]
    places: list[Place] = []
    escaped: list[Any] = []
    nbytes = 0
    for index, packed in enumerate(packs):
        place = execution.runtime.objects.values.place(
            return_id(call.task_id, index), packed, work.line.peer.peer_id
        )
        places.append(place)
        escaped += packed.refs
        nbytes += packed.nbytes
    return tuple(places), tuple(escaped), nbytes


def failure(execution: Execution, work: Work, error: BaseException, began: float) -> Outcome:
    """Return the outcome of a call whose code (or whose packing) raised."""
    call = work.call
    if isinstance(error, SystemExit) and execution.actor is not None:
        execution.actor.end.exited(work, error)
    refs: list[Any] = []
    if work.interrupt is not None:
        failed, retry = failed_with(work.interrupt), False
        error.__traceback__ = None  # its frames hold the arguments, and are held by `work`
    else:
        with noted_refs() as refs:
            retry = _should_retry(work, error)  # first: it may have something to add
            failed = failed_by(error, task=work.template.name)
        failed.refs = tuple(execution.runtime.wire_ref(r) for r in refs)
    result = Result(call.task_id, call.attempt, (failed,), time.perf_counter() - began, retry=retry)
    return Outcome(work, result, time.time(), escaped=tuple(refs))


def _should_retry(work: Work, error: BaseException) -> bool:
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


def _streamed(execution: Execution, work: Work, values: Any, began: float) -> Outcome:
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
            with execution.interruption.allowed(work):
                value = next(values, _END)
                wait_for_credit(execution, work, index)
            if value is _END:
                break
            if work.interrupt is not None:
                raise work.interrupt
            item, refs, size = _item(execution, work, index, value)
            execution.send_item(work, item, refs)
            nbytes += size
            index += 1
    finally:
        if inspect.isgenerator(values):
            values.close()  # cancelled outside of it: its own finally runs now, not some time
    result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
    return Outcome(work, result, time.time(), nbytes)


def _item(execution: Execution, work: Work, index: int, value: Any) -> tuple[Item, list[Any], int]:
    call = work.call
    packed = pack(value, what=f"result of {work.template.name}")
    place = execution.runtime.objects.values.place(
        return_id(call.task_id, index), packed, work.line.peer.peer_id
    )
    return Item(call.task_id, call.attempt, index, place), packed.refs, packed.nbytes


def wait_for_credit(execution: Execution, work: Work, index: int) -> None:
    """Wait until the caller has taken enough of the items yielded before."""
    task_id = work.call.task_id
    if index - execution.credits.get(task_id, 0) < AHEAD:
        return
    with execution.credit_changed:
        if not execution.credit_changed.wait_for(
            lambda: (
                index - execution.credits.get(task_id, 0) < AHEAD
                or work.line.closed
                or work.interrupt is not None
            ),
            timeout=_CREDIT_WAIT_S,
        ):
            raise StokerError(
                f"{work.template.name} yielded {index} items and its caller took none for "
                f"{_CREDIT_WAIT_S:g} s"
            )


async def invoke_async(execution: Execution, work: Work, method: Callable[..., Any]) -> Outcome:
    """Run one call of an async actor on its event loop. Never raises, but for its loop's end."""
    call, template = work.call, work.template
    actor_id = execution.lease.actor_id if execution.lease is not None else ""
    current_task.set(TaskInfo(call.task_id, template.name, call.attempt, actor_id))
    work.started_at_s = time.time()
    began = time.perf_counter()
    try:
        if _is_remote(execution, call):
            import asyncio

            args, kwargs = await asyncio.to_thread(load_arguments, execution, call)
        else:
            args, kwargs = load_arguments(execution, call)
        value = method(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await value
        if work.interrupt is not None:
            raise work.interrupt  # it noticed, and what it returned is not what was asked for
        if template.streaming:
            if isinstance(value, AsyncIterator):
                return await _streamed_async(execution, work, value, began)
            return _streamed(execution, work, value, began)
        return _outcome(execution, work, value, began)
    except BaseException as error:
        return failure(execution, work, error, began)


async def _streamed_async(
    execution: Execution, work: Work, values: AsyncIterator[Any], began: float
) -> Outcome:
    import asyncio

    call = work.call
    index, nbytes = 0, 0
    async for value in values:
        if index - execution.credits.get(call.task_id, 0) >= AHEAD:
            await asyncio.to_thread(wait_for_credit, execution, work, index)
        if work.interrupt is not None:
            raise work.interrupt
        item, refs, size = _item(execution, work, index, value)
        execution.send_item(work, item, refs)
        nbytes += size
        index += 1
    result = Result(call.task_id, call.attempt, (), time.perf_counter() - began, nitems=index)
    return Outcome(work, result, time.time(), nbytes)


def _is_remote(execution: Execution, call: Call) -> bool:
    """Whether an argument lies on another node, so that loading it would block the loop."""
    places = [call.args, *(d.place for d in call.deps)]
    seen = execution.runtime.services.seen_arena
    return any(isinstance(p, Stored) and seen(p.node_id) is None for p in places)


class ActorPayload(msgspec.Struct, frozen=True):
    """What the creator of an actor tells its worker. ``frame`` is a data frame with one call."""

    frame: bytes
    max_concurrency: int | None = None
    concurrency_groups: dict[str, int] = {}
    blob: bytes = b""
    """The pickled class, unless it is large and lies in the gcs."""
