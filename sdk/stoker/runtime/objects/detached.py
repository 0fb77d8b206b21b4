"""Detached objects in this process: made, found by name, read and freed. The cluster owns them.

Nobody counts their refs, so nothing is borrowed: they live until they are freed. A small value lies in the
gcs, a large one in the memory or on the disks of nodes, and in a file besides where the user wants that.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle
import msgspec

from stoker.exceptions import ObjectFreedError, ObjectLostError, StartError, StokerError
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.serialization.pickling import pack
from stoker_wire.errors import (
    BadRequestError,
    NotFoundError,
    SerializationError,
)
from stoker_wire.messages.control import Page
from stoker_wire.messages.data import Buffer, Failed, Inline, Location, Stored
from stoker_wire.messages.objects import (
    CLUSTER,
    MAX_INLINE,
    CommitDetachedObject,
    CreateDetachedObject,
    DetachedObject,
    DetachedState,
    LocatedObject,
    LocateObject,
    is_detached,
    new_detached_id,
)

if TYPE_CHECKING:
    from threading import Lock

    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.table import Entry, ObjectTable
    from stoker.runtime.objects.values import ValueStore
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.serialization.pickling import Packed

_CALL_S = 30.0
_COPY_S = 900.0
_OTHERS = 3
"""How many namespaces the error of a name names."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, list[bytes]]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """The places that keep a detached object: so many nodes, in memory or on disk, and a file if not ''.

    Without ``wait`` nodes that are missing now get their copies when they come.
    """

    copies: int = 1
    disk: bool = False
    path: str = ""
    wait: bool = True


class DetachedResult(NamedTuple):
    """A task's result that is stored already, as a detached object."""

    location: Location
    nbytes: int


class _Objects(Protocol):
    """The object store of this process."""

    lock: Lock

    def settle(self, entry: Entry, location: Location) -> None: ...


