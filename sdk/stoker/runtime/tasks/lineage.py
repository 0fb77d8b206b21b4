"""Lineage: how each stored result of this process's tasks was made, so that it can be made again.

A record lives while a stored result of its task is referenced, or a record that was made from such a result
lives. It never keeps the value of another object: what its call needs is made again in turn, or is
borrowed from its owner. Pure: :class:`~stoker.runtime.tasks.reconstruction.Reconstruction` runs the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from stoker.runtime.tasks.task_spec import FunctionSpec
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Inline, Location, Stored

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef

_RECORD_NBYTES = 1000
"""What a record without arguments takes, about."""
_EVICTED = 10_000
"""How many ids of evicted records are remembered, for the error."""


class Finished(Protocol):
    """A call that has ended well."""

    task_id: str
    spec: FunctionSpec
    args: Location
    deps: Sequence[ObjectRef[object]]
    nested: Sequence[ObjectRef[object]]
    parent_task_id: str
    attempt: int


@dataclass(slots=True, frozen=True)
class Dependency:
    """An object that a call needs. ``owner`` is None where this process owns it."""

    object_id: str
    owner: Address | None = None
    inline: Inline | None = None
    """Its value, where that is small: it outlives the object's refs."""
    task_id: str = ""
    """The task whose record says how it is made, if there is one."""


@dataclass(slots=True, eq=False)
class Record:
    """The making of one task's results; ``nbytes`` is what the record itself keeps in memory."""

    task_id: str
    spec: FunctionSpec
    args: Location
    deps: tuple[Dependency, ...]
    nested: tuple[Dependency, ...]
    parent_task_id: str
    attempt: int
    left: int
    """How often it may be executed again; -1: without limit."""
    nbytes: int
    depth: int = 1
    """The tasks of the longest chain of results up to this one, itself included, when it ended."""
    executions: int = 0
    """How often it was executed again."""
    running: bool = False
    """Whether its task runs: it is a generator that goes on, or is being executed again."""
    holders: int = 0
    """The stored results that are referenced, and the records that need one."""


@dataclass(slots=True)
class Lineage:
    """The records of this process, the oldest first; ``max_nbytes`` bounds what they keep."""

    max_nbytes: int
    nbytes: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    evicted: dict[str, None] = field(default_factory=dict)

    def keep(self, task: Finished, locations: Iterable[Location]) -> bool:
        """Record how a task's stored results were made; return whether its arguments are kept for that.

        A result that is inline cannot be lost. A call that must not run twice is not made again, and what
        an actor returned depends on its state. :meth:`evict` must follow.
        """
        spec, args = task.spec, task.args
        if not spec.options.max_retries or spec.actor_id:
            return False
        nbytes = _RECORD_NBYTES + (args.nbytes if isinstance(args, Stored) else _size(args))
        deps = tuple([self._dependency(ref) for ref in task.deps])
        nested = tuple([self._dependency(ref) for ref in task.nested])
        depth = 0
        for dep in (*deps, *nested):
            nbytes += _size(dep.inline)
            if dep.task_id:
                before = self.records[dep.task_id]
                before.holders += 1
                depth = max(depth, before.depth)
        self.records[task.task_id] = Record(
            task_id=task.task_id,
            spec=spec,
            args=args,
            deps=deps,
            nested=nested,
            parent_task_id=task.parent_task_id,
            attempt=task.attempt,
            left=spec.options.max_retries,
            nbytes=nbytes,
            depth=depth + 1,
            holders=sum(type(location) is Stored for location in locations),
        )
        self.nbytes += nbytes
        return True

    def _dependency(self, ref: ObjectRef[object]) -> Dependency:
        entry = ref._entry
        location = entry.location
        inline = location if isinstance(location, Inline) else None
        known = inline is None and entry.owner is None and ref.task_id in self.records
        return Dependency(entry.object_id, entry.owner, inline, ref.task_id if known else "")

    def keep_item(self, task: Finished) -> None:
        """Record how a stored item of a generator that goes on was made.

        The record stays while the generator runs, though no item may be referenced: another attempt needs
        its arguments.
        """
        if task.task_id not in self.records and self.keep(task, ()):
            self.records[task.task_id].running = True
            self.hold(task.task_id)
        self.hold(task.task_id)

    def end_items(self, task: Finished) -> Sequence[Location]:
        """Note that a generator has ended; return the arguments that are not kept for its items."""
        record = self.records.get(task.task_id)
        if record is None:
            return (task.args,)
        record.attempt, record.running = task.attempt, False
        return self.release(task.task_id)

    def hold(self, task_id: str) -> None:
        """Note that one more stored result of a task is referenced."""
        record = self.records.get(task_id)
        if record is not None:
            record.holders += 1

    def release(self, task_id: str) -> Sequence[Location]:
        """Note that a stored result of a task is freed; return the arguments that nobody needs now."""
        freed: list[Location] = []
        released = [task_id]
        while released:
            record = self.records.get(released.pop())
            if record is None:
                continue
            record.holders -= 1
            if not record.holders:
                self._drop(record)
                freed.append(record.args)
                released += [dep.task_id for dep in (*record.deps, *record.nested) if dep.task_id]
        return freed

    def _drop(self, record: Record) -> None:
        del self.records[record.task_id]
        self.nbytes -= record.nbytes

    def evict(self) -> Sequence[Location]:
        """Drop the oldest records while all together keep too much; return their arguments."""
        freed: list[Location] = []
        while self.nbytes > self.max_nbytes:
            oldest = next((one for one in self.records.values() if not one.running), None)
            if oldest is None:
                break
            oldest.holders = 1
            freed += self.release(oldest.task_id)
            self.evicted[oldest.task_id] = None
        while len(self.evicted) > _EVICTED:
            del self.evicted[next(iter(self.evicted))]
        return freed


def _size(location: Location | None) -> int:
    if not isinstance(location, Inline):
        return 0
    return len(location.data) + sum(len(buffer.view) for buffer in location.buffers)
