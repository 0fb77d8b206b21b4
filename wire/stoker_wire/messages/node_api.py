"""Queries and replies of a nodelet's own HTTP API, beside the messages that several services share.

A nodelet answers them, the gcs, the command line and other nodelets ask. They travel, so they are
defined here, whoever else needs them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import HeldLease
from stoker_wire.messages.common import Count, Int64, Message, Record
from stoker_wire.messages.control import ListQuery, Position
from stoker_wire.messages.work import ObjectInfo


class WorkersQuery(ListQuery):
    """A choice of workers; an empty field means all."""

    job_id: str = ""


class WorkerExitQuery(Message):
    """The time to wait for the exit of a worker that lives."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class Process(Record):
    """A process on a node; ``started`` is in clock ticks since boot."""

    pid: int
    started: int
    pid_namespace: str


class KillWorker(Message):
    """Request to kill a worker, with ``lease_id`` only if it serves that; its exit says ``reason``."""

    reason: str = "killed over the API"
    lease_id: str = ""


class DrainOrder(Message):
    """Order of the gcs to a nodelet that is drained, given again and again: idle workers are to leave."""


class HeldWork(Record):
    """Leases, workers and objects that are on a node that is drained.

    ``workers`` are processes without a lease that others still need: they own objects, calls or actors.
    ``objects`` counts those whose home is here, and that no other node has taken over.
    """

    leases: tuple[HeldLease, ...] = ()
    workers: tuple[str, ...] = ()
    objects: int = 0


class LeaveOrder(Message):
    """Order of the gcs to a nodelet that is empty to leave the cluster, and to end; for one incarnation."""

    incarnation: Int64


class MoveWorker(Message):
    """Request that an actor take no more calls, finish what runs, and end to be started elsewhere."""

    reason: str


class TakenOver(Record):
    """Objects that are left on a node after others were taken over."""

    left: int = 0


class ObjectsQuery(ListQuery):
    """A choice of objects; an empty field means all."""

    job_id: str = ""
    owner_id: str = ""


class LogsQuery(Message):
    """A choice of log lines. ``kind`` is ``worker``, ``driver`` or empty (both).

    ``since`` is the cursor of the last line seen, with a ``worker_id``; ``tail`` starts so many
    lines before the end. ``attempt`` is that of the driver (0: any).
    """

    job_id: str = ""
    worker_id: str = ""
    kind: str = ""
    attempt: int = 0
    follow: bool = False
    since: Position = 0
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class ChunksQuery(Message):
    """The chunk to wait for, at most ``wait_s``."""

    chunk: Count = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 0.0


class ArenaUsage(Record):
    """The use of a node's shared memory.

    ``used_bytes`` of ``limit_bytes`` are taken: by objects (``object_bytes``), by extents that wait
    to be used again (``recycled_bytes``), and by the rounding of both.
    """

    arena_dir: str
    limit_bytes: int
    used_bytes: int
    free_bytes: int
    object_bytes: int
    recycled_bytes: int
    spilled_bytes: int
    objects: int
    largest: tuple[ObjectInfo, ...] = ()


class Freed(Record):
    """The number of the objects that were here and are freed."""

    freed: int
