"""``ObjectRef``, the name of a value that may not exist yet; and the generator of such refs.

A ref object holds one count of its entry from its making to its collection, and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from stoker.runtime.process.current_runtime import CurrentRuntime
from stoker.runtime.process.notebook import html_table
from stoker_wire.ids import task_of
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Failed, Ref

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

    from stoker.runtime.objects.table import Entry
    from stoker.runtime.objects.waiters import ThreadWaiter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Objects(Protocol):
    """The part of the object store that refs use."""

    address: Address

    def put(self, value: Any) -> ObjectRef[Any]: ...
    def put_failed(self, failed: Failed) -> ObjectRef[Any]: ...
    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]: ...
    async def wait_async(self, ref: ObjectRef[Any]) -> Any: ...
    def import_ref(self, object_id: str, owner: Address) -> ObjectRef[Any]: ...
    def drop_ref(self, entry: Entry) -> None: ...
    def pin(self, ref: ObjectRef[Any]) -> None: ...


class _Stream(Protocol):
    """A streaming task's items, as they come."""

    task_id: str
    completed_ref: ObjectRef[Any]

    @property
    def is_ready(self) -> bool: ...
    def watch(self, waiter: ThreadWaiter) -> None: ...
    def unwatch(self, waiter: ThreadWaiter) -> None: ...
    def next_sync(self) -> ObjectRef[Any] | None: ...
    async def next_async(self) -> ObjectRef[Any] | None: ...
    def abandon(self) -> None: ...


class _Runtime(Protocol):
    """This process's runtime, as refs see it."""

    @property
    def objects(self) -> _Objects: ...


CURRENT: CurrentRuntime[_Runtime] = CurrentRuntime()


def _objects() -> _Objects:
    return CURRENT.get().objects


class ObjectRef(Generic[T_co]):
    """The name of an immutable value, now or later. Give it to ``get``, to a remote call, or await it.

    Refs may sit inside arguments, results and other values; as a top-level argument of a remote
    call a ref is replaced by its value. The value is freed when no process holds a ref to it. A ref that
    you pickle yourself keeps its value as long as the process lives that pickled it, or until ``free()``.
    """

    __slots__ = ("__weakref__", "_entry")

    _entry: Entry

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def id(self) -> str:
        """The object's id, as the HTTP API shows it."""
        return self._entry.object_id

    def hex(self) -> str:
        """Return the object id as hex."""
        return self._entry.object_id

    @property
    def task_id(self) -> str:
        """The id of the task whose result this is; '' for a value that was put."""
        return task_of(self._entry.object_id)

    def future(self) -> concurrent.futures.Future[T_co]:
        """Return a ``concurrent.futures.Future`` of the value."""
        return _objects().future(self)

    def as_future(self) -> asyncio.Future[T_co]:
        """Return an ``asyncio.Future`` of the value, of the loop that runs here (Ray's name)."""
        import asyncio

        return asyncio.wrap_future(self.future(), loop=asyncio.get_running_loop())

    def __await__(self) -> Generator[Any, None, T_co]:
        return _objects().wait_async(self).__await__()

    def __repr__(self) -> str:
        return f"ObjectRef({self._entry.object_id})"

    def _repr_html_(self) -> str:
        return html_table("ObjectRef", {"id": self.id, "task": self.task_id})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._entry.object_id == self._entry.object_id

    def __hash__(self) -> int:
        return hash(self._entry.object_id)

    def __reduce__(self) -> tuple[Any, ...]:
        from stoker.runtime.serialization.pickling import collect_ref, is_packing

        collect_ref(self)
        if not is_packing():  # nobody counts the copies of these bytes
            _objects().pin(self)
        owner = self._entry.owner or _objects().address
        return load_ref, (
            self._entry.object_id,
            (owner.peer_id, owner.node_id, owner.host_id, owner.unix, owner.url),
        )

    def __del__(self) -> None:
        # Runs on any thread, at any bytecode: only an append, which is atomic.
        runtime, entry = CURRENT.runtime, getattr(self, "_entry", None)
        if runtime is not None and entry is not None:  # None: a signal interrupted __init__
            runtime.objects.drop_ref(entry)


def load_ref(object_id: str, owner: tuple[str, str, str, str, str]) -> ObjectRef[Any]:
    """Unpickle a ref: this process becomes a borrower of the object, unless it owns it."""
    return _objects().import_ref(object_id, Address(*owner))


def wire_ref(ref: ObjectRef[Any], address: Address) -> Ref:
    """Return the message form of a ref; ``address`` is that of this process."""
    return Ref(ref._entry.object_id, ref._entry.owner or address)


REF_MARK = load_ref.__name__.encode()
"""Bytes that are in the pickle of every value with a ref inside."""


class ObjectRefGenerator(Generic[T]):
    """The results of a streaming task, as refs, each as soon as the task has yielded it.

    Iterate over it plainly or with ``async for``. If the task fails, the last ref raises its error
    in ``get``. Dropping the generator cancels the task.
    """

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    @property
    def task_id(self) -> str:
        """The id of the task that yields."""
        return self._stream.task_id

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        ref = self._stream.next_sync()
        if ref is None:
            raise StopIteration
        return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        ref = await self._stream.next_async()
        if ref is None:
            raise StopAsyncIteration
        return ref

    def next_ready(self) -> bool:
        """Return whether the next ref, or the end, can be had without waiting."""
        return self._stream.is_ready

    def completed(self) -> ObjectRef[None]:
        """Return a ref that is settled when the task has ended (its ``get`` raises its error)."""
        return self._stream.completed_ref

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self._stream.task_id})"

    def __del__(self) -> None:
        self._stream.abandon()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("an ObjectRefGenerator stays in its process: pass its refs on instead")
