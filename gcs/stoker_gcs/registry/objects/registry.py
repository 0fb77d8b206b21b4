"""The registry of detached objects: applies ``objects.rules`` to what processes and nodes report."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from stoker_gcs.registry.objects import rules
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_gcs.state import schema
from stoker_gcs.state.records import MAX_TRIES
from stoker_gcs.store.changes import Change, Delete, Value, WriteConflict
from stoker_wire.errors import (
    ConflictError,
    NameTakenError,
    NotFoundError,
    PayloadTooLargeError,
)
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.objects import CACHE_NAMESPACE, DetachedObject, DetachedState
from stoker_wire.messages.work import DETACHED_JOB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition
    from stoker_wire.messages.control import Event
    from stoker_wire.messages.objects import CreateDetachedObject
    from stoker_wire.settings import Settings

RESERVED_S = 3600.0
"""How long an object may be written whose maker has no job that could tell its end."""


class DetachedObjects:
    """Detached objects by id, and a view of them in step with the log.

    The quota bounds them together, all copies counted. It is checked against the
    view, so two replicas that are asked in the same moment may exceed it by one object.
    """

    def __init__(self, state: StateStore, jobs: JobRegistry, settings: Settings) -> None:
        self._state = state
        self._jobs = jobs
        self._max_bytes = settings.detached_max_bytes
        self._max_count = settings.detached_max_count
        self._keep_cache_s = settings.keep_cache_s
        self.view: dict[str, DetachedObject] = {}
        self.used_bytes = 0
        """What counts against the quota."""

    async def load(self) -> None:
        """Fill the view from SQL."""
        for one in await self._state.all(OBJECTS):
            self._put(one)

    def apply_event(self, event: Event) -> None:
        """Update the view from an event of the log."""
        one = payload_as(event, DetachedObject)
        if one is None:
            return
        self._drop(one.object_id)
        if event.kind != EventKind.OBJECT_FREED:
            self._put(one)

    def _put(self, one: DetachedObject) -> None:
        self.view[one.object_id] = one
        self.used_bytes += rules.charge(one)

    def _drop(self, object_id: str) -> None:
        known = self.view.pop(object_id, None)
        if known is not None:
            self.used_bytes -= rules.charge(known)

    async def create(self, body: CreateDetachedObject) -> DetachedObject:
        """Reserve an object's name and bytes, or store it with its value. The same id again gives the same.

        NameTakenError if another has its name; PayloadTooLargeError if the quota has no room for it.
        """
        check_id(body.object_id, Prefix.OBJECT, field="object_id")
        one = rules.created(body, self._state.now())
        event = self._state.event(EventKind.OBJECT_CREATED, one.object_id, one)
        add = Change((OBJECTS.insert(one, value=body.value),), (event,))
        for _ in range(MAX_TRIES):
            existing = await self._state.find(OBJECTS, one.object_id)
            if existing is not None and not self.is_abandoned(existing.record):
                return _same(existing.record, one)
            if existing is not None:
                with contextlib.suppress(NotFoundError):
                    await self.free(one.object_id)
            self._check_quota(one)
            try:
                await self._state.writer.apply(add)
            except WriteConflict:
                await self._check_name(one)
                continue
            return one
        raise ConflictError(f"{one.object_id} is created by too many at once\ntry again")

    def _check_quota(self, one: DetachedObject) -> None:
        if self._max_count and len(self.view) >= self._max_count:
            raise PayloadTooLargeError(
                f"there are {len(self.view)} detached objects, as many as there may be\n"
                "free some with stoker.free(), or raise STOKER_DETACHED_MAX_COUNT",
                field="object_id",
            )
        wanted = rules.charge(one)
        if self._max_bytes and self.used_bytes + wanted > self._max_bytes:
            raise PayloadTooLargeError(
                f"the quota of detached objects has no room for {wanted} bytes more\n"
                f"{self.used_bytes} of {self._max_bytes} bytes are in use: free some with stoker.free(), "
                "or raise STOKER_DETACHED_MAX_BYTES",
                field="nbytes",
            )

    async def _check_name(self, one: DetachedObject) -> None:
        """Raise NameTakenError if another object has this name, unless its maker has died while at it."""
        try:
            other = await self.get_named(one.namespace, one.name)
        except NotFoundError:
            return
        if other.object_id == one.object_id:
            return
        if self.is_abandoned(other):
            await self.free(other.object_id)
            return
        raise NameTakenError(
            f"the name {one.name!r} is taken in namespace {one.namespace!r}\n"
            f"by the detached object {other.object_id} ({other.state}): choose another, or free that one: "
            f"stoker.free(stoker.get_ref({one.name!r}))",
            field="name",
        )

    def is_over(self, one: DetachedObject) -> bool:
        """Return whether to free an object: its maker died while at it, or the cache kept it long enough."""
        cached = one.namespace == CACHE_NAMESPACE and self._keep_cache_s > 0
        age_s = self._state.now() - one.created_at_s
        return (cached and age_s > self._keep_cache_s) or self.is_abandoned(one)

    def is_abandoned(self, one: DetachedObject) -> bool:
        """Return whether an object is reserved by a job that has ended, or for too long."""
        if one.state is not DetachedState.CREATING:
            return False
        old = self._state.now() - one.created_at_s > RESERVED_S
        return old or one.job_id not in ("", DETACHED_JOB, *self._jobs.live)

    async def get_named(self, namespace: str, name: str) -> DetachedObject:
        """Return the object of this name; NotFoundError if there is none."""
        where: dict[str, Condition] = {"live_name": rules.live_name(namespace, name)}
        rows = await self._state.store.select(schema.DETACHED_OBJECTS, where, limit=1)
        if not rows:
            raise NotFoundError(
                f"there is no detached object {name!r} in namespace {namespace!r}\n"
                f"make it with stoker.put(value, lifetime='detached', name={name!r})"
            )
        return OBJECTS.decode(rows[0]).record

    async def get(self, object_id: str) -> DetachedObject:
        """Return the object with this id; NotFoundError if there is none."""
        return await self._state.get(OBJECTS, object_id)

    async def value(self, object_id: str) -> bytes | None:
        """Return the value of an object that the gcs keeps."""
        row = await self._state.store.get(schema.DETACHED_OBJECTS, {"object_id": object_id})
        return None if row is None or row["value"] is None else bytes(row["value"])

    async def placed(self, object_id: str, nodes: Iterable[str]) -> DetachedObject:
        """Record which nodes have an object."""
        now_at = tuple(nodes)
        return await self._state.change(OBJECTS, object_id, lambda one: rules.placed(one, now_at))

    async def lost(self, object_id: str, message: str) -> DetachedObject:
        """Record that no node has an object."""
        return await self._state.change(OBJECTS, object_id, lambda one: rules.lost(one, message))

    async def free(self, object_id: str) -> DetachedObject:
        """Delete an object; the nodes that have it follow the event. NotFoundError if there is none."""
        for _ in range(MAX_TRIES):
            current = await self._state.find(OBJECTS, object_id)
            if current is None:
                break
            where: dict[str, Value] = {"object_id": object_id, "version": current.version}
            gone = Delete(schema.DETACHED_OBJECTS, where, must_exist=True)
            event = self._state.event(EventKind.OBJECT_FREED, object_id, current.record)
            try:
                await self._state.writer.apply(Change((gone,), (event,)))
            except WriteConflict:
                continue
            return current.record
        raise NotFoundError(f"there is no detached object {object_id!r}")


def _same(one: DetachedObject, other: DetachedObject) -> DetachedObject:
    """Return the detached object that a request made when it was sent first; its id is no other's to use."""
    if (one.namespace, one.name) != (other.namespace, other.name):
        raise ConflictError(
            f"there is another detached object {one.object_id} already\nchoose another id",
            field="object_id",
        )
    return one
