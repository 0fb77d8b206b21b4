"""Messages of a nodelet's own HTTP API, and between it and its workers, beside those that services share.

A nodelet answers the queries; the gcs, the command line and other nodelets ask. They travel, so they are
defined here, whoever else needs them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import ActorSpec, HeldLease, Lease
from stoker_wire.messages.common import Address, Count, Int64, Message, Record, RuntimeEnv
from stoker_wire.messages.control import ListQuery, Position
from stoker_wire.messages.objects import ObjectInfo


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
    attempt: Count = 0
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


class RegisterWorker(Message):
    """Registration of a forked worker, which listens at ``address``."""

    worker_id: str
    pid: Int64
    address: Address


class WorkerBoot(Record):
    """Start parameters that a fork server passes to ``target(boot)`` in a worker that it has just forked.

    The runtime environment is already applied: ``env_vars``, ``sys.path``, the current directory,
    and stdout and stderr go to ``log_path``. The worker listens on the Unix socket ``socket_path``
    (short enough for ``sun_path``), then registers with ``POST <nodelet>/v1/workers/register``.
    ``job_id`` is empty for a warm worker that no job has used; ``POST /v1/assign`` gives it one.
    By ``token`` it and its nodelet know each other; that of its job comes with its setup.
    ``mark_key`` authenticates its marks in its log (:mod:`stoker_wire.data.output_marks`).
    One that runs as another user than its nodelet (``run_as``) has no folder of the node: ``socket_fd`` is
    its socket, already bound.
    """

    worker_id: str
    node_id: str
    host_id: str
    nodelet_url: str
    nodelet_unix: str
    gcs_url: str
    token: str
    session_dir: str
    arena_dir: str
    socket_path: str
    log_path: str
    job_id: str = ""
    runtime_env: RuntimeEnv = RuntimeEnv()
    mark_key: bytes = b""
    run_as: str = ""
    socket_fd: int = -1


class WorkerSetup(Record):
    """Identity of a registered worker and, for an actor, its definition.

    The reply to its registration, and the body of ``POST <worker>/v1/assign`` for a worker of the
    pool. ``token`` is that of the job of ``lease``. ``env_vars``, ``sys_path`` (see
    ``stoker_wire.process.search_path``) and ``cwd`` (empty: stay) are to be applied before any user
    import; they hold ``CUDA_VISIBLE_DEVICES`` and are empty where the fork applied them.
    ``runtime_env`` is that of the lease: what the worker starts inherits it, and with
    ``capture_child_tasks`` the placement group of the lease.
    """

    worker_id: str
    node_id: str
    token: str = ""
    lease: Lease | None = None
    actor: ActorSpec | None = None
    runtime_env: RuntimeEnv | None = None
    capture_child_tasks: bool = False
    arena_dir: str = ""
    env_vars: dict[str, str] = {}
    sys_path: tuple[str, ...] = ()
    cwd: str = ""


class RenewToken(Message):
    """The token of the job of a worker, signed by another secret than before."""

    token: str


class StopNotice(Message):
    """Notice to a worker that it ends in ``grace_s``, and why; if it ``saves``, an actor saves its state."""

    lease_id: str
    grace_s: float
    reason: str
    saves: bool = False


class StopReply(Record):
    """Reply of a worker once its stop callbacks have run: how many there were."""

    callbacks: int = 0
