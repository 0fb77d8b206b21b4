"""Clients of the services: one per URL, that of the leading scheduler, and look-ups of nodes and workers.

Owned by the runtime; its connections close with it. All coroutines run on the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    PreemptedError,
    StokerError,
    WorkerDiedError,
)
from stoker_wire.arena import Arena
from stoker_wire.errors import DeadlineExceededError, UnavailableError
from stoker_wire.http.client.pool import ClientPool, LeaderClient
from stoker_wire.http.gateway.route import GatewayRoute
from stoker_wire.messages.cluster import Node, NodeState, WorkerExit
from stoker_wire.messages.control import ChannelReview, Leader, ReviewChannel
from stoker_wire.messages.node_api import KillWorker
from stoker_wire.messages.work import DETACHED_JOB, Actor, Job
from stoker_wire.tls.files import files_of

if TYPE_CHECKING:
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.client.client import Client
    from stoker_wire.settings import Settings

_EXIT_REPORT_S = 5.0
_NODE_STATE_S = 30.0
_HEALTH_S = 3.0
_RETRY_S = 0.3
_AGAIN_S = 0.1
_KILL_S = 2.0
_ARENA_S = 2.0
_ASK_AGAIN_S = 10.0
_REGISTER_S = 10.0


class ClusterClients:
    """Clients of gcs, scheduler and nodelets."""

    def __init__(
        self, identity: Identity, settings: Settings, io: IoThread, arena: Arena | None
    ) -> None:
        self._identity = identity
        self._settings = settings
        self.tls = files_of(settings)
        self._io = io
        self.gateway: GatewayRoute | None = None
        """The way to services, nodes and workers, from outside of their network."""
        if identity.gateway_url:
            self.gateway = GatewayRoute(identity.gateway_url, identity.credential, self.tls)
        self._pool = ClientPool(
            token=identity.credential,
            peer=identity.peer_id,
            settings=settings,
            gateway=self.gateway,
        )
        self._leader = LeaderClient("scheduler", self._pool, self._leader_url)
        self._arenas: dict[str, Arena | None] = {}
        self._ask_again_s: dict[str, float] = {}
        """When the gcs is asked again about a node, of which it did not answer."""
        if identity.node is not None:
            self._arenas[identity.node.node_id] = arena
        self.gcs = self.client_of(identity.gcs_url)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()
        for arena in self._arenas.values():
            if arena is not None:
                arena.close()

    def client_of(self, url: str) -> Client:
        """Return the client of a service (loop thread)."""
        return self._pool.client(url)

    async def _leader_url(self, retry: bool) -> str:
        leader = await self.gcs.call("GET", "/v1/leaders/scheduler", reply=Leader, retry=retry)
        return leader.url

    async def reach_scheduler(self, within_s: float) -> None:
        """Raise UnavailableError, naming its URL, if the scheduler that leads cannot be reached.

        After ``within_s``, in which another may be elected. Where none leads there is none to reach.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        while True:
            try:
                leader = await self.gcs.call(
                    "GET", "/v1/leaders/scheduler", reply=Leader, retry=False
                )
            except UnavailableError:
                return
            try:
                client = self.client_of(leader.url)
                await client.call("GET", "/healthz", timeout_s=_HEALTH_S, retry=False)
            except (UnavailableError, DeadlineExceededError) as error:
                if loop.time() > deadline_s:
                    raise UnavailableError(
                        f"the scheduler at {leader.url} cannot be reached from here\n"
                        f"{error}\n"
                        "a driver must reach the scheduler and the nodes: run it in the cluster "
                        "(stoker job submit), or set STOKER_ADVERTISE_HOST of each service to a "
                        "name or an address that this machine knows it by"
                    ) from None
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def scheduler_call(
        self,
        path: str,
        body: object,
        reply: type[Any] | None,
        *,
        timeout_s: float,
        retry: bool = True,
    ) -> Any:
        """POST to the scheduler that leads; ask the gcs for it again when it changes.

        Without ``retry`` the caller tries again, and learns at once what is wrong.
        """
        return await self._leader.call(
            "POST", path, body, reply=reply, timeout_s=timeout_s, retry=retry
        )

    async def job_of(self, job_id: str, actor_id: str) -> Job:
        """Return the job that this worker works for.

        A detached actor works for one that never ends, with the properties of the job that made it.
        """
        if job_id != DETACHED_JOB or not actor_id:
            return await self.gcs.call("GET", f"/v1/jobs/{job_id}", reply=Job)
        actor = await self.gcs.call("GET", f"/v1/actors/{actor_id}", reply=Actor)
        creator = await self.gcs.call("GET", f"/v1/jobs/{actor.job_id}", reply=Job)
        return msgspec.structs.replace(creator, job_id=job_id, namespace=actor.namespace)

    async def may_open(self, review: ReviewChannel) -> bool:
        """Return whether a process of another job may open a channel to this one, as the gcs says."""
        answer = await self.gcs.call("POST", "/v1/channel-reviews", review, reply=ChannelReview)
        return answer.allowed

    async def store_function(self, digest: str, blob: bytes) -> None:
        """Store a pickled function in the gcs, under its hash."""
        await self.gcs.call("PUT", f"/v1/functions/{digest}", blob)

    async def load_function(self, digest: str) -> bytes:
        """Return a pickled function; wait for a gcs that is away, as what needs it can do nothing else."""
        while True:
            try:
                return bytes(await self.gcs.call("GET", f"/v1/functions/{digest}", raw=True))
            except (UnavailableError, DeadlineExceededError):
                await asyncio.sleep(_RETRY_S)

    async def node_of(self, node_id: str) -> Node:
        """Return a node as the gcs knows it; note whether its arena is in this machine's memory."""
        node = await self.gcs.call("GET", f"/v1/nodes/{node_id}", reply=Node)
        identity = self._identity
        is_local = node.host_id == identity.host_id and not identity.is_foreign
        is_local = is_local and self._settings.share_arenas
        self._arenas.setdefault(node_id, Arena(node.arena_dir) if is_local else None)
        return node

    async def node_and_heir(self, node_id: str) -> tuple[Node, Node | None]:
        """Return a node, and the one that has taken over its objects when it was drained, if it was."""
        node = await self.node_of(node_id)
        if node.state is not NodeState.DEAD or not node.objects_at:
            return node, None
        return node, await self.node_of(node.objects_at)

    def seen_arena(self, node_id: str) -> Arena | None:
        """Return a node's arena if it is known to be in this machine's memory (any thread)."""
        return self._arenas.get(node_id)

    def arena_of(self, node_id: str) -> Arena | None:
        """Return the arena of a node whose memory this process can see, else None (any thread).

        None also while the gcs, which knows that, does not answer: the nodelet has all values.
        """
        if node_id in self._arenas:
            return self._arenas[node_id]
        if self._io.is_current() or time.monotonic() < self._ask_again_s.get(node_id, 0.0):
            return None
        try:
            self._io.run(self.node_of(node_id), _ARENA_S)
        except StokerError:
            self._ask_again_s[node_id] = time.monotonic() + _ASK_AGAIN_S
        return self._arenas.get(node_id)

    async def register_stop_callbacks(self) -> None:
        """Tell this worker's nodelet that it wants notice of its end, whatever ends it in order."""
        node = self._identity.node
        assert node is not None
        path = f"/v1/workers/{self._identity.peer_id}/stop-callbacks"
        await self.client_of(node.url).call("POST", path, timeout_s=_REGISTER_S)

    async def kill_worker(self, node_id: str, worker_id: str, lease_id: str, reason: str) -> bool:
        """Have a nodelet kill a worker that serves a lease; return False if it does not answer."""
        try:
            async with asyncio.timeout(_KILL_S):
                node = await self.node_of(node_id)
                await self.client_of(node.url).call(
                    "POST",
                    f"/v1/workers/{worker_id}/kill",
                    KillWorker(reason=reason, lease_id=lease_id),
                    timeout_s=_KILL_S,
                )
        except (StokerError, TimeoutError):
            return False
        return True

    async def death_of(
        self, node_id: str, worker_id: str, how: str, *, patient: bool
    ) -> WorkerDiedError | NodeDiedError:
        """Return why a worker died, as its nodelet knows it, or that its node did.

        ``patient`` waits for the gcs to decide whether a node that fell silent is dead.
        """
        node: Node | None = None
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _EXIT_REPORT_S
        try:
            while True:
                node = await self.node_of(node_id)
                if node.state is NodeState.DEAD:
                    return node_died(node, worker_id)
                try:
                    dead = await self.client_of(node.url).call(
                        "GET",
                        f"/v1/workers/{worker_id}/exit",
                        reply=WorkerExit,
                        query={"wait_s": _EXIT_REPORT_S - 1},
                        timeout_s=_EXIT_REPORT_S,
                        retry=False,
                    )
                except UnavailableError:
                    if loop.time() > deadline_s:
                        raise
                    await asyncio.sleep(_AGAIN_S)  # the gcs may know by then that the node is dead
                else:
                    return death_error(dead)
        except StokerError as error:
            with contextlib.suppress(StokerError, TimeoutError):
                async with asyncio.timeout(_NODE_STATE_S):
                    node = await self.node_of(node_id)
                    while patient and node.state is NodeState.SUSPECT:
                        await asyncio.sleep(_RETRY_S)
                        node = await self.node_of(node_id)
            if node is not None and node.state is NodeState.DEAD:
                return node_died(node, worker_id)
            return WorkerDiedError(
                f"worker {worker_id} on node {node_id} is gone ({how})\n"
                f"its nodelet cannot say why: {error}"
            )