class DetachedObjects:
    """The detached objects that this process makes or knows."""

    objects: _Objects

    def __init__(
        self,
        identity: Identity,
        io: IoThread,
        clients: ClusterClients,
        job: JobContext,
        table: ObjectTable,
        values: ValueStore,
    ) -> None:
        self._identity = identity
        self._io = io
        self._clients = clients
        self._job = job
        self._table = table
        self._values = values

    # -- user threads ----------------------------------------------------------------------------

    def put(
        self, value: Any, *, name: str, namespace: str | None, durability: Durability
    ) -> ObjectRef[Any]:
        """Store a value that outlives this process; return once it is as durable as asked.

        Raises NameTakenError, PayloadTooLargeError (the quota), ArenaFullError.
        """
        object_id = new_detached_id()
        location = self.store(
            object_id,
            self.packed(value),
            value,
            name=name,
            namespace=namespace,
            durability=durability,
        )
        return self.import_ref(object_id, location)

    def packed(self, value: Any) -> Packed:
        """Return a value pickled; SerializationError for one with refs that do not outlive their owners."""
        packed = pack(value, what="value")
        for ref in packed.refs:
            if not is_detached(ref.id):
                raise SerializationError(
                    f"a detached object cannot contain {ref!r}\n"
                    "that lives no longer than the process that owns it: get() it first, or make it "
                    "with lifetime='detached'",
                    field="value",
                )
        return packed

    def find(self, object_id: str, *, namespace: str) -> Location | None:
        """Return from where an object of ``namespace`` can be read; None if that is not known now.

        It is nowhere, or not written yet, perhaps by one that died while at it: nobody is waited for. One of
        another namespace is not it: whoever can compute an id can make an object of that id.
        """
        try:
            return self._io.run(self.locate(object_id, retry=False, namespace=namespace), _COPY_S)
        except StokerError:
            return None

    def store(
        self,
        object_id: str,
        packed: Packed,
        value: Any,
        *,
        name: str = "",
        namespace: str | None = None,
        durability: Durability,
    ) -> Location:
        """Store a packed value under an id; return its location, or that of what has this id already."""
        node = self._identity.node
        on_node = node is not None and self._values.arena is not None
        inline = packed.nbytes <= (self._values.inline_max_bytes if on_node else MAX_INLINE // 2)
        if not inline and not on_node:
            why = "a driver without a node beside it\nput it in a task, which runs on a node"
            if self._identity.is_foreign:
                why = (
                    "a process of another user than the node's (run_as)\nwrite it to a file, or keep it in "
                    "an actor"
                )
            raise BadRequestError(
                f"value: {packed.nbytes} bytes are too many to be detached from {why}",
                field="value",
            )
        views = [bytes(view) for view in packed.buffers] if inline else []
        body = CreateDetachedObject(
            object_id=object_id,
            nbytes=packed.nbytes,
            name=name,
            namespace=namespace or self._job.namespace,
            job_id=self._job.job_id,
            copies=durability.copies,
            disk=durability.disk,
            path=durability.path,
            value=_encode((packed.data, views)) if inline else None,
        )
        known = self._call("POST", "/v1/detached-objects", body, DetachedObject)
        if known.state is DetachedState.READY and not inline:
            return self._io.run(self.locate(object_id), _COPY_S)
        try:
            if durability.path:
                _write_file(durability.path, value)
            if inline:
                return Inline(packed.data, tuple(Buffer(view) for view in views))
            return self._store_on_nodes(object_id, packed, durability)
        except BaseException:
            self.free(object_id)
            raise

    def _store_on_nodes(self, object_id: str, packed: Packed, durability: Durability) -> Location:
        """Store a value on this node, and have the gcs see to its copies."""
        node = self._identity.node
        assert node is not None
        location = self._values.store_detached(object_id, packed)
        self._io.run(self._values.report(), _CALL_S)
        commit = CommitDetachedObject(node_id=node.node_id)
        path = f"/v1/detached-objects/{object_id}/commit"
        stored = self._call("POST", path, commit, DetachedObject, _COPY_S)
        copies = durability.copies
        if durability.wait and len(stored.nodes) < copies:
            raise BadRequestError(
                f"copies: {copies} copies were asked for, and only {len(stored.nodes)} nodes could take "
                "one\nask for fewer, or add nodes",
                field="copies",
            )
        return location

    def get_ref(self, name: str, namespace: str | None) -> ObjectRef[Any]:
        """Return a ref to the detached object of a name; NotFoundError if there is none."""
        where = namespace or self._job.namespace
        for found in self._named(name=name, namespace=where):
            return self.import_ref(found.object_id)
        fix = f"stoker.put(value, lifetime='detached', name={name!r}) makes it"
        if others := sorted({one.namespace for one in self._named(name=name)}):
            others_text = ", ".join(others[:_OTHERS])
            fix = f"there is one in namespace {others_text}: give namespace=, here or to init()"
        raise NotFoundError(
            f"there is no detached object {name!r} in namespace {where!r}\n{fix}", field="name"
        )

    def _named(self, **query: str) -> tuple[DetachedObject, ...]:
        page: Page[DetachedObject] = self._call(
            "GET", "/v1/detached-objects", None, Page[DetachedObject], query=query
        )
        return page.items

    def free(self, object_id: str) -> None:
        """Free a detached object everywhere; one that is freed already stays so."""
        with contextlib.suppress(NotFoundError):
            self._call("DELETE", f"/v1/detached-objects/{object_id}", None, DetachedObject)
        with self.objects.lock:
            entry = self._table.get(object_id)
            if entry is not None:
                entry.location = encode_error(ObjectFreedError(f"{object_id} was freed"))

    def import_ref(self, object_id: str, location: Location | None = None) -> ObjectRef[Any]:
        """Return a ref to a detached object."""
        with self.objects.lock:
            entry = self._table.get(object_id)
            if entry is not None:
                entry.refs += 1
                if type(entry.location) is Failed:  # it may be back, with its node
                    entry.location, entry.resolve_requested = location, False
            else:
                entry = self._table.create(object_id, CLUSTER)
                entry.location = location
        return ObjectRef(entry)

    def _call(
        self,
        method: str,
        path: str,
        body: object,
        reply: type[Any],
        timeout_s: float = _CALL_S,
        query: dict[str, Any] | None = None,
    ) -> Any:
        call = self._clients.gcs.call(
            method, path, body, reply=reply, timeout_s=timeout_s, query=query
        )
        return self._io.run(call, timeout_s + _CALL_S)

    # -- the loop thread -------------------------------------------------------------------------

    def resolve(self, entry: Entry) -> None:
        """Begin to settle an entry with the place of its object."""
        self._io.background.spawn(self._resolve(entry), name="detached")

    async def _resolve(self, entry: Entry) -> None:
        try:
            location = await self.locate(entry.object_id)
        except StokerError as error:
            location = encode_error(error)
        self.objects.settle(entry, location)

    async def locate(
        self, object_id: str, without: str = "", *, retry: bool = True, namespace: str = ""
    ) -> Location:
        """Return from where an object can be read; ``without`` is a node that has it no more.

        One that is being written is waited for, with ``retry``. Raises ObjectFreedError, ObjectLostError,
        and NotFoundError for one that is not of ``namespace``, if that is given.
        """
        path = f"/v1/detached-objects/{object_id}/locate"
        body = LocateObject(without=without)
        try:
            found = await self._clients.gcs.call(
                "POST", path, body, reply=LocatedObject, timeout_s=_COPY_S, retry=retry
            )
        except NotFoundError:
            raise ObjectFreedError(f"{object_id} was freed\nit is no detached object") from None
        if namespace not in ("", found.object.namespace):
            raise NotFoundError(f"{object_id} is not of namespace {namespace!r}")
        if found.value is not None:
            data, buffers = _decode(found.value)
            return Inline(data, tuple(Buffer(one) for one in buffers))
        node = self._identity.node
        for source in sorted(
            found.sources, key=lambda one: node is None or one.node_id != node.node_id
        ):
            if source.node_id != without or len(found.sources) == 1:
                return Stored(found.object.nbytes, source.node_id, source.url, (), object_id)
        return Inline(await asyncio.to_thread(_read_file, object_id, found.object.path))


def _write_file(path: str, value: Any) -> None:
    """Write a value's pickle to a file of any file system that fsspec knows."""
    with _fsspec().open(path, "wb") as file:
        cloudpickle.dump(value, file, protocol=5)


def _read_file(object_id: str, path: str) -> bytes:
    try:
        with _fsspec().open(path, "rb") as file:
            return bytes(file.read())
    except Exception as error:  # file systems raise all kinds, or are not installed here
        raise ObjectLostError(
            f"detached object {object_id} is on no node that lives, and {path} cannot be read\n"
            f"{type(error).__name__}: {error}"
        ) from None


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError:
        raise StartError("path= needs fsspec\npip install fsspec") from None
    return fsspec
