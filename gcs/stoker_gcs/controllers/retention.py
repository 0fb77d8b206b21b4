"""The controller of retention: forgets what has ended, by the policies of the settings ``keep_*``.

Runs on the leading replica only, in batches with pauses, so that other writes wait for one batch at most.
Nothing that lives goes, nor what something that lives refers to: :class:`_References` has what that is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.actors.rules import LIVING as LIVING_ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.groups.rules import LIVING as LIVING_GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.kv.blobs import FUNCTIONS, PACKAGES
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.task_history import OPEN
from stoker_gcs.state import schema
from stoker_gcs.state.removed_tasks import removed_until
from stoker_gcs.store.changes import Change, Delete, Upsert, WriteConflict
from stoker_gcs.store.rows import task_of, times_of
from stoker_wire.data.spool import INFERRED_RANK
from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.control import Kept, RetentionStatus
from stoker_wire.messages.groups import GroupState
from stoker_wire.messages.work import ActorState, JobState, TaskState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.kv.blobs import Blobs
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.registry.schedules.registry import ScheduleRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Condition, Row
    from stoker_gcs.store.rows import TaskTimes
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.groups import PlacementGroup
    from stoker_wire.messages.work import Actor, Job, TaskRecord
    from stoker_wire.settings import Settings

_log = logging.getLogger(__name__)
BATCH = 1000
"""Rows of one transaction."""
PAUSE_S = 0.02
"""After each batch: others have the database meanwhile."""
EVERY_S = (0.2, 60.0)
MOST_COUNTED = 10_000_000
SPARED = 100
"""One in so many of ``keep_tasks``: so many more may stay, as they ended late."""
REMOVED = "retention"
"""The row of ``meta`` that holds how much was removed, by kind."""
ENDED_TASKS = (TaskState.FINISHED.value, TaskState.FAILED.value, TaskState.CANCELLED.value)
ENDED_JOBS = (JobState.SUCCEEDED.value, JobState.FAILED.value, JobState.STOPPED.value)
LIVING_JOBS = (JobState.PENDING.value, JobState.RUNNING.value)
DEAD_ACTORS = (ActorState.DEAD.value,)
REMOVED_GROUPS = (GroupState.REMOVED.value,)
DEAD_NODES = (NodeState.DEAD.value,)
_USE_STEPS = 10
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_removed = msgspec.json.Decoder(dict[str, int])


def use_step_s(settings: Settings) -> float:
    """Return how often the use of a blob is recorded: a small part of how long it is kept unused."""
    return min(3600.0, settings.keep_blobs_s / _USE_STEPS) if settings.keep_blobs_s else 3600.0


@dataclass(slots=True)
class _References:
    """Ids of all that living actors, groups, jobs and leases refer to."""

    node_ids: set[str] = field(default_factory=set)
    actor_ids: set[str] = field(default_factory=set)
    since_s: float = math.inf
    """When the oldest of them came."""
    texts: list[bytes] = field(default_factory=list)
    """Records and specs, in which the names of blobs stand."""

    def names(self, blob_id: str) -> bool:
        """Return whether something that lives names this blob."""
        name = blob_id.encode()
        return any(name in text for text in self.texts)


class Retention:
    """The policies, enforced one kind after the other."""

    def __init__(
        self,
        state: StateStore,
        settings: Settings,
        *,
        nodes: NodeRegistry,
        jobs: JobRegistry,
        schedules: ScheduleRegistry,
        blobs: Blobs,
    ) -> None:
        self._state = state
        self._settings = settings
        self._nodes = nodes
        self._jobs = jobs
        self._schedules = schedules
        self._blobs = blobs

    async def run(self) -> None:
        """Enforce all policies again and again, until cancelled."""
        limits = self._settings
        ages = [
            age_s
            for age_s in (
                limits.keep_tasks_s,
                limits.keep_jobs_s,
                limits.keep_actors_s,
                limits.keep_placement_groups_s,
                limits.keep_nodes_s,
                limits.keep_blobs_s,
            )
            if age_s
        ]
        every_s = min(EVERY_S[1], max(EVERY_S[0], min(ages, default=math.inf) / 4))
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.enforce()
            except StokerError as error:
                _log.warning("retention waits: %s", error)

    async def enforce(self) -> dict[str, int]:
        """Remove what no policy keeps; return how much, by kind."""
        limits = self._settings
        removed: dict[str, int] = {}
        if limits.keep_events:
            await self._state.log.compact(limits.keep_events, batch=BATCH, pause_s=PAUSE_S)
        # Jobs first: theirs leave with them.
        if limits.keep_jobs_s:
            removed["jobs"] = await self._remove_jobs()
        if limits.keep_tasks or limits.keep_tasks_s:
            removed["tasks"] = await self._remove_tasks()
        if limits.keep_actors_s:
            removed["actors"] = await self._remove_actors()
        if limits.keep_placement_groups_s:
            removed["placement_groups"] = await self._remove_groups()
        if limits.keep_nodes_s:
            removed["nodes"] = await self._remove_nodes()
        if limits.keep_blobs_s:
            removed |= await self._remove_blobs()
        if any(removed.values()):
            await self._add_removed(removed)
        return removed

    async def _add_removed(self, removed: Mapping[str, int]) -> None:
        total = await self._total_removed()
        for kind, count in removed.items():
            total[kind] = total.get(kind, 0) + count
        row: dict[str, str | int] = {"name": REMOVED, "value": _encode(total).decode()}
        await self._state.writer.apply(Change((Upsert(schema.META, row),)))

    async def _total_removed(self) -> dict[str, int]:
        row = await self._state.store.get(schema.META, {"name": REMOVED})
        return {} if row is None else _removed.decode(row["value"])

    async def _oldest_first(
        self, table: Table, where: Mapping[str, Condition]
    ) -> AsyncIterator[list[Row]]:
        """Yield batches of the rows of a listed table, in the order of their arrival."""
        after: tuple[int, ...] = ()
        while True:
            rows = await self._state.store.select(
                table, where, after=after, limit=BATCH, arrival=True
            )
            if rows:
                after = (rows[-1][schema.ARRIVAL],)
                yield rows
            if len(rows) < BATCH:
                return
            await asyncio.sleep(PAUSE_S)

    async def _delete(self, table: Table, ids: list[str], **more: Condition) -> int:
        """Delete rows by the first column of their key."""
        if ids:
            where = {table.key[0]: tuple(ids), **more}
            event = self._state.removal(table, ids)
            await self._state.writer.apply(Change((Delete(table, where),), (event,)))
        return len(ids)

    async def _remove_jobs(self) -> int:
        """Delete jobs as their users may; those of a schedule are kept by its own limit."""
        before_s = self._state.now() - self._settings.keep_jobs_s
        count = 0
        async for rows in self._oldest_first(schema.JOBS, {"state": ENDED_JOBS}):
            live = list(self._jobs.live.values())
            awaited = {after.job_id for one in live for after in one.after}
            for row in rows:
                job = JOBS.decode(row).record
                if (job.ended_at_s or job.created_at_s) >= before_s:
                    continue
                if self._is_referred_to(job, awaited):
                    continue
                try:
                    await self._jobs.delete(job.job_id, tasks_ended_by_s=before_s)
                except (ConflictError, NotFoundError, WriteConflict):
                    continue  # something of it lives, as a detached actor; or another replica leads
                count += 1
                await asyncio.sleep(0)
        return count

    def _is_referred_to(self, job: Job, awaited: set[str]) -> bool:
        return (
            job.array_id != ""  # it goes with its array
            or job.schedule in self._schedules.view
            or job.job_id in awaited
        )

    async def _remove_tasks(self) -> int:
        """Remove ended tasks, those first that came first, whole: with all their attempts.

        One that came early and ended late stays until those that ended with it go, within a bound: else its
        record would leave as soon as it ended, and the tasks of all times before would not be whole.
        """
        keep, keep_s = self._settings.keep_tasks, self._settings.keep_tasks_s
        before_s = self._state.now() - keep_s if keep_s else -math.inf
        excess = 0
        if keep:
            counted = await self._state.store.count(schema.TASKS, most=keep + MOST_COUNTED)
            excess = max(0, counted - keep)
        if not excess and not keep_s:
            return 0
        until_s = await self._end_of_surplus(keep) if excess else math.inf
        count = spared = 0
        async for rows in self._oldest_first(schema.TASKS, {}):
            records = [task_of(row) for row in rows if row["rank"] >= INFERRED_RANK]
            first = records[: max(0, excess - count - spared)]
            late = [record.task_id for record in first if _time_of(record) > until_s]
            late = late[: keep // SPARED - spared]
            spared += len(late)
            surplus = {record.task_id for record in first} - set(late)
            old = {record.task_id for record in records if _time_of(record) < before_s}
            if not surplus and not old and records:
                break  # what came later is younger
            count += await self._remove_whole_tasks(surplus, old, before_s)
        return count

    async def _end_of_surplus(self, keep: int) -> float:
        """Return about when the first of the newest ``keep`` attempts ended."""
        newest = await self._state.store.select(
            schema.TASKS, limit=1, arrival=True, descending=True
        )
        after = (newest[0][schema.ARRIVAL] - keep,)
        rows = await self._state.store.select(schema.TASKS, after=after, limit=BATCH, arrival=True)
        ends = [_time_of(times_of(row)) for row in rows if row["rank"] >= INFERRED_RANK]
        return statistics.median(ends) if ends else math.inf

    async def _remove_whole_tasks(self, surplus: set[str], old: set[str], before_s: float) -> int:
        """Remove those tasks of which no attempt is open, nor (of ``old``) young; return the attempts."""
        if not surplus and not old:
            return 0
        ids: dict[str, Condition] = {"task_id": tuple(surplus | old)}
        attempts: dict[str, int] = {}
        stays: set[str] = set()
        ends: dict[str, float] = {}
        after: tuple[str | int, ...] = ()
        while rows := await self._state.store.select(schema.TASKS, ids, after=after, limit=BATCH):
            after = (rows[-1]["task_id"], rows[-1]["attempt"])
            for row in rows:
                task_id = row["task_id"]
                attempts[task_id] = attempts.get(task_id, 0) + 1
                at_s = _time_of(times_of(row))
                ends[task_id] = max(at_s, ends.get(task_id, at_s))
                is_young = task_id not in surplus and at_s >= before_s
                if row["state"] in OPEN or is_young:
                    stays.add(task_id)
        gone = [task_id for task_id in attempts if task_id not in stays]
        if not gone:
            return 0
        until = await removed_until(self._state.store, max(ends[task_id] for task_id in gone))
        where: dict[str, Condition] = {"task_id": tuple(gone), "state": ENDED_TASKS}
        try:
            await self._state.writer.apply(Change((Delete(schema.TASKS, where), *until)))
        except WriteConflict:
            return 0  # another replica leads, and removes them
        return sum(attempts[task_id] for task_id in gone)

    async def _remove_actors(self) -> int:
        before_s = self._state.now() - self._settings.keep_actors_s
        references: _References | None = None
        count = 0
        async for rows in self._oldest_first(schema.ACTORS, {"state": DEAD_ACTORS}):
            actors = [ACTORS.decode(row).record for row in rows]
            old = [one for one in actors if (one.ended_at_s or one.created_at_s) < before_s]
            if not old:
                continue
            references = references or await self._references()
            leases = await self._leases(one.lease_id for one in old)
            gone = [
                one.actor_id
                for one in old
                if one.actor_id not in references.actor_ids and one.lease_id not in leases
            ]
            count += await self._delete(schema.ACTORS, gone, state=DEAD_ACTORS)
        return count

    async def _leases(self, lease_ids: Iterable[str]) -> set[str]:
        """Return those of these leases that are still to be released."""
        ids = tuple({lease_id for lease_id in lease_ids if lease_id})
        rows = await self._state.store.select(
            schema.LEASES, {"lease_id": ids}, limit=BATCH, columns=("lease_id",)
        )
        return {row["lease_id"] for row in rows}

    async def _remove_groups(self) -> int:
        before_s = self._state.now() - self._settings.keep_placement_groups_s
        count = 0
        table = schema.PLACEMENT_GROUPS
        async for rows in self._oldest_first(table, {"state": REMOVED_GROUPS}):
            groups = [GROUPS.decode(row).record for row in rows]
            gone = [
                one.group_id for one in groups if (one.removed_at_s or one.created_at_s) < before_s
            ]
            count += await self._delete(table, gone, state=REMOVED_GROUPS)
        return count

    async def _remove_nodes(self) -> int:
        before_s = self._state.now() - self._settings.keep_nodes_s
        old = [
            node
            for node in list(self._nodes.view.values())
            if node.state is NodeState.DEAD and _died_at_s(node) < before_s
        ]
        if not old:
            return 0
        references = await self._references()
        count = 0
        for node in old:
            if node.node_id not in references.node_ids and await self._nodes.delete(node):
                count += 1
                await asyncio.sleep(0)
        return count

    async def _remove_blobs(self) -> dict[str, int]:
        """Remove blobs that were last used long ago, and before all that lives."""
        removed = {f"{kind}s": 0 for kind in (FUNCTIONS, PACKAGES)}
        unused = await self._unused_blobs()
        if not unused:
            return removed
        references = await self._references()
        # A process that lives asks for what it uses once, perhaps long ago.
        since_s = references.since_s - self._settings.keep_blobs_s
        kept: set[str] = set()
        for kind, blob_id, _ in unused:
            if references.names(blob_id):
                kept |= {blob_id, *await self._blobs.pieces(kind, blob_id)}
        for kind, blob_id, used_at_s in unused:
            if used_at_s >= since_s or blob_id in kept:
                continue
            if await self._blobs.delete(kind, blob_id, used_at_s=used_at_s):
                removed[f"{kind}s"] += 1
                await asyncio.sleep(PAUSE_S)
        return removed

    async def _unused_blobs(self) -> list[tuple[str, str, float]]:
        """Return the kind and id of all that was not used for long, and when it was."""
        found: list[tuple[str, str, float]] = []
        after: tuple[str, ...] = ()
        before_s = self._state.now() - self._settings.keep_blobs_s
        while rows := await self._state.store.select(schema.BLOB_USES, after=after, limit=BATCH):
            after = (rows[-1]["kind"], rows[-1]["blob_id"])
            uses = [(row["kind"], row["blob_id"], row["used_at_s"]) for row in rows]
            found += [use for use in uses if use[2] < before_s]
            await asyncio.sleep(PAUSE_S)
        return found

    async def _references(self) -> _References:
        """Read what lives; what it refers to was there before it, and does not become old meanwhile."""
        found = _References()
        for schedule in self._schedules.view.values():
            found.texts.append(_pack(schedule))
        for job in await self._state.all(JOBS, {"state": LIVING_JOBS}):
            found.node_ids.add(job.node_id)
            found.texts.append(_pack(job))
            found.since_s = min(found.since_s, job.created_at_s)
        async for rows in self._oldest_first(schema.ACTORS, {"state": LIVING_ACTORS}):
            for row in rows:
                actor = ACTORS.decode(row).record
                found.texts += (bytes(row["record"]), bytes(row["spec"]))
                self._add_owned(found, actor)
                found.node_ids.add(actor.node_id)
        async for rows in self._oldest_first(schema.PLACEMENT_GROUPS, {"state": LIVING_GROUPS}):
            for row in rows:
                group = GROUPS.decode(row).record
                self._add_owned(found, group)
                found.node_ids |= {one.node_id for one in group.placements.values()}
        distinct = self._state.store.distinct
        found.node_ids |= set(map(str, await distinct(schema.LEASES, "node_id")))
        found.node_ids |= set(map(str, await distinct(schema.TASKS, "node_id", {"state": OPEN})))
        return found

    def _add_owned(self, found: _References, owned: Actor | PlacementGroup) -> None:
        found.since_s = min(found.since_s, owned.created_at_s)
        if owned.owner is not None:
            found.actor_ids.add(owned.owner.actor_id)
            found.node_ids.add(owned.owner.node_id)

    async def status(self) -> RetentionStatus:
        """Return what is kept of each kind, since when, and by which policy."""
        limits, store = self._settings, self._state.store
        removed = await self._total_removed()
        compacted, last = await store.bounds()
        first = await store.events(compacted, 1)
        count = self._state.log.numbering.count
        kinds = [
            Kept(
                kind="events",
                count=count(compacted, last),
                oldest_at_s=first[0].at_s if first else None,
                keep=limits.keep_events,
                removed=count(0, compacted),
            )
        ]
        for kind, table, states, keep, keep_s in (
            ("tasks", schema.TASKS, (), limits.keep_tasks, limits.keep_tasks_s),
            ("jobs", schema.JOBS, ENDED_JOBS, 0, limits.keep_jobs_s),
            ("actors", schema.ACTORS, DEAD_ACTORS, 0, limits.keep_actors_s),
            (
                "placement_groups",
                schema.PLACEMENT_GROUPS,
                REMOVED_GROUPS,
                0,
                limits.keep_placement_groups_s,
            ),
            ("nodes", schema.NODES, DEAD_NODES, 0, limits.keep_nodes_s),
        ):
            where: dict[str, Condition] = {"state": states} if states else {}
            rows = await store.select(table, where, limit=1, arrival=True)
            kinds.append(
                Kept(
                    kind=kind,
                    count=await store.count(table, where, most=MOST_COUNTED),
                    oldest_at_s=_oldest_of(table, rows[0]) if rows else None,
                    keep=keep,
                    keep_s=keep_s,
                    removed=removed.get(kind, 0),
                )
            )
        kinds += [await self._kept_blobs(kind, removed) for kind in (FUNCTIONS, PACKAGES)]
        return RetentionStatus(kinds=tuple(kinds), **self._kept_logs())

    async def _kept_blobs(self, kind: str, removed: Mapping[str, int]) -> Kept:
        used: list[float] = []
        after: tuple[str, ...] = ()
        while rows := await self._state.store.select(
            schema.BLOB_USES, {"kind": kind}, after=after, limit=BATCH
        ):
            after = (rows[-1]["kind"], rows[-1]["blob_id"])
            used += [row["used_at_s"] for row in rows]
        return Kept(
            kind=f"{kind}s",
            count=len(used),
            oldest_at_s=min(used, default=None),
            keep_s=self._settings.keep_blobs_s,
            removed=removed.get(f"{kind}s", 0),
        )

    def _kept_logs(self) -> dict[str, int]:
        """Return what the living nodes have told of their logs, packages and venvs."""
        usages = [
            self._nodes.with_heartbeat(node).usage
            for node in self._nodes.view.values()
            if node.state is not NodeState.DEAD
        ]
        return {
            name: int(sum(usage.get(name, 0.0) for usage in usages))
            for name in ("log_files", "log_bytes", "environments", "environment_bytes")
        }


def _time_of(record: TaskRecord | TaskTimes) -> float:
    return record.ended_at_s or record.started_at_s or record.submitted_at_s or 0.0


def _died_at_s(node: Node) -> float:
    """Return when a dead node was last heard of: its death is at most ``dead_after_s`` later."""
    return max(node.heartbeat_at_s, node.registered_at_s)


def _oldest_of(table: Table, row: Row) -> float | None:
    if table is schema.TASKS:
        return _time_of(task_of(row)) or None
    if table is schema.JOBS:
        return JOBS.decode(row).record.created_at_s
    if table is schema.ACTORS:
        return ACTORS.decode(row).record.created_at_s
    if table is schema.PLACEMENT_GROUPS:
        return GROUPS.decode(row).record.created_at_s
    return _died_at_s(NODES.decode(row).record)
