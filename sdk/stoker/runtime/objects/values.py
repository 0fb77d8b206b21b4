"""The values of objects: written into messages or the arena, and read from wherever they are.

The object store uses it for puts and gets, workers for arguments and results. Seals and frees go to the
nodelets in order, one batch at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import ObjectLostError, StokerError
from stoker.runtime.objects.refs import wire_ref
from stoker.runtime.objects.remote_reader import RemoteReader
from stoker.runtime.serialization.exceptions import decode_error
from stoker.runtime.serialization.pickling import Packed, unpack, unpack_plain
from stoker_wire.arena import ObjectHead
from stoker_wire.arena.extents import capacity_for
from stoker_wire.errors import ArenaFullError, DeadlineExceededError, UnavailableError
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.data import Buffer, Failed, Inline, Location, Ref, Stored
from stoker_wire.messages.objects import (
    CLUSTER,
    FreeObjects,
    MakeRoom,
    ObjectInfo,
    SealedObjects,
    SealObjects,
    is_detached,
)
from stoker_wire.messages.work import DETACHED_JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.arena import Arena
    from stoker_wire.messages.common import Address

_BATCH_S = 0.003
"""How long seals and frees are gathered: a reader on another node may wait that much longer."""
_ROOM_S = 60.0
_FREE = "/v1/objects/free"
_ONCE: Mapping[str, Any] = {"timeout_s": 5.0, "retry": False}
_AGAIN_S = 0.5
_FREE_S = 60.0
"""How long a silent node is told what to free there."""
_PATIENCE_S = 2.0
"""How long a writer tries to be faster than others where the nodelet makes room; then it takes disk."""
_MAX_PAUSE_S = 0.1
"""Between two tries to take the room that was made, which others may be faster to take."""
_HEAD_ROOM = 1 << 16
_VIEWS = 3
"""How many views the error of a full arena names."""

_log = logging.getLogger(__name__)


class ValueStore:
    """The reader and writer of values; any thread, except where a method says loop thread."""

    def __init__(
        self,
        identity: Identity,
        address: Address,
        io: IoThread,
        clients: ClusterClients,
        arena: Arena | None,
        job: JobContext,
        *,
        inline_max_bytes: int,
    ) -> None:
        self.arena = arena
        self.arena_of = clients.arena_of
        self._node = identity.node
        self._address = address
        self._io = io
        self._clients = clients
        self._job = job
        self.inline_max_bytes = inline_max_bytes
        self._reclaim: Callable[[], bool] = _no_reclaim
        self._to_seal: deque[ObjectInfo] = deque()
        self._to_free: deque[tuple[str, str, str]] = deque()
        """The node of each object, that node's URL, and the object's id."""
        self._reporting = False
        self._remote = RemoteReader(identity, io, clients, arena)

    def on_full(self, reclaim: Callable[[], bool]) -> None:
        """Call ``reclaim`` when the arena is full: it frees dropped objects and says if there were any."""
        self._reclaim = reclaim

    def store(self, object_id: str, packed: Packed, owner_id: str = "") -> Location:
        """Store a packed value and return its location: in the message if small, else in the arena.

        ``owner_id`` is the runtime that its refs belong to, this one if none is given. Raises
        :class:`ArenaFullError` where neither memory nor disk has room.
        """
        location = self.store_result(object_id, packed, owner_id)
        self.settle()
        return location

    def store_detached(self, object_id: str, packed: Packed) -> Location:
        """Store a value that belongs to the cluster, in shared memory or on this node's disk."""
        location = self._store(object_id, packed, DETACHED_JOB, CLUSTER.peer_id)
        self.settle()
        return location

    def settle(self) -> None:
        """See to it that stored values do not change; call it before others can learn of them."""
        if self.arena is not None:
            self.arena.settle_in_place()

    def store_result(self, object_id: str, packed: Packed, owner_id: str) -> Location:
        """Store a value of which its maker may be about to let go; :meth:`settle` must follow."""
        if packed.nbytes <= self.inline_max_bytes or self.arena is None:
            return _inline(packed, self._wire_refs(packed))
        return self._store(object_id, packed, self._job.job_id, owner_id or self._address.peer_id)

    def _wire_refs(self, packed: Packed) -> tuple[Ref, ...]:
        return tuple(wire_ref(ref, self._address) for ref in packed.refs)

    def _store(self, object_id: str, packed: Packed, job_id: str, owner_id: str) -> Location:
        """Store a value in the arena, or on disk where that is full."""
        refs, node = self._wire_refs(packed), self._node
        assert node is not None
        created_at_s = time.time()
        lengths = tuple(view.nbytes for view in packed.buffers)
        head = ObjectHead(job_id, owner_id, created_at_s, len(packed.data), lengths)
        try:
            nbytes, on_disk = self._write(object_id, head, packed)
            self._to_seal.append(
                ObjectInfo(
                    object_id=object_id,
                    nbytes=nbytes,
                    job_id=job_id,
                    owner_id=owner_id,
                    node_id=node.node_id,
                    created_at_s=created_at_s,
                    spilled=on_disk,
                )
            )
            self._io.wake()
            return Stored(nbytes, node.node_id, node.url, refs, object_id)
        except FileNotFoundError:
            # The nodelet beside this driver has died, and the node's shared memory with it.
            self.arena = None
            return _inline(packed, refs)
        except BaseException:  # the cancellation of a task may come at any bytecode
            self.discard(object_id)
            raise

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory of the arena for a buffer of that size, which is then stored without a copy.

        None where such a value would not be in the arena, or that is full.
        """
        if self.arena is None or nbytes <= self.inline_max_bytes:
            return None
        try:
            return self.arena.allocate(nbytes, self._reclaim)
        except ArenaFullError:
            return None  # what makes room, or takes disk, is the storing of values

    def discard(self, object_id: str) -> None:
        """Free what was written under this id, if anything, whose location nobody got."""
        arena, node = self.arena, self._node
        if arena is not None and node is not None:
            if arena.recycle(object_id):
                self._to_free.append((node.node_id, node.url, object_id))
            else:
                arena.drop_from_disk(object_id)

    def _write(self, object_id: str, head: ObjectHead, packed: Packed) -> tuple[int, bool]:
        """Write into the arena, or to disk; return the length, and whether it is on disk.

        Where the arena is full, the nodelet makes room first; disk is for when objects in use leave none,
        or others take it as fast as it is made.
        """
        arena, node = self.arena, self._node
        assert arena is not None and node is not None
        deadline_s = time.monotonic() + _PATIENCE_S
        pause_s = 0.0
        while True:
            try:
                parts = packed.data, packed.buffers
                return arena.write(object_id, head, *parts, self._reclaim), False
            except ArenaFullError as full:
                if self._io.is_current():
                    raise
                if time.monotonic() > deadline_s:
                    return self._write_to_disk(object_id, head, packed, full), True
            # The nodelet says no where no room can be made; where it made some, others may be faster.
            time.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2 or _MAX_PAUSE_S / 64)
            room = MakeRoom(nbytes=capacity_for(packed.nbytes + _HEAD_ROOM))
            try:
                self._io.run(self._make_room(node.url, room), _ROOM_S)
            except ArenaFullError as full:
                full.with_traceback(None)  # it would keep this frame, and so the refs of callers
                full.__cause__ = full.__context__ = None
                if room.nbytes > arena.quota.limit_bytes:
                    raise  # no reader of another node could have it in memory
                return self._write_to_disk(object_id, head, packed, full), True

    def _write_to_disk(
        self, object_id: str, head: ObjectHead, packed: Packed, full: ArenaFullError
    ) -> int:
        """Write where spilled objects are; if that fails, name the views that this process keeps."""
        arena = self.arena
        assert arena is not None
        try:
            return arena.write_to_disk(object_id, head, packed.data, packed.buffers)
        except OSError as error:
            views = arena.read_here()
            names = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in views[:_VIEWS])
            more = f" and {len(views) - _VIEWS} more" if len(views) > _VIEWS else ""
            raise ArenaFullError(
                f"{full.message}\nDisk has no room either: {error.strerror}\n"
                f"This process itself has values that are views of shared memory: {names or 'none'}{more}"
            ) from None

    async def _make_room(self, url: str, room: MakeRoom) -> None:
        client = self._clients.client_of(url)
        await client.call("POST", "/v1/arena/room", room, timeout_s=_ROOM_S)

    def load(
        self,
        location: Location,
        object_id: str,
        timeout_s: float | None = None,
        plain: bool = False,
    ) -> Any:
        """Return the value at a location, or raise its error. Not on the loop thread.

        ``plain``: it is of plain types, else SerializationError; neither it nor an error runs any code.
        """
        if isinstance(location, Failed):
            if plain:
                location = msgspec.structs.replace(location, pickled=None, refs=())
            raise decode_error(location)
        data, buffers = self.bytes_of(location, object_id, timeout_s)
        read = unpack_plain if plain else unpack
        return read(data, buffers, what=f"the value of {object_id}")

    def bytes_of(
        self, location: Location, object_id: str, timeout_s: float | None = None
    ) -> tuple[Any, list[Any]]:
        """Return the pickle and buffers of a value, fetched from its node if need be."""
        if isinstance(location, Inline):
            return location.data, [b.view for b in location.buffers]
        assert isinstance(location, Stored)
        object_id = location.object_id or object_id
        try:
            return self._stored_bytes(location, object_id, timeout_s)
        except ObjectLostError as error:
            home = self._remote.heir_of(location)
            if home is None:
                raise
            error.with_traceback(None)  # as in the store's load
        return self.bytes_of(home, object_id, timeout_s)

    def _stored_bytes(
        self, location: Stored, object_id: str, timeout_s: float | None
    ) -> tuple[Any, list[Any]]:
        arena = self.arena_of(location.node_id)
        if arena is not None:
            try:
                return arena.read(object_id)
            except ObjectLostError:
                self._remote.check_alive(location.node_id, object_id)
                raise
        return self._remote.fetch(location, object_id, timeout_s)

    def is_local(self, location: Location) -> bool:
        """Return whether a value is known to be readable without another machine."""
        return (
            not isinstance(location, Stored)
            or self._clients.seen_arena(location.node_id) is not None
        )

    def free(self, location: Location | None, object_id: str = "") -> None:
        """Free the arena's bytes of a value that nobody needs any more, if it has any."""
        if isinstance(location, Stored):
            object_id = location.object_id or object_id
            if is_detached(object_id):
                return  # the cluster owns it
            arena = self._clients.seen_arena(location.node_id)
            if arena is not None and not arena.recycle(object_id):
                arena.drop_from_disk(object_id)  # views of it keep what they have
            self._to_free.append((location.node_id, location.node_url, object_id))

    def flush(self) -> None:
        """Begin to report seals and frees to the nodelets (loop thread)."""
        if (self._to_seal or self._to_free) and not self._reporting:
            self._reporting = True
            self._io.background.spawn(self._report_to_nodelets(), name="arena")

    async def report(self) -> None:
        """Report seals and frees to the nodelets; return when they know (loop thread)."""
        while self._to_seal or self._to_free or self._reporting:
            self.flush()
            await asyncio.sleep(_BATCH_S)

    async def _report_to_nodelets(self) -> None:
        """Report seals and frees in their order, one batch at a time.

        An object that was sealed and freed within one batch is not reported at all.
        """
        try:
            while self._to_seal or self._to_free:
                await asyncio.sleep(_BATCH_S)
                seals, frees = drain(self._to_seal), drain(self._to_free)
                short_lived = {info.object_id for info in seals} & {
                    object_id for _, _, object_id in frees
                }
                to_seal = tuple(info for info in seals if info.object_id not in short_lived)
                for info in seals:
                    if info.spilled and info.object_id in short_lived and self.arena is not None:
                        self.arena.drop_from_disk(info.object_id)
                by_node: dict[tuple[str, str], list[str]] = {}
                for node_id, url, object_id in frees:
                    if object_id not in short_lived:
                        by_node.setdefault((node_id, url), []).append(object_id)
                node = self._node
                if to_seal and node is not None:
                    sealed = await self._post(
                        node.url, "/v1/objects", SealObjects(objects=to_seal), reply=SealedObjects
                    )
                    if isinstance(sealed, SealedObjects) and sealed.closed:
                        self.arena = (
                            None  # the node is drained: what it has, another takes over now
                        )
                for (node_id, url), object_ids in by_node.items():
                    free = FreeObjects(object_ids=tuple(object_ids))
                    is_here = node is not None and url == node.url
                    if not (is_here and await self._post(url, _FREE, free, **_ONCE)):
                        # That node may be dead: nobody waits for it.
                        told = self._free_on(node_id, url, free)
                        self._io.background.spawn(told, name="free")
        finally:
            self._reporting = False

    async def _free_on(self, node_id: str, url: str, free: FreeObjects) -> None:
        """Have objects freed at another node, or at the one that has taken them over from it."""
        deadline_s = self._io.loop.time() + _FREE_S
        while True:
            if await self._post(url, _FREE, free, **_ONCE):
                return
            with contextlib.suppress(StokerError):
                node, heir = await self._clients.node_and_heir(node_id)
                if heir is not None:
                    await self._free_on(heir.node_id, heir.url, free)
                if node.state is NodeState.DEAD:
                    return
            if self._io.loop.time() > deadline_s:
                return
            await asyncio.sleep(_AGAIN_S)

    async def _post(self, url: str, path: str, body: object, **options: Any) -> object:
        """Report to a nodelet; return its answer, which is true, or False where none came."""
        try:
            answer = await self._clients.client_of(url).call("POST", path, body, **options)
            return answer or True
        except (UnavailableError, DeadlineExceededError) as error:
            _log.info("%s%s: %s", url, path, error)  # a node that is dead has nothing to free
            return False
        except StokerError as error:
            # The nodelet frees by itself what belongs to a worker or job that has ended.
            _log.warning("%s%s: %s", url, path, error)
        return True


def _inline(packed: Packed, refs: tuple[Ref, ...]) -> Inline:
    return Inline(packed.data, tuple(Buffer(bytes(v)) for v in packed.buffers), refs)


def _no_reclaim() -> bool:
    return False


def drain(queue: deque[Any]) -> list[Any]:
    """Empty a queue that other threads fill; return its items."""
    items = []
    while queue:
        items.append(queue.popleft())
    return items
