"""Local mode: tasks and actors that run in the driver itself, one after another, when they are called.

For debuggers, profilers and tests: a breakpoint in a task is hit in the process that the user looks at. All
else, as objects, nodes and placement groups, is that of the cluster. Resources are not counted, nothing runs
at the same time, arguments are not copied, and nothing is tried again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ActorDiedError, BadRequestError, NameTakenError, StokerError
from stoker.runtime.actors.handle import ActorHandle
from stoker.runtime.actors.info import (
    RAY_SHUTDOWN,
    SHUTDOWN,
    TERMINATE,
    HandleInfo,
    checked_groups,
    methods_of,
)
from stoker.runtime.objects.refs import ObjectRef, ObjectRefGenerator
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.serialization.exceptions import encode_error, encode_exception
from stoker.runtime.tasks.functions import DYNAMIC, returns_of
from stoker_wire.ids import IdSource, Prefix, new_id
from stoker_wire.messages.data import Failed

if TYPE_CHECKING:
    from stoker.runtime.actors.info import MethodInfo
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.options.actor_options import ActorOptions

_END = object()


class InlineCalls:
    """The calls and the actors of a driver in local mode."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._task_ids = IdSource(Prefix.TASK)
        self._instances: dict[str, Any] = {}
        self._dead: dict[str, str] = {}
        """Why an actor is dead, by its id."""
        self._infos: dict[str, HandleInfo] = {}
        self._names: dict[tuple[str, str], str] = {}

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        name: str,
        num_returns: Any,
        generates: bool,
        actor_id: str = "",
    ) -> Any:
        """Run a call to its end; return what ``.remote()`` returns: a ref, a list, or a generator."""
        task_id = self._task_ids()
        count, streaming = returns_of(num_returns, generates=generates)
        info = TaskInfo(task_id, name, 0, actor_id)
        try:
            values = self._values(args)
            named = dict(zip(kwargs, self._values(list(kwargs.values())), strict=True))
        except StokerError as error:
            failed = _failure_in([*args, *kwargs.values()]) or encode_error(error)
            return self._failed(task_id, count, streaming, failed)
        try:
            value = _within(info, lambda: _run(function(*values, **named)))
            if streaming:
                items = _items(value)
                return ObjectRefGenerator(_InlineStream(self, task_id, name, info, items))
            if num_returns == DYNAMIC:
                items = _items(value)
                value = tuple(_within(info, lambda: [self._objects.put(item) for item in items]))
            return self._results(value, count, name)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, SystemExit) and actor_id:
                self.end(actor_id, f"it ended itself: sys.exit({error.code!r})")
                return self._failed(task_id, count, streaming, self._death_of(actor_id, name))
            return self._failed(task_id, count, streaming, encode_exception(error, task=name))

    def create(
        self, cls: type, options: ActorOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorHandle[Any]:
        """Make an actor, here and now; an error of its constructor is that of its calls."""
        place = (options.namespace or "", options.name or "")
        if options.name and (taken := self._names.get(place)) is not None:
            if options.get_if_exists:
                return ActorHandle(self._infos[taken])
            raise NameTakenError(f"a living actor is named {options.name!r}", field="name")
        actor_id = new_id(Prefix.ACTOR)
        info = HandleInfo(
            actor_id,
            cls.__qualname__,
            methods_of(cls),
            options.max_task_retries,
            options.max_pending_calls,
            tuple(checked_groups(cls, options)),
        )
        self._infos[actor_id] = info
        task = TaskInfo(self._task_ids(), f"{cls.__qualname__}.__init__", 0, actor_id)
        try:
            values = self._values(args)
            named = dict(zip(kwargs, self._values(list(kwargs.values())), strict=True))
            self._instances[actor_id] = _within(task, lambda: cls(*values, **named))
        except Exception as error:
            self._dead[actor_id] = f"its constructor failed: {type(error).__name__}: {error}"
        else:
            if options.name:
                self._names[place] = actor_id
        return ActorHandle(info)

    def call_method(
        self,
        handle: HandleInfo,
        name: str,
        method: MethodInfo,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of an actor."""
        actor_id, options = handle.actor_id, method.options
        title = options.name or f"{handle.class_name}.{name}"
        function: Callable[..., Any]
        if actor_id not in self._instances:
            count, streaming = returns_of(options.num_returns, generates=method.generates)
            death = self._death_of(actor_id, handle.class_name)
            return self._failed(self._task_ids(), count, streaming, death)
        instance = self._instances[actor_id]
        if name in handle.methods:
            function = getattr(instance, name)
        elif name == TERMINATE:
            function = self._terminate(actor_id)
        elif name == "__stoker_call__":
            function = lambda called, *a, **k: called(instance, *a, **k)  # noqa: E731
        else:
            function = _nothing
        return self.call(
            function,
            args,
            kwargs,
            name=title,
            num_returns=options.num_returns,
            generates=method.generates,
            actor_id=actor_id,
        )

    def _terminate(self, actor_id: str) -> Callable[[], None]:
        return lambda: self.end(actor_id, f"it ended itself: {TERMINATE} was called")

    def find(self, name: str, namespace: str | None) -> ActorHandle[Any] | None:
        """Return a handle to the living actor of this name, or None."""
        actor_id = self._names.get((namespace or "", name))
        return None if actor_id is None else ActorHandle(self._infos[actor_id])

    def end(self, actor_id: str, why: str, *, killed: bool = False) -> None:
        """End an actor; unless it was killed, its ``__stoker_shutdown__`` runs."""
        instance = self._instances.pop(actor_id, None)
        self._dead.setdefault(actor_id, why)
        self._names = {place: one for place, one in self._names.items() if one != actor_id}
        hook = getattr(instance, SHUTDOWN, None) or getattr(instance, RAY_SHUTDOWN, None)
        if hook is not None and not killed:
            _run(hook())

    # -- values and refs -------------------------------------------------------------------------

    def _values(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments with the values of refs among them; raises what one of them failed with."""
        refs = [each for each in args if isinstance(each, ObjectRef)]
        values = iter(self._objects.get(refs, None) if refs else ())
        return [next(values) if isinstance(each, ObjectRef) else each for each in args]

    def _results(self, value: Any, count: int, name: str) -> Any:
        if count == 1:
            return self.put(value)
        values = list(value) if isinstance(value, (tuple, list, Iterator)) else [value]
        if count and len(values) != count:
            raise BadRequestError(
                f"{name} has num_returns={count} but returned {len(values)} values\n"
                f"a tuple or list of {count} values is needed",
                field="num_returns",
            )
        return [self.put(each) for each in values] if count else None

    def put(self, value: Any) -> ObjectRef[Any]:
        """Store a result; one that is a ref is that ref inside of a value."""
        return self._objects.put(value)

    def fail(self, failed: Failed) -> ObjectRef[Any]:
        """Return a ref to a result that failed."""
        return self._objects.put_failed(failed)

    def _failed(self, task_id: str, count: int, streaming: bool, failed: Failed) -> Any:
        if streaming:
            stream = _InlineStream(self, task_id, "", TaskInfo(task_id, "", 0, ""), iter(()))
            stream.error = failed
            return ObjectRefGenerator(stream)
        refs = [self.fail(failed) for _ in range(max(1, count))]
        return refs[0] if count == 1 else refs if count else None

    def _death_of(self, actor_id: str, name: str) -> Failed:
        why = self._dead.get(actor_id, "it is of another process or job")
        return encode_error(ActorDiedError(f"actor {name} ({actor_id}) is dead\n{why}"))


class _InlineStream:
    """The items of a generator that runs in the driver: each when it is asked for."""

    def __init__(
        self, calls: InlineCalls, task_id: str, name: str, info: TaskInfo, items: Iterator[Any]
    ) -> None:
        self.task_id = task_id
        self.error: Failed | None = None
        self._calls = calls
        self._name = name
        self._info = info
        self._items = items
        self._count = 0
        self.completed_ref = calls.put(None)

    @property
    def is_ready(self) -> bool:
        """True: the next item is made when it is asked for."""
        return True

    def watch(self, waiter: object) -> None:
        """Do nothing: it is always ready."""

    def unwatch(self, waiter: object) -> None:
        """Do nothing."""

    def next_sync(self) -> ObjectRef[Any] | None:
        """Run the generator to its next value; return its ref, or None at the end."""
        if self.error is None:
            try:
                value = _within(self._info, lambda: next(self._items, _END))
            except Exception as error:
                self.error = encode_exception(error, task=self._name)
                self._items = iter(())
            else:
                return None if value is _END else self._calls.put(value)
        if self._count:
            return None
        self._count = 1
        return self._calls.fail(self.error)

    async def next_async(self) -> ObjectRef[Any] | None:
        """Do what ``next_sync`` does, from a coroutine."""
        return self.next_sync()

    def abandon(self) -> None:
        """Drop the generator."""
        self._items = iter(())


def _within(info: TaskInfo, run: Callable[[], Any]) -> Any:
    """Run code as that of a task."""
    token = current_task.set(info)
    try:
        return run()
    finally:
        current_task.reset(token)


def _run(value: Any) -> Any:
    """Return a result, that of a coroutine once it has ended; also where a loop runs in this thread."""
    if not inspect.iscoroutine(value):
        return value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(value)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, value).result()


def _items(values: Any) -> Iterator[Any]:
    if not isinstance(values, AsyncIterator):
        return iter(values)

    async def all_of_them() -> list[Any]:
        return [each async for each in values]

    found: list[Any] = _run(all_of_them())
    return iter(found)


def _failure_in(values: Sequence[Any]) -> Failed | None:
    """Return what the first failed one of refs has failed with."""
    places = (each._entry.location for each in values if isinstance(each, ObjectRef))
    return next((place for place in places if isinstance(place, Failed)), None)


def _nothing(*_args: Any) -> None:
    """Do nothing."""
