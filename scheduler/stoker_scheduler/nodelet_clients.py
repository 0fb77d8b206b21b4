"""The scheduler's calls to nodelets: start a lease, end leases, ask what is held.

Starts are tried twice at most, so that another node can be used soon; releases are repeated until
the nodelet confirms or its node is gone, because what they hold is not given to others before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import StartFailure
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    NotReadyError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client import Client
from stoker_wire.http.client_pool import ClientPool
from stoker_wire.messages.cluster import (
    HeldLeases,
    Node,
    ReleaseLeases,
    StartedLease,
    StartLease,
)

if TYPE_CHECKING:
    from stoker_wire.process.background import Background
    from stoker_wire.settings import Settings

START_TIMEOUT_S = 60.0
START_WITH_BUILD_TIMEOUT_S = 900.0
"""Where packages are installed or kernels compiled first."""
RELEASE_TIMEOUT_S = 10.0
HELD_TIMEOUT_S = 5.0
RELEASE_PAUSE_S = 0.1
RELEASE_PAUSE_MAX_S = 2.0


class StartFailedError(Exception):
    """A lease did not start; ``failure`` says whether another node may do better.

    ``ended`` means that somebody ended the lease while it started, or that its node is leaving.
    """

    def __init__(
        self, failure: StartFailure, text: str, *, fenced: bool = False, ended: bool = False
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.text = text
        self.fenced = fenced
        self.ended = ended


@dataclass(slots=True)
class _Peer:
    """One nodelet: its client, and the releases to send: (kill, why) -> leases."""

    url: str
    client: Client
    releases: dict[tuple[bool, str], dict[str, None]] = field(default_factory=dict)
    collecting: bool = False
    gone: bool = False


class Nodelets:
    """Clients of all nodelets. ``ended`` is called when a nodelet has confirmed a release."""

    def __init__(
        self,
        settings: Settings,
        *,
        token: str,
        background: Background,
        ended: Callable[[str], None],
    ) -> None:
        self._clients = ClientPool(token=token, peer="scheduler", settings=settings)
        self._background = background
        self._ended = ended
        self._peers: dict[str, _Peer] = {}
        self.epoch = 0

    def add(self, node: Node) -> None:
        """Know a node, or its new address."""
        known = self._peers.get(node.node_id)
        if known is not None and known.url == node.url:
            return
        self.remove(node.node_id)
        self._peers[node.node_id] = _Peer(node.url, self._clients.client(node.url))

    def remove(self, node_id: str) -> None:
        """Forget a node; releases that it has not confirmed are moot."""
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            peer.gone = True
            # A nodelet that started again on the same port may be known already, as another node.
            if all(other.url != peer.url for other in self._peers.values()):
                self._clients.pop(peer.url)
                self._background.close_later(peer.client.close(), name=node_id)

    async def close(self) -> None:
        """Close all connections."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.gone = True
        await self._clients.close()

    async def held(self, node: Node) -> HeldLeases:
        """Fence a nodelet against earlier leaders, then ask it which leases it holds.

        Without the fence, a start that the leader before has sent could arrive after the list.
        """
        self.add(node)
        fence = ReleaseLeases(lease_ids=(), epoch=self.epoch)
        await self._peers[node.node_id].client.call(
            "POST", "/v1/leases/release", fence, timeout_s=HELD_TIMEOUT_S
        )
        return await self._peers[node.node_id].client.call(
            "GET", "/v1/leases", reply=HeldLeases, timeout_s=HELD_TIMEOUT_S
        )

    async def start(self, node_id: str, order: StartLease) -> StartedLease:
        """Have a nodelet give a worker to a lease; StartFailedError says what became of it."""
        env = order.worker.runtime_env
        builds = bool(env.pip or env.kernels)
        timeout_s = START_WITH_BUILD_TIMEOUT_S if builds else START_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        tries = 0
        while True:
            peer = self._peers.get(node_id)
            if peer is None:
                raise StartFailedError(StartFailure.NODE, f"node {node_id} is gone")
            tries += 1
            try:
                return await peer.client.call(
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
                raise StartFailedError(
                    StartFailure.HERE,
                    str(error),
                    fenced=isinstance(error, FencedError),
                    ended=isinstance(error, ConflictError),
                ) from None

    def release(self, node_id: str, lease_id: str, *, kill: bool, reason: str) -> None:
        """End a lease on its node, sooner or later; ``ended`` is called when that is sure."""
        peer = self._peers.get(node_id)
        if peer is None:
            return
        peer.releases.setdefault((kill, reason), {})[lease_id] = None
        if not peer.collecting:
            peer.collecting = True
            self._background.spawn(self._collect(peer), name=f"release on {node_id}")

    async def _collect(self, peer: _Peer) -> None:
        """Send what this turn of the loop has gathered, one request per kind of order.

        Requests do not wait for each other: ending a worker that holds a GPU may take seconds.
        """
        releases, peer.releases, peer.collecting = peer.releases, {}, False
        async with asyncio.TaskGroup() as group:
            for (kill, reason), lease_ids in releases.items():
                group.create_task(self._release(peer, tuple(lease_ids), kill, reason))

    async def _release(
        self, peer: _Peer, lease_ids: tuple[str, ...], kill: bool, reason: str
    ) -> None:
        pause_s = RELEASE_PAUSE_S
        while not peer.gone:
            order = ReleaseLeases(lease_ids=lease_ids, kill=kill, reason=reason, epoch=self.epoch)
            try:
                await peer.client.call(
                    "POST", "/v1/leases/release", order, timeout_s=RELEASE_TIMEOUT_S
                )
            except StokerError:
                # The node is declared dead if this goes on; until then its leases are not free.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RELEASE_PAUSE_MAX_S)
                continue
            for lease_id in lease_ids:
                self._ended(lease_id)
            return
