"""A world of runtimes that lend each other objects, in virtual time, with every fault of a channel.

Each process has the real object table, the real borrowing and its real shell; only the channels between
them, the clock and the users are made here. Messages are late, and now and then come twice; channels
are cut with what is under way on them; processes die. Whatever happens follows from the seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import selectors
from collections import Counter
from typing import TYPE_CHECKING, Any

from stoker.runtime.objects.borrowing import GRACE_S
from stoker.runtime.objects.detached import DetachedObjects
from stoker.runtime.objects.refs import CURRENT, wire_ref
from stoker.runtime.objects.store import ObjectStore
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker.runtime.objects.unseen_errors import UnseenErrors
from stoker.runtime.tasks.lineage import Lineage
from stoker_wire.data.channel import Channel
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import (
    Borrow,
    Borrowed,
    Inline,
    Ref,
    ReleaseBorrow,
    Resolve,
    Resolved,
)
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from stoker.runtime.objects.refs import ObjectRef

LATE_S = 0.1
"""The longest way of a message, and of the news that a channel is cut."""


class _Clock(selectors.SelectSelector):
    """Instead of waiting, moves the time on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds take no time."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class SimChannel(Channel):
    """One end of a channel in this world. ``far`` is the other."""

    far: SimChannel

    def __init__(self, world: World, at: Process, peer: Address) -> None:
        self.world = world
        self.at = at
        self.peer = peer
        self.closed = False
        self._arrives_s = 0.0

    def post(self, message: Any) -> None:
        world, far = self.world, self.far
        if self.closed:
            return
        late_s = world.random.uniform(0.0, LATE_S)
        # Later than the one before: timers of one moment go off in any order.
        self._arrives_s = max(self._arrives_s + 1e-6, world.loop.time() + late_s)
        world.loop.call_at(self._arrives_s, far.arrived, message)
        if world.random.random() < 0.2 and type(message) in _REPEATABLE:
            again_s = self._arrives_s + world.random.uniform(0.0, 5 * LATE_S)
            world.loop.call_at(again_s, far.arrived, message)

    def arrived(self, message: Any) -> None:
        if not self.closed:
            self.world.record(type(message).__name__, self.at)
            self.at.on_message(self, message)

    def cut(self, *, lossy: bool) -> None:
        """Both ends notice, each at its time; what is under way is lost, or comes before that."""
        self.world.record("cut", self.at)
        for end in (self, self.far):
            notice_s = self.world.loop.time() + self.world.random.uniform(0.0, LATE_S)
            if not lossy:
                notice_s = max(notice_s, end.far._arrives_s + 1e-6)
            self.world.loop.call_at(notice_s, end.close_now)

    def close_now(self) -> None:
        if not self.closed:
            self.closed = True
            self.at.on_lost(self)


_REPEATABLE = (Borrow, Borrowed, ReleaseBorrow, Resolve, Resolved)


