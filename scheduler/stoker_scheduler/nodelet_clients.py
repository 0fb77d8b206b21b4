"""The scheduler's calls to nodelets: start a lease, release leases, list those that are held.

Starts are tried twice at most, so that another node can be used soon; releases are repeated until
the nodelet confirms or its node is gone, because their resources are not free before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker_scheduler.core.events import StartFailure
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    JobFinishedError,
    NotReadyError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import (
    HeldLeases,
    Node,
    ReleaseLeases,
    StartedLease,
    StartLease,
    StopLeases,
)
from stoker_wire.messages.common import Empty
from stoker_wire.messages.groups import CommitBundles, CommittedBundles, HoldBundles

if TYPE_CHECKING:
    from stoker_wire.http.client.pool import ClientPool
    from stoker_wire.process.background import Background

START_TIMEOUT_S = 60.0
START_WITH_BUILD_TIMEOUT_S = 900.0
"""Where packages are installed or kernels compiled first."""
HOLD_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 10.0
HELD_TIMEOUT_S = 5.0
RELEASE_PAUSE_S = 0.1
RELEASE_PAUSE_MAX_S = 2.0


class StartFailedError(Exception):
    """The failed start of a lease; ``failure`` says whether another node may do better.

    ``ended`` means that the lease was ended while it started, or that its node is leaving.
    """

    def __init__(
        self,
        failure: StartFailure,
        text: str,
        *,
        fenced: bool = False,
        ended: bool = False,
        job_finished: bool = False,
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.text = text
        self.fenced = fenced
        self.ended = ended
        self.job_finished = job_finished


OnEnded = Callable[[str], None]
"""Called with the id of a lease whose release the nodelet has confirmed."""


@dataclass(slots=True)
class _Nodelet:
    """One nodelet: its client, and the releases to send: (kill, reason) -> leases."""

    url: str
    client: Client
    releases: dict[tuple[bool, str], dict[str, OnEnded | None]] = field(default_factory=dict)
    collecting: bool = False
    gone: bool = False


def _start_failed(error: StokerError) -> StartFailedError:
    """Return a refusal of one node as a failed start."""
    return StartFailedError(
        StartFailure.HERE,
        str(error),
        fenced=isinstance(error, FencedError),
        ended=isinstance(error, ConflictError),
        job_finished=isinstance(error, JobFinishedError),
    )


class NodeletClients:
    """The nodelets by node id, and calls to them over ``clients``, which it closes; ``epoch`` fences all."""

    def __init__(self, clients: ClientPool, *, epoch: int, background: Background) -> None:
        self._clients = clients
        self._background = background
        self._nodelets: dict[str, _Nodelet] = {}
        self.epoch = epoch

    def add(self, node: Node) -> None:
        """Add a node, or its new address."""
        known = self._nodelets.get(node.node_id)
        if known is not None and known.url == node.url:
            return
        self.remove(node.node_id)
        self._nodelets[node.node_id] = _Nodelet(node.url, self._clients.client(node.url))

    def remove(self, node_id: str) -> None:
        """Remove a node; releases that it has not confirmed are moot."""
        nodelet = self._nodelets.pop(node_id, None)
        if nodelet is None:
            return
        nodelet.gone = True
        # A node that starts again under another id may have the URL of the one that is removed late.
        if all(other.url != nodelet.url for other in self._nodelets.values()):
            self._clients.pop(nodelet.url)
            self._background.close_later(nodelet.client.close(), name=node_id)

    async def close(self) -> None:
        """Close all connections."""
        nodelets, self._nodelets = self._nodelets, {}
        for nodelet in nodelets.values():
            nodelet.gone = True
        await self._clients.close()

    async def held(self, node: Node) -> HeldLeases:
        """Fence a nodelet against earlier leaders, then return the leases that it holds.

        Without the fence, a start that the leader before has sent could arrive after the list.
        """
        self.add(node)
        fence = ReleaseLeases(lease_ids=(), epoch=self.epoch)
        await self._nodelets[node.node_id].client.call(
            "POST", "/v1/leases/release", fence, timeout_s=HELD_TIMEOUT_S
        )
        nodelet = self._nodelets.get(node.node_id)
        if nodelet is None:
            raise UnavailableError(f"node {node.node_id} is gone")
        return await nodelet.client.call(
            "GET", "/v1/leases", reply=HeldLeases, timeout_s=HELD_TIMEOUT_S
        )

    async def start(self, node_id: str, order: StartLease) -> StartedLease:
        """Have a nodelet give a worker to a lease; return the worker, or raise StartFailedError."""
        env = order.worker.runtime_env
        builds = bool(env.pip or env.kernels)
        timeout_s = START_WITH_BUILD_TIMEOUT_S if builds else START_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        tries = 0
        while True:
            client = self._client(node_id)
            tries += 1
            try:
                return await client.call(
                    "POST",
                    "/v1/leases",
                    order,
                    reply=StartedLease,
                    timeout_s=max(0.1, deadline_s - time.monotonic()),
                    retry=False,
                )
            except RuntimeEnvSetupError as error:
                raise StartFailedError(StartFailure.ANYWHERE, str(error)) from None
            except UnavailableError as error:
                if tries == 2 or isinstance(error, NotReadyError):
                    raise StartFailedError(StartFailure.NODE, str(error)) from None
            except DeadlineExceededError as error:
                # What is built may be to blame; without it a start is quick on any sound node.
                failure = StartFailure.HERE if builds else StartFailure.NODE
                raise StartFailedError(failure, str(error)) from None
            except StokerError as error:
                raise _start_failed(error) from None

    async def hold(self, node_id: str, order: HoldBundles) -> None:
        """Have a nodelet hold bundles; StartFailedError if it does not."""
        try:
            await self._client(node_id).call(
                "POST", "/v1/bundles", order, reply=Empty, timeout_s=HOLD_TIMEOUT_S
            )
        except (UnavailableError, DeadlineExceededError) as error:
            raise StartFailedError(StartFailure.NODE, str(error)) from None
        except StokerError as error:
            raise _start_failed(error) from None

    async def commit(self, node_id: str, order: CommitBundles) -> tuple[str, ...]:
        """Have a nodelet keep prepared bundles, sooner or later; return those that it had not given up."""
        pause_s = RELEASE_PAUSE_S
        while (nodelet := self._nodelets.get(node_id)) is not None:
            try:
                reply = await nodelet.client.call(
                    "POST",
                    "/v1/bundles/commit",
                    order,
                    reply=CommittedBundles,
                    timeout_s=RELEASE_TIMEOUT_S,
                )
            except FencedError:
                return ()
            except StokerError:
                # As with releases: the node is declared dead if this goes on.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RELEASE_PAUSE_MAX_S)
                continue
            return reply.lease_ids
        return ()

    async def stop(self, node_id: str, order: StopLeases) -> None:
        """Have a nodelet preempt leases, unless it cannot be told before their grace has passed."""
        deadline_s = time.monotonic() + order.grace_s
        while (nodelet := self._nodelets.get(node_id)) is not None:
            try:
                await nodelet.client.call(
                    "POST", "/v1/leases/stop", order, timeout_s=RELEASE_TIMEOUT_S
                )
            except UnavailableError:
                await asyncio.sleep(RELEASE_PAUSE_S)
                left_s = deadline_s - time.monotonic()
                if left_s > 0:
                    order = replace(order, grace_s=left_s)
                    continue
            return

    def _client(self, node_id: str) -> Client:
        nodelet = self._nodelets.get(node_id)
        if nodelet is None:
            raise StartFailedError(StartFailure.NODE, f"node {node_id} is gone")
        return nodelet.client

    def release(
        self,
        node_id: str,
        lease_id: str,
        *,
        kill: bool,
        reason: str,
        on_ended: OnEnded | None = None,
    ) -> None:
        """End a lease on its node, sooner or later; ``on_ended`` is called when the node confirms."""
        nodelet = self._nodelets.get(node_id)
        if nodelet is None:
            return
        nodelet.releases.setdefault((kill, reason), {})[lease_id] = on_ended
        if not nodelet.collecting:
            nodelet.collecting = True
            self._background.spawn(self._collect(nodelet), name=f"release on {node_id}")

    async def _collect(self, nodelet: _Nodelet) -> None:
        """Send the releases that this turn of the loop has collected, one request per kind.

        Requests do not wait for each other: ending a worker that holds a GPU may take seconds.
        """
        releases, nodelet.releases, nodelet.collecting = nodelet.releases, {}, False
        async with asyncio.TaskGroup() as group:
            for (kill, reason), lease_ids in releases.items():
                group.create_task(self._release(nodelet, lease_ids, kill, reason))

    async def _release(
        self, nodelet: _Nodelet, lease_ids: dict[str, OnEnded | None], kill: bool, reason: str
    ) -> None:
        pause_s = RELEASE_PAUSE_S
        while not nodelet.gone:
            order = ReleaseLeases(
                lease_ids=tuple(lease_ids), kill=kill, reason=reason, epoch=self.epoch
            )
            try:
                await nodelet.client.call(
                    "POST", "/v1/leases/release", order, timeout_s=RELEASE_TIMEOUT_S
                )
            except StokerError:
                # The node is declared dead if this goes on; until then its leases are not free.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RELEASE_PAUSE_MAX_S)
                continue
            for lease_id, on_ended in lease_ids.items():
                if on_ended is not None:
                    on_ended(lease_id)
            return