def node_died(node: Node, worker_id: str) -> NodeDiedError:
    """Return the error for what ran on a node that was declared dead."""
    return NodeDiedError(
        f"{node.end}, and worker {worker_id} with it" + (f"\n{node.reason}" if node.reason else ""),
        extra={"node_id": node.node_id, "worker_id": worker_id},
    )


def death_error(dead: WorkerExit) -> WorkerDiedError:
    """Return the error for a worker's exit: one cause, and on further lines its evidence."""
    log = "".join(f"\n    {line}" for line in dead.last_log_lines[-10:])
    text = (
        f"worker {dead.worker_id} (pid {dead.pid}) on node {dead.node_id} died: {dead.cause}.\n"
        f"peak memory: {dead.peak_rss_bytes / 2**20:.0f} MiB"
    )
    if dead.memory is not None:
        text += f"\n{dead.memory.text}"
    if log:
        text += f"\nlast output:{log}"
    died = PreemptedError if dead.preempted else WorkerDiedError
    cls = OutOfMemoryError if dead.oom else died
    return cls(
        text,
        extra={
            "exit_code": dead.exit_code,
            "signal": dead.signal,
            "oom": dead.oom,
            "memory": None if dead.memory is None else msgspec.to_builtins(dead.memory),
            "peak_rss_bytes": dead.peak_rss_bytes,
            "node_id": dead.node_id,
            "worker_id": dead.worker_id,
            "overdue": dead.overdue,
        },
    )
