"""The right to connections through the gateway, and where to: what the gcs says of tokens and nodes.

The gateway asks with the token itself, so it needs no secret and learns nothing that its owner may not see.
A token that is revoked, or whose job has ended, loses what is open within a second or two. While the gcs
does not answer what is open stays, and nothing new is let in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from stoker_wire.errors import (
    ForbiddenError,
    NotFoundError,
    StokerError,
    UnauthorizedError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.common import Role
from stoker_wire.messages.control import Leader, Page, Whoami

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

CHECK_S = 1.0
"""A token is asked about so often while something of its is open."""
_FORGET_S = 60.0
_KNOWN = 1024
"""Tokens that are remembered; beyond, those that have nothing open are forgotten."""
_ASK_S = 5.0
_FRESH_S = 3 * CHECK_S
"""What was said of a token that is in use is not older."""
_TARGETS_S = 0.5
"""The pause before nodes are listed again for a target that is not known."""
_VIEWERS = frozenset({Role.VIEWER})


class Open(Protocol):
    """Something that ends with the token by which it was opened."""

    def abort(self) -> None:
        """End it at once."""
        ...


class Holder(Protocol):
    """Whatever something is open by."""

    open: set[Open]


class Pass:
    """A token that the gcs knows, and what is open by it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sender = Whoami(role=Role.VIEWER)
        self.open: set[Open] = set()
        self.lock = asyncio.Lock()
        self.checked_s = float("-inf")
        self.used_s = time.monotonic()

    @property
    def owner(self) -> str:
        """The name by which it is told from others."""
        return f"{self.sender.role} {self.sender.job_id or self.sender.name}"

    def abort(self) -> None:
        """End all that is open."""
        for one in list(self.open):
            one.abort()


class Admission:
    """The tokens in use, and the addresses of the cluster's processes."""

    def __init__(self, settings: Settings, gcs_url: str) -> None:
        self._settings = settings
        self._gcs_url = gcs_url
        self._passes: dict[str, Pass] = {}
        self._targets = Targets(settings.gateway_min_port)

    async def run(self) -> None:
        """Ask about the tokens in use, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            for token, known in list(self._passes.items()):
                if known.open:
                    try:
                        await self._check(token, known)
                    except StokerError:
                        continue  # it is not the token's fault, or the token is gone
                elif time.monotonic() - known.used_s > _FORGET_S:
                    await self._forget(token)

    async def close(self) -> None:
        """End all that is open."""
        for token in list(self._passes):
            await self._forget(token)

    async def admit(self, token: str) -> Pass:
        """Return the pass of a token; UnauthorizedError or ForbiddenError if it has none."""
        known = await self.recognize(token)
        if known.sender.role in _VIEWERS:
            raise ForbiddenError(
                f"{known.owner} may not run anything, and so needs no connection to nodes\n"
                "/v1 is there for it on this port"
            )
        return known

    async def recognize(self, token: str) -> Pass:
        """Return a token that the gcs knows, a viewer's too; UnauthorizedError or ForbiddenError if not."""
        if not token:
            raise UnauthorizedError(
                "the request has no token\n"
                "send 'Proxy-Authorization: Bearer <token>' (STOKER_TOKEN or the token file)",
                field="Proxy-Authorization",
            )
        known = self._passes.get(token)
        if known is None:
            await self._make_room()
            client = Client(self._gcs_url, token=token, peer="gateway", settings=self._settings)
            known = self._passes.setdefault(token, Pass(client))
        known.used_s = time.monotonic()
        if known.used_s - known.checked_s > CHECK_S:
            await self._check(token, known)
        return known

    async def _check(self, token: str, known: Pass) -> None:
        async with known.lock:
            if time.monotonic() - known.checked_s < CHECK_S / 2:
                return
            try:
                known.sender = await known.client.call(
                    "GET", "/v1/whoami", reply=Whoami, timeout_s=_ASK_S, retry=False
                )
            except (UnauthorizedError, ForbiddenError):
                self._hand_over(known)
                await self._forget(token)
                raise
            known.checked_s = time.monotonic()

    def _hand_over(self, ended: Pass) -> None:
        """Give what is open to the job's next token, if there is one: its secret was rotated."""
        for other in self._passes.values():
            fresh = time.monotonic() - other.checked_s < _FRESH_S
            if other is not ended and fresh and ended.sender.job_id and other.owner == ended.owner:
                other.open |= ended.open
                ended.open = other.open
                return

    async def _make_room(self) -> None:
        if len(self._passes) < _KNOWN:
            return
        idle = [token for token, known in self._passes.items() if not known.open]
        if not idle:
            raise UnavailableError(f"{_KNOWN} tokens are in use at this gateway\ntry again later")
        await self._forget(idle[0])

    async def _forget(self, token: str) -> None:
        known = self._passes.pop(token, None)
        if known is not None:
            if all(known.open is not other.open for other in self._passes.values()):
                known.abort()
            await known.client.close()

    async def check_target(self, known: Pass, host: str, port: int) -> None:
        """Raise ForbiddenError unless a process of the cluster may listen there."""
        await self._targets.check(known.client, host, port)


class Targets:
    """The places that connections may go to: services, and the ports that workers of nodes are given.

    A node's machine has other ports too, which a token of Stoker's is no key to: beside its own it is
    reached at those alone from ``min_port`` on, which the kernel gives out.
    """

    def __init__(self, min_port: int) -> None:
        self._min_port = min_port
        self._services: set[tuple[str, int]] = set()
        self._hosts: set[str] = set()
        self._listed_s = float("-inf")
        self._lock = asyncio.Lock()

    async def check(self, client: Client, host: str, port: int) -> None:
        """Raise ForbiddenError for any other place."""
        if self._knows(host, port):
            return
        async with self._lock:
            if time.monotonic() - self._listed_s > _TARGETS_S:
                await self._list(client)
        if self._knows(host, port):
            return
        if host in self._hosts:
            raise ForbiddenError(
                f"{host}:{port} is no port of a service or a worker\n"
                f"nodes are reached at ports from {self._min_port} on (STOKER_GATEWAY_MIN_PORT)"
            )
        raise ForbiddenError(
            f"{host} is no machine of this cluster\n"
            "a driver outside reaches services and nodes: what a driver of another machine owns, it reads "
            "once that is a named actor's or a task's result"
        )

    def _knows(self, host: str, port: int) -> bool:
        if (host, port) in self._services:
            return True
        return host in self._hosts and port >= self._min_port

    async def _list(self, client: Client) -> None:
        nodes = await client.items("/v1/nodes", Page[Node], timeout_s=_ASK_S)
        services = {_place_of(node.url) for node in nodes if node.state is not NodeState.DEAD}
        hosts = {host for host, _ in services}
        try:
            leader = await client.call(
                "GET", "/v1/leaders/scheduler", reply=Leader, timeout_s=_ASK_S, retry=False
            )
            services.add(_place_of(leader.url))
        except (NotFoundError, UnavailableError):
            pass  # none leads now
        self._services = services
        self._hosts = hosts | await _addresses_of(hosts)
        self._listed_s = time.monotonic()


def _place_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


async def _addresses_of(hosts: set[str]) -> set[str]:
    """Return the addresses of names: a driver on a node goes by its address."""
    loop = asyncio.get_running_loop()
    found: set[str] = set()
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            try:
                async with asyncio.timeout(_ASK_S):
                    found.update(str(one[4][0]) for one in await loop.getaddrinfo(host, None))
            except (OSError, TimeoutError):
                continue
    return found
