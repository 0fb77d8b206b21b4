"""A runtime of a world: the sdk's real ownership, borrowing, lineage, recovery, submission and leases.

It is composed as :class:`stoker.runtime.runtime.Runtime` composes it. Made here are its loop, which is the
world's, its channels, and the reader of values, which in the product blocks a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from stoker.runtime.job import JobContext
from stoker.runtime.net.clients import ClusterClients
from stoker.runtime.objects.detached import DetachedObjects
from stoker.runtime.objects.refs import wire_ref
from stoker.runtime.objects.store import ObjectStore
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker.runtime.objects.unseen_errors import UnseenErrors
from stoker.runtime.objects.values import ValueStore
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.process.identity import Identity, LocalNode
from stoker.runtime.router import MessageRouter
from stoker.runtime.tasks.lineage import Lineage
from stoker.runtime.tasks.overdue import OverdueCalls
from stoker.runtime.tasks.pending import PendingCalls
from stoker.runtime.tasks.reconstruction import Reconstruction
from stoker.runtime.tasks.submitter import TaskSubmitter
from stoker.runtime.tasks.task_spec import FunctionSpec, PendingTask
from stoker_wire.errors import NotFoundError, ObjectLostError, StokerError
from stoker_wire.http.auth import Credential
from stoker_wire.messages.cluster import Demand, NodeState
from stoker_wire.messages.common import Strategy
from stoker_wire.messages.data import Failed, Inline, Stored, Template
from stoker_wire.process.background import Background
from tests.sim.world.runtime.channels import SimChannels
from tests.sim.world.runtime.values import INLINE_NBYTES, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stoker.runtime.objects.refs import ObjectRef
    from stoker_wire.messages.common import Address
    from stoker_wire.messages.data import Location, Result
    from tests.sim.world.loop import Process
    from tests.sim.world.runtime.calls import CallPlan

_NO_ARGUMENTS = Inline(b"")
TICK_S = 0.1
_SEAL_S = 2.0
_PATIENCE_S = 20.0
_AGAIN_S = 0.25
_LOADS = 4


class Io:
    """The loop thread of a runtime (:class:`stoker.runtime.process.io_thread.IoThread`)."""

    running = True

    def __init__(self, world: Any, process: Process, name: str) -> None:
        self.loop = world.loop
        self.background = Background(name, on_crash=world.task_crashed)
        self.flushes: tuple[Callable[[], None], ...] = ()
        self._process = process
        self._woken = self._will_wake = False

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self._flush, context=self._process.context)

    flush_now = wake

    def wake_within(self, time_s: float) -> None:
        """Wake it for a ref that was dropped: that does nothing by itself until something else does."""
        if time_s == 0.0:
            self.wake()
        elif not self._woken and not self._will_wake:
            self._will_wake = True
            self.loop.call_later(time_s, self._flush, context=self._process.context)

    def _flush(self) -> None:
        self._woken = self._will_wake = False
        for flush in self.flushes:
            flush()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon(callback, *args)

    def is_current(self) -> bool:
        return True


class Unused:
    """What nobody in a world reads: the history of tasks, and the reader of sockets."""

    def _ignore(self, *_: Any, **__: Any) -> None:
        return None

    watch = runs = ended = write = add = add_row = demand = wake = on_channel_closed = _ignore


class _Table(ObjectTable):
    """The real table, whose entries know their world."""

    runtime: Runtime

    def create(self, object_id: str, owner: Address | None = None) -> Entry:
        entry = super().create(object_id, owner)
        self.runtime.world.refs.created(self.runtime, entry)
        return entry


class _Pending(PendingCalls):
    """The real table of calls, which counts what is settled."""

    runtime: Runtime

    def complete(self, task: PendingTask, result: Result) -> None:
        if task.task_id not in self._again:
            failed = bool(result.returns) and isinstance(result.returns[0], Failed)
            self.runtime.settled(task.task_id, "failed" if failed else "done")
        super().complete(task, result)

    def fail(self, task: PendingTask, failed: Failed, *, report: bool = True) -> None:
        if task.task_id in self.by_id and task.task_id not in self._again:
            self.runtime.settled(task.task_id, failed.code)
        super().fail(task, failed, report=report)


class Runtime:
    """The runtime of a driver, or of a worker (then ``node`` is where it shares memory)."""

    def __init__(
        self,
        world: Any,
        process: Process,
        address: Address,
        *,
        node: LocalNode | None = None,
        arena: Any = None,
    ) -> None:
        self.world, self.process, self.address = world, process, address
        self.submitted: dict[str, float] = {}
        """Calls that are not settled, and when they were submitted."""
        self.reads = 0
        """Reads that are under way."""
        self.held: dict[int, Sequence[ObjectRef[Any]]] = {}
        """Refs that tasks keep for longer than they run."""
        self._numbers = itertools.count()
        self._specs: dict[Any, FunctionSpec] = {}
        self.callers: Mapping[str, Any] = {}
        """The calls of each actor that it calls."""
        self._ticking = False
        self.identity = identity = Identity(
            peer_id=address.peer_id,
            gcs_url=world.gcs_url,
            credential=Credential("t"),
            host_id=process.host,
            node=node,
            socket_path="",
            is_worker=node is not None,
        )
        unused: Any = Unused()
        self.io: Any = Io(world, process, address.peer_id)
        io, settings = self.io, world.settings
        self.clients = clients = ClusterClients(identity, settings, io, arena)
        self.job = job = JobContext(identity, io, clients)
        self.channels: Any = SimChannels(self)
        self.table = table = _Table()
        table.runtime = self
        self.values = values = ValueStore(
            identity, address, io, clients, arena, job, inline_max_bytes=INLINE_NBYTES
        )
        self.lineage = lineage = Lineage(settings.lineage_max_bytes)
        self.objects = objects = ObjectStore(
            address,
            io,
            self.channels,
            unused,
            unused,
            table,
            values,
            UnseenErrors(world.loop, enabled=False),
            clients,
            lineage,
            DetachedObjects(identity, io, clients, job, table, values),
        )
        self.pending = pending = _Pending(io, self.channels, objects, unused, {}, lineage)
        pending.runtime = self
        self.overdue = OverdueCalls(io)
        self.tasks = tasks = TaskSubmitter(
            address, settings, io, self.channels, clients, objects, pending, self.overdue
        )
        objects.recovery.maker = Reconstruction(
            io, objects, pending, lineage, unused, tasks.resubmit
        )
        io.flushes = (tasks.flush, objects.flush)

    def route(self, actors: Any, executor: Any) -> None:
        """Have messages go to the calls of actors and to the executor of a worker, as well."""
        reader: Any = Unused()
        self.router = MessageRouter(
            self.io,
            reader,
            self.objects,
            self.pending,
            self.tasks,
            actors,
            self.overdue,
            executor,
        )

    # Calls

    def new_task_id(self) -> str:
        """Return the id of a new call."""
        return f"t_{self.address.peer_id[2:]}-{next(self._numbers)}"

    def submit(
        self,
        plan: CallPlan,
        resources: dict[str, float],
        *,
        group_id: str = "",
        deps: Sequence[ObjectRef[Any]] = (),
        nested: Sequence[ObjectRef[Any]] = (),
        parent: str = "",
    ) -> Any:
        """Submit a call of a remote function; return the ref of its result, a list of them, or None."""
        key = (tuple(resources.items()), plan.retries, plan.quick, group_id, plan.num_returns)
        spec = self._specs.get(key)
        if spec is None:
            number = len(self._specs) + 1
            spec = self._specs[key] = FunctionSpec(
                submitter=self.tasks,
                function=f"f{number}",
                blob=b"",
                name="f",
                template=Template(number, "f", "f", plan.num_returns, history=False),
                options=TaskOptions(max_retries=plan.retries),
                demand=Demand(
                    job_id=self.job.job_id,
                    resources=resources,
                    strategy=Strategy(group_id=group_id),
                ),
            )
            spec.registered = True
        task_id = self.new_task_id()
        self.begin(task_id, plan)
        refs = tuple(wire_ref(ref, self.address) for ref in nested)
        args = Inline(b"", (), refs) if refs else _NO_ARGUMENTS
        task = PendingTask(task_id, spec, args, tuple(deps), tuple(nested), parent, spec.function)
        result = self.pending.add(task)
        self.tasks._submitted.add(task)
        self.io.wake()
        self.begin_ticking()
        return result

    def begin(self, task_id: str, plan: CallPlan) -> None:
        """Note a call of this process."""
        self.submitted[task_id] = self.world.loop.now_s
        self.world.calls[task_id] = plan
        plan.owner = self

    def settled(self, task_id: str, how: str) -> None:
        """Count the outcome of a call: there is one."""
        self.world.call_settled(self, task_id, how)
        self.submitted.pop(task_id, None)

    def begin_ticking(self) -> None:
        """Tick while there are calls or leases."""
        if not self._ticking:
            self._ticking = True
            self.io.loop.call_later(TICK_S, self._tick, context=self.process.context)

    def _tick(self) -> None:
        self._ticking = False
        self.tasks.tick()
        self.world.checks.runtime_stepped(self)
        if self.tasks.busy:
            self.begin_ticking()

    # Objects

    def put(self, *, large: bool, children: Sequence[ObjectRef[Any]] = ()) -> ObjectRef[Any]:
        """Store a value with refs inside, and return its ref."""
        objects = self.objects
        ref = objects.new_ref(objects._put_ids())
        entry = ref._entry
        entry.children = tuple(children)
        entry.location = self.store(entry.object_id, children, large=large)
        return ref

    def store(
        self, object_id: str, refs: Sequence[ObjectRef[Any]], *, large: bool, owner_id: str = ""
    ) -> Location:
        """Write a value into a message, or into the memory of the node."""
        packed: Any = _Packed(value_of(object_id, large=large), refs)
        return self.values.store_result(object_id, packed, owner_id)

    def import_refs(self, location: Location | None) -> list[ObjectRef[Any]]:
        """Return refs to what is inside a value."""
        if location is None or isinstance(location, Failed):
            return []
        return [self.objects.import_ref(r.object_id, r.owner) for r in location.refs]

    def hold(self, refs: Sequence[ObjectRef[Any]], for_s: float) -> None:
        """Keep refs for a while."""
        key = next(self._numbers)
        self.held[key] = refs
        self.io.loop.call_later(for_s, self.held.pop, key, context=self.process.context)

    async def read(self, ref: ObjectRef[Any]) -> Failed | bytes:
        """Return the value of a ref, or why it cannot be had; as ``get`` does, in a coroutine."""
        entry = ref._entry
        self.reads += 1
        try:
            if entry.location is None:
                settled = self.io.loop.create_future()
                self.objects.when_settled(entry, lambda: settled.done() or settled.set_result(None))
                await settled
            while True:
                value = await self._load(entry)
                if value is not None:
                    self.world.refs.was_read(self, entry, value)
                    return value
                await asyncio.sleep(_AGAIN_S)  # the cluster could not be asked
        finally:
            self.reads -= 1

    async def _load(self, entry: Entry) -> Failed | bytes | None:
        """Read a value, and have it recovered where it is lost (:meth:`ObjectStore.load`)."""
        for _ in range(_LOADS):
            location = entry.location
            if isinstance(location, Failed):
                return location
            if isinstance(location, Inline):
                return location.data
            assert isinstance(location, Stored)
            value = await self.fetch(location)
            if value is not None:
                return value
            await self.objects.recovery.recover(entry, location)
        return None

    async def fetch(self, location: Stored) -> bytes | None:
        """Return a stored value from its node, or None if it is lost."""
        object_id, clients = location.object_id, self.clients
        arena: Any = clients.seen_arena(location.node_id)
        if arena is not None:
            with contextlib.suppress(ObjectLostError):
                return bytes(arena.read(object_id))
            return None
        client, began_s = clients.client_of(location.node_url), self.io.loop.time()
        while True:
            silent_s = self.io.loop.time() - began_s
            try:
                path = f"/v1/objects/{object_id}/value"
                value = await client.call("GET", path, raw=True, timeout_s=5.0, retry=False)
            except NotFoundError:  # its report may still be under way
                if silent_s > _SEAL_S:
                    return None
            except StokerError:
                with contextlib.suppress(StokerError):
                    if (await clients.node_of(location.node_id)).state is NodeState.DEAD:
                        return None
                if silent_s > _PATIENCE_S:
                    return None
            else:
                return bytes(value)
            await asyncio.sleep(_AGAIN_S)

    def left(self) -> dict[str, Any]:
        """Return what this process still has of calls and objects."""
        borrowing, recovery = self.objects.borrowing, self.objects.recovery
        borrows = borrowing.borrows
        counts = {
            "calls": list(self.submitted),
            "executions": list(self.pending.by_id),
            "reads": self.reads,
            "held": self.held,
            "entries": list(self.table.entries),
            "lent": [i for of in borrows.lent_by_channel.values() for i in of],
            "borrowed": [e.object_id for of in borrows.borrowed_by_channel.values() for e in of],
            "returning": list(borrows.releasing),
            "unacknowledged": list(borrowing.unacknowledged),
            "opening": len(borrowing._opening),
            "records": list(self.lineage.records),
            "recoveries": list(recovery._underway),
        }
        return {name: value for name, value in counts.items() if value}


class _Packed:
    """A value that needs no pickle (:class:`stoker.runtime.serialization.pickling.Packed`)."""

    buffers: tuple[memoryview, ...] = ()

    def __init__(self, data: bytes, refs: Sequence[ObjectRef[Any]]) -> None:
        self.data, self.refs, self.nbytes = data, refs, len(data)
