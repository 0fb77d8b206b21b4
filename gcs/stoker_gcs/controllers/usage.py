"""The recorder of how the cluster is used: a sample now and then, kept for as long as its step is coarse.

Runs on the leading replica only. A sample goes into a row of each step; the row of a longer step is the
mean of its samples. Rows are no events: nothing follows from them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Between, Change, Delete, Upsert
from stoker_wire.errors import StokerError
from stoker_wire.http.dashboard.figures import GpuUse, ResourceUse, Usage, UsageQuery, UsageSample
from stoker_wire.messages.cluster import ClusterResources, NodeState
from stoker_wire.messages.control import Page, QueueEntry
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Row, Value
    from stoker_wire.messages.cluster import Node

_log = logging.getLogger(__name__)
STEPS = {5: 3_600, 60: 86_400, 900: 60 * 86_400}
"""The length of each step, and for how long its samples are kept, in seconds."""
_SHORTEST = min(STEPS)
_CLEAN_EVERY = 100
_PAGE = 1000
_FIELDS = UsageSample.__struct_fields__
_SUMS = frozenset({"tasks_finished", "tasks_failed"})
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(dict[str, float | None]).decode
_ENDED = (TaskState.FINISHED.value, TaskState.FAILED.value)


class UsageRecorder:
    """The loop that takes samples, and the reader of those that are kept."""

    def __init__(self, state: StateStore, peers: PeerClients, nodes: NodeRegistry) -> None:
        self._state = state
        self._peers = peers
        self._nodes = nodes
        self._ended: dict[str, int] | None = None
        self._steps: dict[int, _Mean] = {}

    async def run(self) -> None:
        """Take a sample at each step, until cancelled."""
        taken = 0
        self._ended, self._steps = None, {}  # another replica may have led since
        while True:
            now_s = self._state.now()
            try:
                await self._record(await self._sample(), now_s)
                if taken % _CLEAN_EVERY == 0:
                    await self._forget(now_s)
            except StokerError as error:
                _log.debug("no sample of the use of the cluster", extra={"why": str(error)})
            taken += 1
            await asyncio.sleep(_SHORTEST - self._state.now() % _SHORTEST)

    async def _sample(self) -> UsageSample:
        nodes = [one for one in await self._nodes.latest() if one.state is not NodeState.DEAD]
        resources: dict[str, ResourceUse] = {}
        waiting: float | None = None
        try:
            found = await self._peers.call_scheduler("GET", "/v1/resources", reply=ClusterResources)
            resources = resource_use(found)
            page = await self._peers.call_scheduler(
                "GET", "/v1/queue", reply=Page[QueueEntry], query={"limit": _PAGE}
            )
            waiting = float(sum(entry.count for entry in page.items))
        except StokerError as error:
            _log.debug("the scheduler did not say what is used", extra={"why": str(error)})
        counts = {
            row["state"]: int(row["count"])
            for row in await self._state.store.grouped(
                schema.TASK_COUNTS, ("state",), ("count",), {}
            )
        }
        before, self._ended = self._ended, {state: counts.get(state, 0) for state in _ENDED}
        ended = {
            state: None if before is None else float(max(0, self._ended[state] - before[state]))
            for state in _ENDED
        }
        gpus = gpu_use(nodes, resources)
        cpu, memory = resources.get("CPU"), resources.get("memory")
        return UsageSample(
            cpu_used=None if cpu is None else cpu.used,
            cpu_total=None if cpu is None else cpu.total,
            gpu_used=gpus.used if resources else None,
            gpu_total=float(gpus.count),
            gpu_utilisation=gpus.utilisation,
            memory_used_bytes=sum(node.usage.get("memory_bytes", 0.0) for node in nodes),
            memory_total_bytes=None if memory is None else memory.total,
            waiting=waiting,
            tasks_running=float(counts.get(TaskState.RUNNING.value, 0)),
            tasks_finished=ended[TaskState.FINISHED.value],
            tasks_failed=ended[TaskState.FAILED.value],
            node_count=float(len(nodes)),
        )

    async def _record(self, sample: UsageSample, now_s: float) -> None:
        rows: list[Upsert] = []
        for step_s in STEPS:
            at_s = int(now_s // step_s) * step_s
            mean = self._steps.get(step_s)
            if mean is None:  # a part of this step may be there already, by whoever led before
                count = max(1, round((now_s - at_s) / _SHORTEST))
                mean = _Mean(at_s, await self._kept(step_s, at_s), count)
            elif mean.at_s != at_s:
                mean = _Mean(at_s)
            self._steps[step_s] = mean
            mean.add(sample)
            row: dict[str, Value] = {"step_s": step_s, "at_s": at_s, "value": _pack(mean.values)}
            rows.append(Upsert(schema.USAGE, row))
        await self._state.writer.apply(Change(tuple(rows)))

    async def _kept(self, step_s: int, at_s: int) -> dict[str, float | None]:
        row = await self._state.store.get(schema.USAGE, {"step_s": step_s, "at_s": at_s})
        return {} if row is None else _unpack(row["value"])

    async def _forget(self, now_s: float) -> None:
        for step_s, keep_s in STEPS.items():
            old: dict[str, Condition] = {"step_s": step_s, "at_s": Between(0, now_s - keep_s)}
            await self._state.writer.apply(Change((Delete(schema.USAGE, old),)))

    async def read(self, query: UsageQuery) -> Usage:
        """Return the samples of a range, of the finest step that has them and is not too fine."""
        now_s = self._state.now()
        until_s = query.until_s or now_s
        since_s = min(query.since_s or until_s - min(STEPS.values()), until_s)
        step_s = next(
            (
                step_s
                for step_s, keep_s in STEPS.items()
                if now_s - keep_s <= since_s + step_s
                and (until_s - since_s) / step_s <= 4 * query.points
            ),
            max(STEPS),
        )
        where: dict[str, Condition] = {"step_s": step_s, "at_s": Between(since_s - step_s, until_s)}
        rows: list[Row] = []
        after: tuple[int, ...] = ()
        while page := await self._state.store.select(schema.USAGE, where, after=after, limit=_PAGE):
            rows += page
            after = (page[-1]["step_s"], page[-1]["at_s"])
        samples = [(row["at_s"], _unpack(row["value"])) for row in rows]
        every = max(1, -(-len(samples) // query.points))
        groups = [samples[first : first + every] for first in range(0, len(samples), every)]
        return Usage(
            step_s=step_s * every,
            at_s=tuple(float(group[0][0]) for group in groups),
            series={
                name: tuple(
                    _together(name, [values.get(name) for _, values in group]) for group in groups
                )
                for name in _FIELDS
            },
        )


class _Mean:
    """The sample of a step, of those taken in it. ``kept`` is what ``count`` earlier ones came to."""

    def __init__(self, at_s: int, kept: Mapping[str, float | None] = {}, count: int = 1) -> None:
        self.at_s = at_s
        self.values: dict[str, float | None] = {}
        self._taken: dict[str, list[float]] = {name: [] for name in _FIELDS}
        for name in _FIELDS:
            value = kept.get(name)
            if value is not None:
                self._taken[name] = [value] * (1 if name in _SUMS else count)

    def add(self, sample: UsageSample) -> None:
        """Take a sample in."""
        for name in _FIELDS:
            value = getattr(sample, name)
            if value is not None:
                self._taken[name].append(value)
            self.values[name] = _together(name, self._taken[name])


def _together(name: str, values: Sequence[float | None]) -> float | None:
    """Return the sum of values that count what happened, the mean of others; None if nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known) if name in _SUMS else sum(known) / len(known)


def resource_use(found: ClusterResources) -> dict[str, ResourceUse]:
    """Return how much there is of each resource, and how much leases hold."""
    return {
        name: ResourceUse(total=total, used=total - found.available.get(name, 0.0))
        for name, total in sorted(found.total.items())
    }


def gpu_use(nodes: Iterable[Node], resources: Mapping[str, ResourceUse]) -> GpuUse:
    """Return how the GPUs of the living nodes are used, by their last heartbeats."""
    percents, used_bytes, total_bytes, count = [], 0.0, 0.0, 0
    for node in nodes:
        if node.state is NodeState.DEAD:
            continue
        for device in node.devices:
            count += 1
            total_bytes += device.memory_bytes
            used_bytes += node.usage.get(f"gpu{device.index}_memory_bytes", 0.0)
            percent = node.usage.get(f"gpu{device.index}_percent")
            if percent is not None:
                percents.append(percent)
    leased = resources.get("GPU")
    return GpuUse(
        count=count,
        used=0.0 if leased is None else leased.used,
        utilisation=sum(percents) / len(percents) / 100 if percents else None,
        memory_used_bytes=used_bytes,
        memory_total_bytes=total_bytes,
    )
