"""The shell around the object table: puts, gets, waits, borrowing and freeing.

User threads create refs, put, get and wait; the loop thread settles entries, talks to owners and
borrowers, and frees. ``lock`` guards the moments where both meet. Refs die on any thread: their
entries are only appended to a queue, which the loop empties.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from stoker._refs import ObjectRef
from stoker.core.objects import Entry, ObjectTable, Waiter
from stoker.exceptions import (
    GetTimeoutError,
    ObjectFreedError,
    ObjectLostError,
    OwnerDiedError,
    SerializationError,
    StokerError,
)
from stoker.runtime.arena import ArenaFullError, split
from stoker.runtime.failures import error_of, failed_with
from stoker.runtime.serialization import Packed, pack, unpack
from stoker.runtime.waiting import Callback, LoopWaiter, ThreadWaiter
from stoker_wire.channel import Channel
from stoker_wire.errors import NotFoundError
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import (
    Borrow,
    Borrowed,
    Buffer,
    Failed,
    Inline,
    Place,
    Ref,
    Resolve,
    Resolved,
    Stored,
    Unborrow,
)
from stoker_wire.messages.work import FreeObjects, ObjectInfo, SealObjects

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime

_FETCH_S = 120.0
_BORROW_S = 10.0
_UNSEALED_S = 2.0


class Objects:
    """All objects that this process knows."""

    def __init__(self, runtime: Runtime) -> None:
        self.table = ObjectTable()
        self.lock = Lock()
        self._runtime = runtime
        self._put_ids = IdSource(Prefix.OBJECT)
        self._dead: deque[Entry] = deque()
        self._to_borrow: deque[Entry] = deque()
        self._to_resolve: deque[Entry] = deque()
        self._to_seal: deque[ObjectInfo] = deque()
        self._to_free: list[tuple[str, str]] = []
        self._borrow_numbers = itertools.count(1)
        self._unacknowledged: dict[int, asyncio.Future[None]] = {}
        self._borrowing = 0

    # -- refs (any thread) -----------------------------------------------------------------------

    def new_ref(self, object_id: str) -> ObjectRef[Any]:
        """Return a ref to a new object that this process owns."""
        entry = self.table.create(object_id)
        ref: ObjectRef[Any] = ObjectRef(entry)
        entry.ref = weakref.ref(ref)
        return ref

    def adopt(self, object_id: str, owner: Address) -> ObjectRef[Any]:
        """Return a ref to an object named by another process; borrow it if it is not ours."""
        with self.lock:
            entry = self.table.get(object_id)
            if entry is None:
                if owner.peer_id == self._runtime.address.peer_id:
                    entry = Entry(object_id)
                    entry.place = failed_with(
                        ObjectFreedError(f"{object_id} was freed: no ref to it was left")
                    )
                else:
                    entry = self.table.create(object_id, owner)
                    self._borrowing += 1
                    self._to_borrow.append(entry)
                    self._runtime.wake()
            ref: ObjectRef[Any] | None = entry.ref() if entry.ref is not None else None
            if ref is None:
                ref = ObjectRef(entry)
                entry.ref = weakref.ref(ref)
            return ref

    def ref_died(self, entry: Entry) -> None:
        """The last ref object of an entry in this process was collected."""
        self._dead.append(entry)

    # -- put, get, wait (user threads) -----------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        """Store a value; return its ref."""
        if isinstance(value, ObjectRef):
            raise SerializationError(
                "put() of an ObjectRef: pass the ref itself, or put a list that contains it",
                field="value",
            )
        packed = pack(value, what="value")
        ref = self.new_ref(self._put_ids())
        entry = ref._entry
        entry.children = tuple(packed.refs)
        entry.place = self.place(entry.object_id, packed)
        return ref

    def place(self, object_id: str, packed: Packed) -> Place:
        """Return where a packed value lies: in the message if small, else in the arena."""
        runtime = self._runtime
        refs = tuple(runtime.wire_ref(r) for r in packed.refs)
        if packed.nbytes <= runtime.settings.inline_max_bytes or not runtime.arena.directory:
            return Inline(packed.data, tuple(Buffer(bytes(v)) for v in packed.buffers), refs)
        try:
            nbytes = runtime.arena.write(object_id, packed)
        except ArenaFullError as error:
            raise ArenaFullError(f"{error.message}. {runtime.largest_holders()}") from None
        node = runtime.node
        assert node is not None
        self._to_seal.append(
            ObjectInfo(
                object_id=object_id,
                nbytes=nbytes,
                job_id=runtime.job_id,
                owner_id=runtime.address.peer_id,
                node_id=node.node_id,
                created_at_s=time.time(),
            )
        )
        runtime.wake()
        return Stored(nbytes, node.node_id, node.url, refs, object_id)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout_s: float | None) -> list[Any]:
        """Return the values; raise the error of the first that failed."""
        entries = [r._entry for r in refs]
        if any(e.place is None for e in entries):
            self._wait_all(entries, timeout_s)
        return [self.load(e) for e in entries]

    def _wait_all(self, entries: list[Entry], timeout_s: float | None) -> None:
        self.request(entries)
        waiter = ThreadWaiter()
        with self.lock:
            for entry in entries:
                if entry.place is None:
                    waiter.missing += 1
                    entry.waiters.append(waiter)
        if waiter.missing and not self._runtime.wait_on(waiter, timeout_s):
            missing = self._forget(waiter, entries)
            if missing:
                raise GetTimeoutError(
                    f"get() waited {timeout_s:g} s for {len(missing)} of {len(entries)} objects: "
                    + self._runtime.describe_wait(missing)
                )

    def wait(
        self, refs: Sequence[ObjectRef[Any]], num_returns: int, timeout_s: float | None
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """Wait until ``num_returns`` are settled or the time passed; return (ready, not ready)."""
        entries = [r._entry for r in refs]
        self.request(entries)
        waiter = ThreadWaiter()
        with self.lock:
            pending = [e for e in entries if e.place is None]
            need = num_returns - (len(entries) - len(pending))
            if need > 0 and timeout_s != 0:
                waiter.missing = need
                for entry in pending:
                    entry.waiters.append(waiter)
        if need > 0 and timeout_s != 0:
            self._runtime.wait_on(waiter, timeout_s)
            self._forget(waiter, pending)
        ready: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        for ref in refs:
            settled = ref._entry.place is not None and len(ready) < num_returns
            (ready if settled else rest).append(ref)
        return ready, rest

    def _forget(self, waiter: Waiter, entries: list[Entry]) -> list[Entry]:
        with self.lock:
            missing = [e for e in entries if e.place is None]
            for entry in missing:
                if waiter in entry.waiters:
                    entry.waiters.remove(waiter)
        return missing

    def request(self, entries: Iterable[Entry]) -> None:
        """Ask the owners of borrowed, unsettled entries where they are (once each)."""
        asked = False
        for entry in entries:
            if entry.place is None and entry.owner is not None and entry.task is None:
                entry.task = _ASKED
                self._to_resolve.append(entry)
                asked = True
        if asked:
            self._runtime.wake()

    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        """Return a future of the value; it is loaded on a thread of the runtime's pool."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def load() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self.load(ref._entry))
            except BaseException as error:
                future.set_exception(error)

        def settled() -> None:
            self._runtime.loop.run_in_executor(None, load)

        self._runtime.call_soon(self.when_settled, ref._entry, settled)
        return future

    async def wait_async(self, ref: ObjectRef[Any]) -> Any:
        """Await the value from any event loop."""
        entry = ref._entry
        if entry.place is None:
            self.request([entry])
            waiter = LoopWaiter()
            with self.lock:
                pending = entry.place is None
                if pending:
                    entry.waiters.append(waiter)
            if pending:
                try:
                    await waiter.future
                finally:
                    self._forget(waiter, [entry])
        place = entry.place
        if isinstance(place, Stored) and self._runtime.arena_of(place.node_id) is None:
            return await asyncio.get_running_loop().run_in_executor(None, self.load, entry)
        return self.load(entry)

    def load(self, entry: Entry) -> Any:
        """Return the value of a settled entry, or raise its error. Not on the loop thread."""
        place = entry.place
        if isinstance(place, Failed):
            raise error_of(place, task=entry.object_id)
        assert place is not None
        data, buffers = self.bytes_of(place, entry.object_id)
        try:
            return unpack(data, buffers)
        except StokerError:
            raise
        except Exception as error:
            raise SerializationError(
                f"the value of {entry.object_id} cannot be read back in this process: "
                f"{type(error).__name__}: {error}. Its type must be importable here, and its "
                "__reduce__ and __setstate__ must accept what was pickled."
            ) from error

    def bytes_of(self, place: Place, object_id: str) -> tuple[Any, list[Any]]:
        """Return the stream and buffers of a value, fetched from its node if need be."""
        if isinstance(place, Inline):
            return place.data, [b.view for b in place.buffers]
        assert isinstance(place, Stored)
        object_id = place.object_id or object_id
        arena = self._runtime.arena_of(place.node_id)
        if arena is not None:
            return arena.read(object_id)
        whole = self._runtime.run(self._fetch(place, object_id), _FETCH_S + 5)
        return split(memoryview(whole))

    async def _fetch(self, place: Stored, object_id: str) -> bytes:
        client = self._runtime.client_of(place.node_url)
        deadline = time.monotonic() + _UNSEALED_S
        while True:
            try:
                raw = await client.call(
                    "GET", f"/v1/objects/{object_id}", raw=True, timeout_s=_FETCH_S
                )
                return bytes(raw)
            except NotFoundError:
                # The seal may still be on its way to the nodelet.
                if time.monotonic() > deadline:
                    raise ObjectLostError(
                        f"{object_id} is no longer on node {place.node_id}"
                    ) from None
                await asyncio.sleep(0.05)
            except StokerError as error:
                raise ObjectLostError(
                    f"{object_id} cannot be fetched from node {place.node_id}: {error}"
                ) from error

    # -- the loop thread -------------------------------------------------------------------------

    def when_settled(self, entry: Entry, then: Any) -> None:
        """Call ``then()`` on the loop thread once the entry is settled (now, if it is)."""
        self.request([entry])
        with self.lock:
            if entry.place is None:
                entry.waiters.append(Callback(then))
                return
        then()

    async def all_settled(self, entries: Iterable[Entry]) -> None:
        """Wait until all these have their places, whatever they are (loop thread)."""
        for entry in entries:
            if entry.place is None:
                done = asyncio.Event()
                self.when_settled(entry, done.set)
                await done.wait()

    def settle(self, entry: Entry, place: Place) -> None:
        """Give an entry its place and tell everybody who waits for it."""
        refs = place.refs if not isinstance(place, Failed) else ()
        if refs and not entry.children:
            entry.children = tuple(self.adopt(r.object_id, r.owner) for r in refs)
        with self.lock:
            waiters, subscribers = self.table.settle(entry, place)
        for waiter in waiters:
            waiter.settled()
        for line in subscribers:
            line.post(Resolved(entry.object_id, place))
        if self.table.get(entry.object_id) is not entry:
            self._free(entry)  # every ref to it died before it was made

    def on_resolve(self, line: Channel, message: Resolve) -> None:
        """A borrower asks where objects of ours are."""
        for object_id in message.object_ids:
            entry = self.table.get(object_id)
            if entry is None:
                line.post(
                    Resolved(
                        object_id,
                        failed_with(
                            ObjectFreedError(
                                f"{object_id} was freed by its owner "
                                f"{self._runtime.address.peer_id}: no ref to it was left there"
                            )
                        ),
                    )
                )
            elif entry.place is not None:
                line.post(Resolved(object_id, entry.place))
            else:
                entry.subscribers.append(line)

    def on_resolved(self, message: Resolved) -> None:
        """An owner answered."""
        entry = self.table.get(message.object_id)
        if entry is not None:
            self.settle(entry, message.place)

    def on_borrow(self, line: Channel, message: Borrow) -> None:
        """Another process holds refs to objects of ours."""
        with self.lock:
            gone = self.table.borrow(message.object_ids, line.peer.peer_id)
        line.post(Borrowed(message.number, gone))

    def on_borrowed(self, message: Borrowed) -> None:
        """An owner noted our borrow."""
        future = self._unacknowledged.pop(message.number, None)
        if future is not None and not future.done():
            future.set_result(None)
        for object_id in message.gone:
            entry = self.table.get(object_id)
            if entry is not None and entry.place is None:
                self.settle(
                    entry,
                    failed_with(ObjectFreedError(f"{object_id} was freed before it was borrowed")),
                )

    def on_unborrow(self, line: Channel, message: Unborrow) -> None:
        """Another process dropped its refs."""
        with self.lock:
            freed = self.table.unborrow(message.object_ids, line.peer.peer_id)
        for entry in freed:
            self._free(entry)

    def on_line_lost(self, line: Channel) -> None:
        """A peer is gone: its borrows end, and what it owned and had not given us is lost."""
        peer_id = line.peer.peer_id
        with self.lock:
            freed = self.table.borrower_gone(peer_id)
            orphans = [
                e
                for e in self.table.entries.values()
                if e.owner is not None and e.owner.peer_id == peer_id and e.place is None
            ]
        for entry in freed:
            self._free(entry)
        for entry in orphans:
            self._owner_gone(entry, "its process ended")

    def flush(self) -> None:
        """Do what user threads and dead refs left to be done."""
        if self._to_borrow:
            self._runtime.background.spawn(self._borrow(_drain(self._to_borrow)), name="borrow")
        if self._to_resolve:
            entries = _drain(self._to_resolve)
            self._runtime.background.spawn(self._resolve(entries), name="resolve")
        if self._dead:
            dead = _drain(self._dead)
            with self.lock:
                freed = self.table.dropped(dead)
            unborrow: dict[str, tuple[Address, list[str]]] = {}
            for entry in freed:
                if entry.owner is not None:
                    unborrow.setdefault(entry.owner.peer_id, (entry.owner, []))[1].append(
                        entry.object_id
                    )
                self._free(entry)
            if unborrow:
                self._runtime.background.spawn(self._unborrow(unborrow), name="unborrow")
        if self._to_seal or self._to_free:
            seals = _drain(self._to_seal)
            frees, self._to_free = self._to_free, []
            self._runtime.background.spawn(self._tell_nodelets(seals, frees), name="arena")

    async def borrows_acknowledged(self) -> None:
        """Wait until the owners know of every borrow begun so far (bounded)."""
        self.flush()
        deadline = self._runtime.loop.time() + _BORROW_S
        while self._borrowing and self._runtime.loop.time() < deadline:
            pending = list(self._unacknowledged.values())
            if pending:
                await asyncio.wait(pending, timeout=1.0)
            else:
                await asyncio.sleep(0.001)

    @property
    def borrowing(self) -> bool:
        """Whether a borrow is not acknowledged yet."""
        return self._borrowing > 0

    async def _borrow(self, entries: list[Entry]) -> None:
        try:
            for owner, theirs in _by_owner(entries):
                try:
                    line = await self._runtime.peers.line(owner)
                except StokerError as error:
                    for entry in theirs:
                        self._owner_gone(entry, str(error))
                    continue
                number = next(self._borrow_numbers)
                future = self._runtime.loop.create_future()
                self._unacknowledged[number] = future
                line.post(Borrow(number, [e.object_id for e in theirs]))
                await asyncio.wait([future], timeout=_BORROW_S)
                self._unacknowledged.pop(number, None)
        finally:
            self._borrowing -= len(entries)

    async def _resolve(self, entries: list[Entry]) -> None:
        for owner, theirs in _by_owner(entries):
            try:
                line = await self._runtime.peers.line(owner)
            except StokerError as error:
                for entry in theirs:
                    self._owner_gone(entry, str(error))
            else:
                line.post(Resolve([e.object_id for e in theirs]))

    async def _unborrow(self, groups: dict[str, tuple[Address, list[str]]]) -> None:
        # A value read from an object may hold refs whose borrow is still under way.
        await self.borrows_acknowledged()
        for owner, object_ids in groups.values():
            line = self._runtime.peers.open_line(owner.peer_id)
            # An object may have been borrowed anew since it was dropped.
            gone = [i for i in object_ids if self.table.get(i) is None]
            if line is not None and gone:
                line.post(Unborrow(gone))

    def _owner_gone(self, entry: Entry, why: str) -> None:
        owner = entry.owner
        self.settle(
            entry,
            failed_with(
                OwnerDiedError(
                    f"{entry.object_id} cannot be had: its owner "
                    f"{owner.peer_id if owner else '?'} does not answer ({why}). A ref is good "
                    "only while the process that made it lives, and within one cluster."
                )
            ),
        )

    def _free(self, entry: Entry) -> None:
        place, entry.children = entry.place, ()
        if entry.owner is None and isinstance(place, Stored):
            self._to_free.append((place.node_url, place.object_id or entry.object_id))
            arena = self._runtime.arena_of(place.node_id)
            if arena is not None:
                arena.unlink(place.object_id or entry.object_id)

    def free_stored(self, place: Place) -> None:
        """Free the stored arguments of a call that is over."""
        if isinstance(place, Stored):
            entry = Entry(place.object_id)
            entry.place = place
            self._free(entry)

    async def _tell_nodelets(
        self, seals: list[ObjectInfo], frees: list[tuple[str, str]]
    ) -> None:
        node = self._runtime.node
        if seals and node is not None:
            await self._runtime.client_of(node.url).call(
                "POST", "/v1/objects", SealObjects(objects=tuple(seals))
            )
        by_node: dict[str, list[str]] = {}
        for url, object_id in frees:
            by_node.setdefault(url, []).append(object_id)
        for url, object_ids in by_node.items():
            await self._runtime.client_of(url).call(
                "POST", "/v1/objects/free", FreeObjects(object_ids=tuple(object_ids))
            )


_ASKED = object()


def _drain(queue: deque[Any]) -> list[Any]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items


def _by_owner(entries: list[Entry]) -> list[tuple[Address, list[Entry]]]:
    groups: dict[str, tuple[Address, list[Entry]]] = {}
    for entry in entries:
        assert entry.owner is not None
        groups.setdefault(entry.owner.peer_id, (entry.owner, []))[1].append(entry)
    return list(groups.values())


def wire_ref(ref: ObjectRef[Any], mine: Address) -> Ref:
    """Return a ref as it travels."""
    return Ref(ref._entry.object_id, ref._entry.owner or mine)
