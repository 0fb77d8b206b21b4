"""The object store of a process: refs, puts, gets, waits, settling and freeing.

It is the shell around the pure object table. User threads create refs, put, get and wait; the loop thread
settles entries and frees. ``lock`` guards the moments where both meet. Ref objects are collected on any
thread: their entries are only appended to a queue, which the loop empties.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from stoker.exceptions import (
    BadRequestError,
    GetTimeoutError,
    ObjectFreedError,
    ObjectLostError,
    SerializationError,
)
from stoker.runtime.objects.borrowing import Borrowing
from stoker.runtime.objects.recovery import Recovery
from stoker.runtime.objects.refs import ObjectRef, ObjectRefGenerator
from stoker.runtime.objects.table import Entry, Waiter, describe_wait
from stoker.runtime.objects.values import drain
from stoker.runtime.objects.waiters import (
    Callback,
    DirectWaiter,
    FailFastWaiter,
    LoopWaiter,
    ThreadWaiter,
    ValueFuture,
    Waits,
)
from stoker.runtime.serialization.exceptions import decode_error, encode_error
from stoker.runtime.serialization.pickling import pack
from stoker_wire.ids import IdSource, Prefix, task_of
from stoker_wire.messages.data import Failed, Inline, Location, Resolved, Stored
from stoker_wire.messages.objects import is_detached

if TYPE_CHECKING:
    import concurrent.futures

    from stoker.runtime.net.channels import Channels
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.net.direct_reader import DirectReader
    from stoker.runtime.objects.detached import DetachedObjects
    from stoker.runtime.objects.table import ObjectTable
    from stoker.runtime.objects.unseen_errors import UnseenErrors
    from stoker.runtime.objects.values import ValueStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.serialization.pickling import Packed
    from stoker_wire.messages.common import Address
    from stoker_wire.messages.data import Ref

Waitable: TypeAlias = ObjectRef[Any] | ObjectRefGenerator[Any]
_FLUSH_S = 5.0
_LOADS = 4
"""How often a value is read: it may be lost again where it was recovered."""
_MARK = Inline(pack(None, what="").data)
"""The location of every mark (see ``new_mark``)."""


class _Lineage(Protocol):
    """The table of how stored results were made."""

    def release(self, task_id: str) -> Sequence[Location]:
        """Note that a stored result of a task is freed; return the arguments that nobody needs now."""


class ObjectStore:
    """The objects that this process knows."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        reader: DirectReader,
        waits: Waits,
        table: ObjectTable,
        values: ValueStore,
        unseen: UnseenErrors,
        clients: ClusterClients,
        lineage: _Lineage,
        detached: DetachedObjects,
    ) -> None:
        self.address = address
        self.table = table
        self.lock = Lock()
        self.waits = waits
        self.values = values
        self.unseen = unseen
        self.mark_seen = unseen.mark_seen
        self._io = io
        self._reader = reader
        self._put_ids = IdSource(Prefix.OBJECT)
        self._dropped_refs: deque[Entry] = deque()
        self._marks: dict[str, Callable[[str], object]] = {}
        self._pinned: dict[str, ObjectRef[Any]] = {}
        self._lineage = lineage
        # Each settles and frees for the other, so these parts are made here.
        self.detached = detached
        detached.objects = self
        self.recovery = Recovery(
            address,
            io,
            channels,
            clients,
            table,
            self.relocate,
            values.free,
            detached.locate,
        )
        self.borrowing = Borrowing(address, io, channels, table, self)
        self.import_ref = self.borrowing.import_ref
        values.on_full(self._reclaim)

    # -- refs (any thread) -----------------------------------------------------------------------

    def new_ref(self, object_id: str) -> ObjectRef[Any]:
        """Return a ref to a new object that this process owns."""
        entry = self.table.create(object_id)
        return ObjectRef(entry)

    def new_mark(self, on_free: Callable[[str], object]) -> ObjectRef[None]:
        """Return a ref to a mark: an object without a value, whose refs are counted like all others.

        ``on_free`` is called with its id, on the loop thread, when no process has a ref any more.
        """
        ref = self.new_ref(self._put_ids())
        self._marks[ref._entry.object_id] = on_free
        ref._entry.location = _MARK
        return ref

    def pin(self, ref: ObjectRef[Any]) -> None:
        """Hold a ref as long as this process lives, or until its value is freed."""
        self._pinned[ref._entry.object_id] = ref

    def drop_ref(self, entry: Entry) -> None:
        """Note that a ref object of an entry was collected (any thread, also in a destructor)."""
        self._dropped_refs.append(entry)

    # -- put, get, wait (user threads) -----------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        """Store a value; return its ref."""
        if isinstance(value, ObjectRef):
            fix = "pass the ref itself, or put a list that contains it"
            raise SerializationError(f"put() takes no ObjectRef\n{fix}", field="value")
        return self.put_packed(pack(value, what="value"))

    def put_packed(self, packed: Packed, held: tuple[ObjectRef[Any], ...] = ()) -> ObjectRef[Any]:
        """Store a packed value; return its ref. The object holds the refs inside, and ``held`` besides."""
        ref = self.new_ref(self._put_ids())
        entry = ref._entry
        entry.children = (*packed.refs, *held)
        try:
            entry.location = self.values.store(entry.object_id, packed)
        except BaseException:
            self.values.discard(entry.object_id)
            raise
        return ref

    def put_failed(self, failed: Failed) -> ObjectRef[Any]:
        """Return a ref to an error in place of a value."""
        ref = self.new_ref(self._put_ids())
        ref._entry.location = failed
        return ref

    def free_now(self, ref: ObjectRef[Any]) -> None:
        """Free a value though refs to it are left, which then raise ObjectFreedError."""
        entry = ref._entry
        self._pinned.pop(entry.object_id, None)
        if is_detached(entry.object_id):
            self.detached.free(entry.object_id)
            return
        if entry.owner is not None:
            raise BadRequestError(
                f"free(): {ref!r} belongs to {entry.owner.peer_id}\n"
                "only the process that owns an object can free it; a detached one any",
                field="refs",
            )
        if entry.location is None:
            raise BadRequestError(
                f"free(): {ref!r} is not there yet\nstop the task that makes it with cancel()",
                field="refs",
            )
        self._io.run(self._free_now(entry), _FLUSH_S)

    async def _free_now(self, entry: Entry) -> None:
        if type(entry.location) is not Failed:
            self.values.free(entry.location, entry.object_id)
            freed = ObjectFreedError(f"{entry.object_id} was freed by stoker.free()")
            self.relocate(entry, encode_error(freed))
            entry.children = ()

    def get(self, refs: Sequence[ObjectRef[Any]], timeout_s: float | None) -> list[Any]:
        """Return the values; raise the error of the first that fails, whatever the rest does."""
        entries = [r._entry for r in refs]
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failed, missing = None, False
        for entry in entries:
            if (location := entry.location) is None:
                missing = True
            elif type(location) is Failed:
                failed = failed or location
        if missing and failed is None:
            failed = self._wait_all(entries, timeout_s)
        try:
            if failed is not None:
                raise decode_error(failed)
            if deadline_s is None:
                return [self.load(e, None, entries) for e in entries]
            return [self.load(e, deadline_s - time.monotonic(), entries) for e in entries]
        except BaseException:
            self.unseen.mark_requested(entries)
            raise

    def _wait_all(self, entries: list[Entry], timeout_s: float | None) -> Failed | None:
        """Wait until all are settled, or one has failed; return that failure."""
        waiter = self._new_waiter(entries)
        with self.lock:
            for entry in entries:
                if entry.location is None:
                    waiter.missing += 1
                    entry.waiters.append(waiter)
        if waiter.missing and not self.waits.wait(waiter, timeout_s, "get()", entries):
            missing = self._remove_waiter(waiter, entries)
            if missing:
                lines = [
                    f"get() waited {timeout_s:g} s for {len(missing)} of {len(entries)} objects",
                    describe_wait(missing),
                    self.waits.why(missing, timeout_s or 0.0),
                ]
                raise GetTimeoutError("\n".join(line for line in lines if line))
        if waiter.failed is not None:
            self._remove_waiter(waiter, entries)
        return waiter.failed

    def wait(
        self, refs: Sequence[Waitable], num_returns: int, timeout_s: float | None
    ) -> tuple[list[Waitable], list[Waitable]]:
        """Wait until ``num_returns`` are settled or the time passed; return (ready, not ready).

        A generator is settled while it has an item that was not taken, and when it has ended.
        """
        streams = [r._stream for r in refs if isinstance(r, ObjectRefGenerator)]
        given: Any = [r for r in refs if not isinstance(r, ObjectRefGenerator)] if streams else refs
        entries: list[Entry] = [ref._entry for ref in given]
        self._request(entries)
        waiter = ThreadWaiter()
        with self.lock:
            pending = [e for e in entries if e.location is None]
            silent = [s for s in streams if not s.is_ready]
            need = num_returns - (len(refs) - len(pending) - len(silent))
            if need > 0 and timeout_s != 0:
                self._io.check_may_wait()
                waiter.missing = need
                for entry in pending:
                    entry.waiters.append(waiter)
                for stream in silent:
                    stream.watch(waiter)
        if need > 0 and timeout_s != 0:
            asked = [*pending, *(s.completed_ref._entry for s in silent)]
            self.waits.wait(waiter, timeout_s, "wait()", asked)
            self._remove_waiter(waiter, pending)
            with self.lock:
                for stream in silent:
                    stream.unwatch(waiter)
        ready: list[Waitable] = []
        rest: list[Waitable] = []
        requested: list[Entry] = []
        for ref in refs:
            if len(ready) == num_returns:
                rest.append(ref)
            elif isinstance(ref, ObjectRefGenerator):
                (ready if ref.next_ready() else rest).append(ref)
            elif (entry := ref._entry).location is None:
                rest.append(ref)
            else:
                ready.append(ref)
                requested.append(entry)
        self.unseen.mark_requested(requested)
        return ready, rest

    def _new_waiter(self, entries: Sequence[Entry]) -> FailFastWaiter:
        self._io.check_may_wait()
        task = entries[0].task
        if len(entries) == 1 and task is not None and task.channel is not None:
            return DirectWaiter(self._reader, task.channel)
        self._request(entries)
        return FailFastWaiter()

    def _request(self, entries: Sequence[Entry]) -> None:
        """Have their owners say where these are, and the loop thread hear it."""
        self._reader.demand()
        self.borrowing.request(entries)

    def _remove_waiter(self, waiter: Waiter, entries: list[Entry]) -> list[Entry]:
        with self.lock:
            missing = [e for e in entries if e.location is None]
            for entry in missing:
                if waiter in entry.waiters:
                    entry.waiters.remove(waiter)
        return missing

    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        """Return a future of the value; it is loaded on a thread of the runtime's pool."""
        future: concurrent.futures.Future[Any] = ValueFuture(self.waits)

        def load() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self.load(ref._entry))
            except BaseException as error:
                future.set_exception(error)

        def settled() -> None:
            self._io.loop.run_in_executor(None, load)

        self._io.call_soon(self.when_settled, ref._entry, settled)
        return future

    async def wait_async(self, ref: ObjectRef[Any]) -> Any:
        """Await the value from any event loop."""
        entry = ref._entry
        if entry.location is None:
            self._request([entry])
            waiter = LoopWaiter()
            with self.lock:
                pending = entry.location is None
                if pending:
                    entry.waiters.append(waiter)
            if pending:
                try:
                    await self.waits.wait_async(waiter.future, "await", [entry])
                finally:
                    self._remove_waiter(waiter, [entry])
        location = entry.location
        if type(location) is not Stored:
            return self.load(entry)
        if self.values.arena_of(location.node_id) is not None:
            with contextlib.suppress(ObjectLostError):
                return self.values.load(location, entry.object_id)
        return await asyncio.get_running_loop().run_in_executor(None, self.load, entry)

    def load(
        self,
        entry: Entry,
        timeout_s: float | None = None,
        others: Sequence[Entry] = (),
        plain: bool = False,
    ) -> Any:
        """Return the value of a settled entry, or raise its error. Not on the loop thread.

        ``timeout_s`` bounds how long one of another machine, or one that is made again, may take to come.
        ``others`` are loaded next: lost ones are recovered together. ``plain``: see ``ValueStore``.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        undecided = ""
        for attempt in range(_LOADS):
            location = entry.location
            assert location is not None
            if type(location) is not Stored:
                if type(location) is Failed:
                    self.unseen.mark_seen(location)
                return self.values.load(location, entry.object_id, None, plain)
            try:
                return self.values.load(location, entry.object_id, timeout_s, plain)
            except ObjectLostError as error:
                if attempt == _LOADS - 1 and undecided:
                    raise type(error)(f"{error.message}\n{undecided}") from None
                if attempt == _LOADS - 1 or self._io.is_current():
                    raise
                # It may be in a cycle with the frames it came through, which have the refs of callers.
                error.with_traceback(None)
            if deadline_s is not None:
                timeout_s = max(0.0, deadline_s - time.monotonic())
            undecided = self._recover(entry, location, timeout_s, others)
        raise AssertionError  # the last attempt has raised

    def _recover(
        self, entry: Entry, lost: Stored, timeout_s: float | None, others: Sequence[Entry]
    ) -> str:
        """Wait until a lost object has a new location; have others that were lost with it recovered too.

        Return why that could not be decided, or ''.
        """
        waiter = ThreadWaiter()
        waiter.missing = 1
        undecided: list[str] = []

        def done(why: str) -> None:
            undecided.append(why)
            waiter.settled()

        self._io.call_soon(self.recovery.begin, entry, lost, done)
        for other in others:
            location = other.location
            if other is not entry and type(location) is Stored and location.node_id == lost.node_id:
                self._io.call_soon(self.recovery.begin, other, location, _nothing)
        if not self.waits.wait(waiter, timeout_s, "get()", [entry]):
            waited = f"{timeout_s:.3g} s for {entry.object_id}, which cannot be read on node {lost.node_id}"
            lines = [f"get() waited {waited}, to be made again", self.recovery.silent()]
            lines.append(describe_wait([entry]))
            raise GetTimeoutError("\n".join(line for line in lines if line))
        return undecided[0]

    def load_argument(self, ref: Ref, location: Location) -> Any:
        """Return the value of an argument at the location that its caller named; not on the loop thread.

        Where that is lost, the owner says where it is now.
        """
        try:
            return self.values.load(location, ref.object_id)
        except ObjectLostError:
            if type(location) is not Stored:
                raise
        held = self.import_ref(ref.object_id, ref.owner)
        with self.lock:
            if held._entry.location is None:
                held._entry.location = location
        return self.load(held._entry)

    # -- the loop thread -------------------------------------------------------------------------

    def when_settled(self, entry: Entry, callback: Any) -> None:
        """Call ``callback()`` on the loop thread once the entry is settled (now, if it is)."""
        self._request([entry])
        with self.lock:
            if entry.location is None:
                entry.waiters.append(Callback(callback))
                return
        callback()

    def watch(self, refs: Sequence[ObjectRef[Any]], waiter: Waiter) -> None:
        """Have ``waiter`` told of each ref once it is settled, now if it is (any thread)."""
        entries = [ref._entry for ref in refs]
        self._request(entries)
        self.unseen.mark_requested(entries)
        settled = []
        with self.lock:
            for entry in entries:
                if entry.location is None:
                    entry.waiters.append(waiter)
                else:
                    settled.append(entry.location)
        for location in settled:
            waiter.settled(location)

    async def all_settled(self, entries: Iterable[Entry]) -> None:
        """Wait until all these are settled, or one has failed (loop thread)."""
        awaited, done = list(entries), asyncio.Event()
        missing = [e for e in awaited if e.location is None]
        left = len(missing)

        def settled(entry: Entry) -> None:
            nonlocal left
            left -= 1
            if not left or isinstance(entry.location, Failed):
                done.set()

        for entry in missing:
            self.when_settled(entry, partial(settled, entry))
        if missing and not any(isinstance(e.location, Failed) for e in awaited):
            await done.wait()

    def close(self) -> None:
        """Fail all unsettled entries, so that nobody waits for ever."""
        self.unseen.close()
        for entry in [e for e in list(self.table.entries.values()) if e.location is None]:
            lost = ObjectLostError(
                f"stoker.shutdown() was called before {entry.object_id} was there"
            )
            self.settle(entry, encode_error(lost))

    def settle(self, entry: Entry, location: Location) -> None:
        """Give an entry its location, and notify all that wait for it."""
        is_referenced = self.table.get(entry.object_id) is entry
        if location.refs and is_referenced and not entry.children:
            entry.children = tuple(
                self.borrowing.import_ref(r.object_id, r.owner) for r in location.refs
            )
        is_new = entry.task is not None and entry.location is None
        if is_new and (type(location) is Failed or self.unseen.requested):
            self.unseen.on_settle(entry, location)  # before anybody can read it
        with self.lock:
            waiters, subscribers = self.table.settle(entry, location)
        for waiter in waiters:
            waiter.settled(location)
        for channel in subscribers:
            channel.post(Resolved(entry.object_id, location))
        if not is_referenced:
            self.free(entry)  # the last ref to it was dropped before

    def relocate(self, entry: Entry, location: Location) -> None:
        """Give a settled entry another location, as its value was lost at the one before (loop thread)."""
        if self.table.get(entry.object_id) is not entry:  # the last ref to it was dropped meanwhile
            if entry.owner is None:
                self.values.free(location, entry.object_id)
            return
        was_stored = type(entry.location) is Stored
        entry.task = None
        entry.location = location
        if location.refs:
            entry.children = tuple(
                self.borrowing.import_ref(r.object_id, r.owner) for r in location.refs
            )
        if was_stored and type(location) is not Stored:
            self._release_lineage(entry)

    def _release_lineage(self, entry: Entry) -> None:
        for args in self._lineage.release(task_of(entry.object_id)):
            self.values.free(args)

    def discard(self, locations: Iterable[Location]) -> None:
        """Free the bytes of results that nobody waits for any more, unless they are in use.

        A retried task stores its results under the same ids.
        """
        for location in locations:
            if isinstance(location, Stored):
                entry = self.table.get(location.object_id)
                held = entry.location if entry is not None else None
                if entry is None or isinstance(held, Failed) or _is_elsewhere(held, location):
                    self.values.free(location)

    def replace(self, object_id: str, location: Location) -> None:
        """Take a value that another attempt of its task has made again (loop thread).

        It takes the place of one on another node, which may be lost with the attempt that made it, and of
        one with refs in it, whose owner may have been that attempt's worker.
        """
        entry = self.table.get(object_id)
        held = entry.location if entry is not None else None
        if entry is None or held is None or isinstance(held, Failed):
            self.values.free(location, object_id)
        elif _is_elsewhere(held, location):
            self.values.free(held, object_id)
            self.relocate(entry, location)
        elif location.refs and type(location) is type(held):
            self.relocate(entry, location)
        elif not isinstance(held, Stored):
            self.values.free(location, object_id)

    def flush(self) -> None:
        """Do the work that user threads and dropped refs left to the loop thread."""
        self.borrowing.flush()
        while self._dropped_refs:  # what is freed may hold the last refs to other objects
            dropped = drain(self._dropped_refs)
            with self.lock:
                freed = self.borrowing.borrows.drop_refs(dropped)
            for entry in freed:
                self.free(entry)
        self.borrowing.send_releases()
        self.values.flush()

    def _reclaim(self) -> bool:
        """Free dropped refs now: their extents are worth more than a turn of the loop costs."""
        if not self._dropped_refs or self._io.is_current():
            return False
        self._io.run(self._flush_now(), _FLUSH_S)
        return True

    async def _flush_now(self) -> None:
        self.flush()

    def free(self, entry: Entry) -> None:
        """Free the value of a removed entry, and drop the refs inside."""
        entry.children = ()
        if entry.owner is None:
            if entry.location is _MARK:
                self._marks.pop(entry.object_id)(entry.object_id)
                return
            if type(entry.location) is Failed:
                self.unseen.on_free(entry.location)
            self.values.free(entry.location, entry.object_id)
            if type(entry.location) is Stored:
                self._release_lineage(entry)


def _is_elsewhere(held: Location | None, location: Location) -> bool:
    """Return whether two locations of a value are in the memory of different nodes."""
    return (
        isinstance(held, Stored)
        and isinstance(location, Stored)
        and held.node_id != location.node_id
    )


def _nothing(_: str) -> None:
    """Do nothing when a recovery ends for which nobody waits yet."""
