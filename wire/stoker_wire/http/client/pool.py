"""Clients of many peers, one per URL, and calls to whichever process of a kind leads at the moment.

Each component that calls others has one :class:`ClientPool`, which owns their connections, so that
closing it closes all of them. A :class:`LeaderClient` owns nothing but what it last knew of the leader:
who leads is decided elsewhere (the gcs), and an answer ``not_leader`` is the only proof that it changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from stoker_wire.errors import (
    DeadlineExceededError,
    NotLeaderError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.auth import Credential, credential_of
from stoker_wire.http.client.client import Client

if TYPE_CHECKING:
    from stoker_wire.http.gateway.route import GatewayRoute
    from stoker_wire.settings import Settings

MAX_TRIES = 3
"""Calls of one request: the leader may change while it is asked."""


class ClientPool:
    """One :class:`Client` per URL, all with the same token and ``peer`` name. For one event loop."""

    def __init__(
        self,
        *,
        token: str | Credential,
        peer: str,
        settings: Settings,
        max_connections: int = 256,
        gateway: GatewayRoute | None = None,
    ) -> None:
        self._gateway = gateway
        self._credential = credential_of(token)
        self._peer = peer
        self._settings = settings
        self._max_connections = max_connections
        self._clients: dict[str, Client] = {}

    def client(self, url: str) -> Client:
        """Return the client of a URL, which the pool closes; many long polls may run on one."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = Client(
                url,
                token=self._credential,
                peer=self._peer,
                settings=self._settings,
                max_connections=self._max_connections,
                gateway=self._gateway,
            )
        return client

    def pop(self, url: str) -> Client | None:
        """Take the client of a URL out of the pool, for the caller to close."""
        return self._clients.pop(url, None)

    async def close(self) -> None:
        """Close all connections."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()


class LeaderClient:
    """Calls to the leader of ``name``, which is looked up again when another one leads.

    ``look_up`` returns the URL of the leader, and repeats failed requests only if its argument is
    true; its errors are the caller's. ``last_known`` returns the URL that was heard of last, or ``""``
    (default: the one that this client looked up last).

    Without ``fail_over`` the error of a leader that does not answer is raised as it is, for a caller
    that tries again, and the next call looks the leader up. With ``fail_over`` the leader is looked up
    at once: a new one is asked, and the old one becomes an UnavailableError that names it.
    """

    def __init__(
        self,
        name: str,
        clients: ClientPool,
        look_up: Callable[[bool], Awaitable[str]],
        *,
        last_known: Callable[[], str] | None = None,
        fail_over: bool = False,
    ) -> None:
        self._name = name
        self._clients = clients
        self._look_up = look_up
        self._url = ""
        self._last_known = last_known or (lambda: self._url)
        self._fail_over = fail_over

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[Any] | None = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float,
        retry: bool = True,
    ) -> Any:
        """Send one request to the leader and return its reply, as :meth:`Client.call` does.

        ``timeout_s`` bounds each try; without ``retry`` a try is one request. NotLeaderError (with
        ``fail_over``: UnavailableError) if no process that is looked up leads.
        """
        url, asked, silent = self._last_known(), "", ""
        cause: StokerError | None = None
        for _ in range(MAX_TRIES):
            if not url:
                url = await self._look_up(retry)
            if url == silent:
                break
            self._url = asked = url
            try:
                return await self._clients.client(url).call(
                    method, path, body, reply=reply, query=query, timeout_s=timeout_s, retry=retry
                )
            except NotLeaderError as error:
                cause = error
            except (UnavailableError, DeadlineExceededError) as error:
                cause, silent = error, url
            self._url = url = ""
            if silent and not self._fail_over:
                raise cause
        if not self._fail_over:
            raise NotLeaderError(f"no {self._name} leads at the moment\nit is being elected")
        where = f"the {self._name} at {asked}"
        evidence: object = cause
        if isinstance(cause, DeadlineExceededError):
            evidence = f"{where} did not answer within {timeout_s:g} s"
        raise UnavailableError(f"{where} does not answer\n{evidence}") from cause