class _Table(ObjectTable):
    """Remembers whose entries are whose, for refs that die anywhere."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def create(self, object_id: str, owner: Address | None = None) -> Entry:
        entry = super().create(object_id, owner)
        self._process.world.process_of[entry] = self._process
        return entry


class _NoValues:
    def on_full(self, reclaim: Any) -> None:
        pass

    def free(self, location: Any, object_id: str) -> None:
        pass

    def flush(self) -> None:
        pass


class Process:
    """A runtime as the borrowing sees it: it stands for the loop thread and the channels."""

    running = True

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.loop = world.loop
        self.alive = True
        self.address = Address(name, "n", "h", f"/{name}", "")
        self.background = Background(name, on_crash=world.crashed)
        self.channels: list[SimChannel] = []
        self.held: list[ObjectRef[Any]] = []
        """What its user holds."""
        self.pinned: dict[str, tuple[SimChannel, Any]] = {}
        self.calls: dict[str, tuple[Any, asyncio.Future[Any]]] = {}
        self._awake = False
        self._count = 0
        this: Any = self
        values: Any = _NoValues()
        table = _Table(self)
        unseen = UnseenErrors(self.loop, enabled=False)
        self.objects = ObjectStore(
            self.address,
            this,
            this,
            this,
            this,
            table,
            values,
            unseen,
            this,
            Lineage(0),
            DetachedObjects(this, this, this, this, table, values),
        )

    # what the shell asks of loop thread and channels

    def demand(self) -> None:
        """Nothing: all messages come by the loop here."""

    def wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        self._awake = False
        if self.alive:
            self.objects.flush()

    def tick(self) -> None:
        if self.alive:
            self.objects.flush()
            self.loop.call_later(0.1, self.tick)

    def open_channel(self, peer_id: str) -> SimChannel | None:
        return next((x for x in self.channels if x.peer.peer_id == peer_id and not x.closed), None)

    async def channel(self, address: Address) -> SimChannel:
        found = self.open_channel(address.peer_id)
        if found is not None:
            return found
        await asyncio.sleep(self.world.random.uniform(0.0, LATE_S))
        peer = self.world.processes[address.peer_id]
        if not peer.alive:
            raise UnavailableError(f"{address.peer_id} is gone")
        near, far = (
            SimChannel(self.world, self, address),
            SimChannel(self.world, peer, self.address),
        )
        near.far, far.far = far, near
        self.channels.insert(0, near)  # one that this process opened comes first, as in Channels
        peer.channels.append(far)
        return near

    # channels

    def on_lost(self, channel: SimChannel) -> None:
        self.channels.remove(channel)
        if self.alive:
            self.loop.call_later(GRACE_S, self._forget_pinned, channel)
            self.objects.borrowing.on_channel_closed(channel)
            self.loop.call_later(GRACE_S, self._fail_calls, channel)  # it asks first what happened

    def _fail_calls(self, channel: SimChannel) -> None:
        for (at, _), future in self.calls.values():
            if at is channel and not future.done():
                future.set_result(None)

    def _forget_pinned(self, channel: SimChannel) -> None:
        for task_id in [i for i, (at, _) in self.pinned.items() if at is channel]:
            del self.pinned[task_id]

    def on_message(self, channel: SimChannel, message: Any) -> None:
        borrowing = self.objects.borrowing
        match message:
            case Borrow():
                borrowing.on_borrow(channel, message)
            case Borrowed():
                borrowing.on_borrowed(message)
            case ReleaseBorrow():
                borrowing.on_release_borrow(channel, message)
            case Resolve():
                borrowing.on_resolve(channel, message)
            case Resolved():
                borrowing.on_resolved(message)
            case ("run", task_id, refs):
                self.background.spawn(self._run(channel, task_id, refs), name="run")
            case ("done", task_id, refs, pinned):
                self._done(channel, task_id, refs, pinned)
            case ("release", task_id):
                self.pinned.pop(task_id, None)

    def die(self) -> None:
        """Like SIGKILL: nothing runs here any more; peers read what is sent, or lose its tail."""
        self.world.record("die", self)
        self.alive = False
        self.background._closed = True
        for task in list(self.background._tasks):
            task.cancel()
        for channel in list(self.channels):
            channel.cut(lossy=self.world.random.random() < 0.5)
            channel.closed = True
        self.held.clear()
        self.pinned.clear()
        self.calls.clear()
        self.objects.table.entries.clear()

    # its user

    def put(self, children: list[ObjectRef[Any]]) -> ObjectRef[Any]:
        self._count += 1
        ref = self.objects.new_ref(f"o_{self.address.peer_id}_{self._count}")
        ref._entry.children = tuple(children)
        location = Inline(b"", (), tuple(wire_ref(r, self.address) for r in children))
        if self.world.random.random() < 0.3:  # a task's result: it comes later
            self.loop.call_later(
                self.world.random.uniform(0, 1), self._settle, ref._entry, location
            )
        else:
            ref._entry.location = location
        return ref

    def _settle(self, entry: Entry, location: Inline) -> None:
        if self.alive:
            self.objects.settle(entry, location)

    async def read(self, ref: ObjectRef[Any]) -> list[ObjectRef[Any]]:
        """Return the refs inside a value, or [] where its owner is dead."""
        entry = ref._entry
        settled = self.loop.create_future()
        self.objects.when_settled(entry, lambda: settled.done() or settled.set_result(None))
        await settled
        if not isinstance(entry.location, Inline):
            self.world.refused(self, ref)
            return []
        import_ref = self.objects.borrowing.import_ref
        return [import_ref(r.object_id, r.owner) for r in entry.location.refs]

    async def call(self, peer: Process, refs: list[ObjectRef[Any]]) -> list[ObjectRef[Any]]:
        """Call another process with refs inside the arguments; return those inside its result."""
        try:
            channel = await self.channel(peer.address)
        except UnavailableError:
            return []
        self._count += 1
        task_id = f"t_{self.address.peer_id}_{self._count}"
        future = self.loop.create_future()
        self.calls[task_id] = ((channel, refs), future)
        channel.post(("run", task_id, [wire_ref(r, self.address) for r in refs]))
        if channel.closed:
            future.set_result(None)
        result = await future
        self.calls.pop(task_id, None)
        return result or []

    def _done(self, channel: SimChannel, task_id: str, refs: list[Ref], pinned: bool) -> None:
        (_, future) = self.calls.get(task_id, (None, None))
        import_ref = self.objects.borrowing.import_ref
        imported = [import_ref(r.object_id, r.owner) for r in refs]
        if future is not None and not future.done():
            future.set_result(imported)
        if pinned:
            self.background.spawn(self._release(channel, task_id), name="release")

    async def _release(self, channel: SimChannel, task_id: str) -> None:
        await self.objects.borrowing.wait_acknowledged(channel)
        channel.post(("release", task_id))

    async def _run(self, channel: SimChannel, task_id: str, refs: list[Ref]) -> None:
        """A task: reads, keeps, makes, passes on, returns some of all that."""
        chance = self.world.random
        import_ref = self.objects.borrowing.import_ref
        known = [import_ref(r.object_id, r.owner) for r in refs]
        for ref in list(known):
            if chance.random() < 0.3:
                known += await self.read(ref)
        if chance.random() < 0.3:
            known.append(self.put(chance.sample(known, min(len(known), 2))))
        if chance.random() < 0.3:
            known += await self.call(self.world.anybody(), chance.sample(known, len(known) // 2))
        await asyncio.sleep(chance.choice([0.0, 0.0, 0.2]))
        self.held += [r for r in known if chance.random() < 0.3]
        result = [r for r in known if chance.random() < 0.4]
        if result:
            self.pinned[task_id] = (channel, result)
        del known
        if self.objects.borrowing.would_overtake_borrow(channel):
            await self.objects.borrowing.wait_acknowledged(channel)
        channel.post(("done", task_id, [wire_ref(r, self.address) for r in result], bool(result)))
        if channel.closed:
            self.pinned.pop(task_id, None)


class World:
    """All processes, and what is checked of them."""

    def __init__(self, seed: int, count: int, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(CURRENT, "runtime", self)
        self.random = random.Random(seed)
        self.loop = VirtualLoop()
        self.messages: Counter[str] = Counter()
        """What arrived, by type; cuts and deaths among them."""
        self._hash = hashlib.blake2b(digest_size=16)
        self.process_of: dict[Entry, Process] = {}
        self.crashes: list[str] = []
        self.unfair: list[str] = []
        self.processes: dict[str, Process] = {}
        for _ in range(count):
            self.start()

    # `stoker.runtime.objects.refs.CURRENT`

    @property
    def objects(self) -> World:
        return self

    def drop_ref(self, entry: Entry) -> None:
        process = self.process_of.get(entry)
        if process is not None and process.alive:
            process.objects.drop_ref(entry)

    def record(self, what: str, process: Process) -> None:
        """Count a message or a fault, and add it to the hash of the run."""
        self.messages[what] += 1
        self._hash.update(f"{self.loop.time():.6f} {process.address.peer_id} {what}".encode())

    def digest(self) -> str:
        """Return the hash of all that happened."""
        return self._hash.hexdigest()

    def crashed(self, name: str, error: BaseException) -> None:
        self.crashes.append(f"{name}: {error!r}")

    def refused(self, process: Process, ref: ObjectRef[Any]) -> None:
        """A reader got no value: right only if the owner is dead."""
        owner = ref._entry.owner or process.address
        if self.processes[owner.peer_id].alive and process.alive:
            self.unfair.append(
                f"{process.address.peer_id} cannot read {ref.id}: {ref._entry.location}"
            )

    # life

    def start(self) -> None:
        name = f"p{len(self.processes)}"
        process = self.processes[name] = Process(self, name)
        self.loop.call_later(self.random.uniform(0, 0.1), process.tick)

    @property
    def living(self) -> list[Process]:
        return [p for p in self.processes.values() if p.alive]

    def anybody(self) -> Process:
        return self.random.choice(self.living)

    def act(self, *, faults: bool) -> None:
        """One thing that a user, or fate, does."""
        chance, process = self.random, self.anybody()
        held = process.held
        some = chance.sample(held, min(len(held), chance.randint(0, 4)))
        what = chance.random()
        if what < 0.25:
            held.append(process.put(some))
        elif what < 0.5:
            for ref in some:
                held.remove(ref)
        elif what < 0.85:
            process.background.spawn(self._call(process, some), name="user")
            if chance.random() < 0.5:  # passed on, and let go
                for ref in some:
                    held.remove(ref)
        elif what < 0.93:
            for ref in some:
                process.background.spawn(self._read(process, ref), name="user")
        elif faults and what < 0.97:
            if process.channels:
                chance.choice(process.channels).cut(lossy=chance.random() < 0.5)
        elif faults and len(self.living) > 2:
            process.die()
            self.start()

    async def _call(self, process: Process, refs: list[ObjectRef[Any]]) -> None:
        process.held += await process.call(self.anybody(), refs)

    async def _read(self, process: Process, ref: ObjectRef[Any]) -> None:
        process.held += await process.read(ref)

    # truth

    def check(self) -> None:
        """Whoever holds a ref of a living owner can still have the object."""
        assert not self.crashes, self.crashes
        assert not self.unfair, self.unfair
        for process in self.living:
            for ref in process.held:
                owner = ref._entry.owner or process.address
                peer = self.processes[owner.peer_id]
                assert not peer.alive or ref.id in peer.objects.table.entries, (
                    f"{process.address.peer_id} holds {ref.id}, which was freed"
                )

    def end(self) -> None:
        """Everybody lets go of everything."""
        for process in self.living:
            process.held.clear()

    def left(self) -> dict[str, Any]:
        """What is left anywhere, by process."""
        left = {}
        for process in self.living:
            borrowing = process.objects.borrowing
            borrows = borrowing.borrows
            lent, borrowed = borrows.lent_by_channel, borrows.borrowed_by_channel
            counts = {
                "entries": list(process.objects.table.entries),
                "lent": [i for of in lent.values() for i in of],
                "borrowed": [e.object_id for of in borrowed.values() for e in of],
                "returning": list(borrows.releasing),
                "unacknowledged": list(borrowing.unacknowledged),
                "opening": list(borrowing._opening),
                "pinned": list(process.pinned),
                "calls": list(process.calls),
                "channels that ended": [x for x in (*lent, *borrowed) if x.closed],  # type: ignore[attr-defined]
            }
            found = {k: v for k, v in counts.items() if v}
            if found:
                left[process.address.peer_id] = found
        return left


def run(world: World, steps: int, *, faults: bool, then: Callable[[], None] | None = None) -> None:
    """Let ``steps`` things happen, then let everybody go, and wait until it is quiet."""

    async def live() -> None:
        for _ in range(steps):
            world.act(faults=faults)
            await asyncio.sleep(world.random.expovariate(30.0))
            world.check()
        if then is not None:
            then()
        for _ in range(60):  # calls that are under way end, and hand over what they hold
            await asyncio.sleep(0.5)
            world.check()
            world.end()

    world.loop.run_until_complete(live())
