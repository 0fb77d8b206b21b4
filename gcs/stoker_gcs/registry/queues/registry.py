"""The registry of queues: applies ``queues.rules`` to what operators ask, one change at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stoker_gcs.registry.queues import rules
from stoker_gcs.registry.queues.rules import QUEUES
from stoker_gcs.state import schema
from stoker_gcs.state.records import MAX_TRIES, Versioned
from stoker_gcs.store.changes import Change, Delete, Operation, Value, WriteConflict
from stoker_wire.errors import BadRequestError, ConflictError, NameTakenError, NotFoundError
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.queues import (
    DEFAULT_QUEUE,
    ChangeQueue,
    CreateQueue,
    Queue,
    SetQueues,
    SetQueuesReply,
)
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.state.records import StateStore

MAX_QUEUES = 1000


class QueueRegistry:
    """Durable creation, change and removal of queues."""

    def __init__(self, state: StateStore, nodes: NodeRegistry, jobs: JobRegistry) -> None:
        self._state = state
        self._nodes = nodes
        self._jobs = jobs

    async def create(self, body: CreateQueue) -> Queue:
        """Create a queue; NameTakenError if there is one of this name that is another."""

        def make(current: Queue | None) -> Queue:
            queue = rules.created(body, self._state.now())
            if current is None:
                return queue
            if rules.created(body, current.created_at_s) == current:
                return current  # the request, again
            raise NameTakenError(
                f"there is a queue {body.name!r} already\nchange it: stoker queue set {body.name}",
                field="name",
            )

        return await self._write(body.name, make, force=body.force)

    async def change(self, name: str, body: ChangeQueue) -> Queue:
        """Change a queue, from the next decision of the scheduler on."""

        def make(current: Queue | None) -> Queue:
            if current is None and name != DEFAULT_QUEUE:
                raise NotFoundError(f"there is no queue {name!r}")
            return rules.changed(current or rules.default_queue(), body)

        return await self._write(name, make, force=body.force)

    async def remove(self, name: str) -> Queue:
        """Remove a queue that nothing is in; the default one is then again as it was at first."""
        for _ in range(MAX_TRIES):
            tree = await self._all()
            current = tree.get(name)
            if current is None:
                raise NotFoundError(f"there is no queue {name!r}\n{suggestion(name, tree)}")
            below = [one.record.name for one in tree.values() if one.record.parent == name]
            if below:
                raise ConflictError(
                    f"queue {name!r} has queues below it: {', '.join(below)}\nremove these first"
                )
            self._check_empty(name)
            event = self._state.event(EventKind.QUEUE_REMOVED, name, current.record)
            try:
                await self._state.writer.apply(Change((_delete(current),), (event,)))
            except WriteConflict:
                continue
            return current.record
        raise _contended(name)

    async def set_all(self, body: SetQueues) -> SetQueuesReply:
        """Have the queues be those of ``body``, all at once; those that are as they are stay untouched."""
        for attempt in range(MAX_TRIES):
            tree = await self._all()
            wanted = self._wanted(body, tree)
            created = [name for name in wanted if name not in tree]
            changed = [n for n, one in tree.items() if n in wanted and wanted[n] != one.record]
            removed = [name for name in tree if name not in wanted]
            for name in removed:
                self._check_empty(name)
            for queue in wanted.values():
                rules.check(
                    queue,
                    {DEFAULT_QUEUE: rules.default_queue(), **wanted},
                    None if body.force else self._total(),
                )
            operations: list[Operation] = [QUEUES.insert(wanted[name]) for name in created]
            operations += [
                QUEUES.update(one, wanted[name]) for name, one in tree.items() if name in wanted
            ]
            operations += [_delete(tree[name]) for name in removed]
            event = self._state.event
            events = [event(EventKind.QUEUE_CREATED, name, wanted[name]) for name in created]
            events += [event(EventKind.QUEUE_CHANGED, name, wanted[name]) for name in changed]
            events += [event(EventKind.QUEUE_REMOVED, n, tree[n].record) for n in removed]
            try:
                if events:
                    await self._state.writer.apply(Change(tuple(operations), tuple(events)))
            except WriteConflict:
                await asyncio.sleep(0.001 * attempt)
                continue
            return SetQueuesReply(
                created=tuple(created), changed=tuple(changed), removed=tuple(removed)
            )
        raise _contended("tree")

    def _wanted(self, body: SetQueues, tree: Mapping[str, Versioned[Queue]]) -> dict[str, Queue]:
        wanted = {}
        for one in body.queues:
            known = tree.get(one.name)
            now = self._state.now() if known is None else known.record.created_at_s
            if one.name in wanted:
                raise BadRequestError(f"queues: {one.name!r} is there twice", field="queues")
            wanted[one.name] = rules.created(one, now)
        return wanted

    def _check_empty(self, name: str) -> None:
        """Raise ConflictError if jobs are in a queue that is to be removed."""
        jobs = [job.job_id for job in self._jobs.live.values() if job.queue == name]
        if jobs and name != DEFAULT_QUEUE:
            raise ConflictError(
                f"{len(jobs)} jobs are in queue {name!r}, as {jobs[0]}\n"
                f"stop them, or let nothing more start: stoker queue stop {name}"
            )

    async def get(self, name: str) -> Queue:
        """Return the queue of this name; the default one is always there."""
        found = await self._state.find(QUEUES, name)
        if found is not None:
            return found.record
        if name == DEFAULT_QUEUE:
            return rules.default_queue()
        tree = await self._all()
        raise NotFoundError(f"there is no queue {name!r}\n{suggestion(name, tree)}")

    async def check(self, name: str, *, field: str = "queue") -> str:
        """Return the queue that a job is to be in; BadRequestError if there is none of this name."""
        try:
            return (await self.get(name or DEFAULT_QUEUE)).name
        except NotFoundError:
            known = suggestion(name, await self._all())
            raise BadRequestError(f"there is no queue {name!r}\n{known}", field=field) from None

    async def _all(self) -> dict[str, Versioned[Queue]]:
        rows = await self._state.store.select(schema.QUEUES, limit=MAX_QUEUES + 1)
        decoded = [QUEUES.decode(row) for row in rows]
        return {one.record.name: one for one in decoded}

    async def _write(
        self,
        name: str,
        make: Callable[[Queue | None], Queue],
        *,
        force: bool,
    ) -> Queue:
        """Write a queue with the others as they are: a change of one above it meanwhile is a conflict."""
        for attempt in range(MAX_TRIES):
            tree = await self._all()
            current = tree.get(name)
            queue = make(None if current is None else current.record)
            if current is not None and queue == current.record:
                return queue
            if current is None and len(tree) >= MAX_QUEUES:
                raise ConflictError(f"there are {MAX_QUEUES} queues\nremove some first")
            others = {n: one.record for n, one in tree.items() if n != name}
            others.setdefault(DEFAULT_QUEUE, rules.default_queue())
            rules.check(queue, others, None if force else self._total())
            own: Operation = (
                QUEUES.insert(queue) if current is None else QUEUES.update(current, queue)
            )
            above = [QUEUES.update(one, one.record) for one in _above(queue, tree)]
            event = self._state.event(
                EventKind.QUEUE_CREATED if current is None else EventKind.QUEUE_CHANGED, name, queue
            )
            try:
                await self._state.writer.apply(Change((own, *above), (event,)))
            except WriteConflict:
                await asyncio.sleep(0.001 * attempt)
                continue
            return queue
        raise _contended(name)

    def _total(self) -> dict[str, float] | None:
        """Return what the cluster has, or None while it has no nodes to compare with."""
        nodes = [node for node in self._nodes.view.values() if node.state is not NodeState.DEAD]
        return rules.total_of(nodes) if nodes else None


def _delete(current: Versioned[Queue]) -> Delete:
    where: dict[str, Value] = {"name": current.record.name, "version": current.version}
    return Delete(schema.QUEUES, where, must_exist=True)


def _contended(name: str) -> ConflictError:
    return ConflictError(f"queue {name} is changed by too many at once\ntry again")


def _above(queue: Queue, tree: dict[str, Versioned[Queue]]) -> list[Versioned[Queue]]:
    """Return the queues above one, whose tree was checked; the unchanged default queue has no row."""
    above = []
    parent = tree.get(queue.parent)
    while parent is not None:
        above.append(parent)
        parent = tree.get(parent.record.parent)
    return above
