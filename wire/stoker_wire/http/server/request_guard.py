"""The checks of a request's Host, Origin, token and role, before anything is decoded.

Called by the HTTP server for every request. The Host check keeps a web page that rebinds its
own name to this machine from talking to a service with the browser as its agent.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http import auth
from stoker_wire.http.principals import ANONYMOUS, Principal

if TYPE_CHECKING:
    from stoker_wire.http.server.request import BoundRoute
    from stoker_wire.http.server.tokens import Authority, TokenSigner
    from stoker_wire.messages.common import Role
    from stoker_wire.settings import Settings

ALWAYS_OPEN = frozenset({"/healthz", "/readyz"})
"""Probes of container engines and load balancers carry no token, and learn one bit."""
OPEN_ON_LOOPBACK = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})

_ANY = frozenset({"0.0.0.0", "::", ""})


class RequestGuard:
    """The rules of one service, fixed once it is known where it listens."""

    def __init__(
        self, settings: Settings, tokens: TokenSigner, authority: Authority | None = None
    ) -> None:
        self._authority = authority
        self._tokens = tokens
        self._settings = settings
        self._any_address = False
        self._names: set[str] = set()
        self._open = ALWAYS_OPEN
        self.listens_on(None)

    def listens_on(self, host: str | None) -> None:
        """Set the names that requests may use; ``host`` is None for a Unix socket alone."""
        self._any_address = host in _ANY
        loopback = host is None or auth.is_loopback(host)
        self._open = OPEN_ON_LOOPBACK if loopback else ALWAYS_OPEN
        names = {"localhost", host or "", self._settings.advertise_host}
        names.update(self._settings.allowed_hosts)
        if not loopback:
            names.add(socket.gethostname())
        self._names = {name.lower().strip("[]") for name in names if name}

    async def check(self, headers: Mapping[str, str], path: str) -> Principal:
        """Return who sends it; ForbiddenError or UnauthorizedError say what is wrong."""
        host = headers.get("Host", "")
        if not self._known(host):
            raise ForbiddenError(
                f"Host {host[:100]!r} is not a name of this service\n"
                "add it to STOKER_ALLOWED_HOSTS if it is meant to be one",
                field="Host",
            )
        origin = headers.get("Origin")
        if origin is not None and not self._same_site(origin, host):
            raise ForbiddenError(
                f"requests from the web origin {origin[:100]!r} are refused", field="Origin"
            )
        header = headers.get("Authorization")
        if path in self._open:
            return ANONYMOUS
        if not header:
            raise UnauthorizedError(
                "the request has no token\n"
                "send 'Authorization: Bearer <token>' (STOKER_TOKEN or the token file)",
                field="Authorization",
            )
        principal = self._tokens.verify(auth.bearer(header))
        return principal if self._authority is None else await self._authority.resolve(principal)

    async def admit(
        self, principal: Principal, route: BoundRoute, params: Mapping[str, str]
    ) -> None:
        """Raise ForbiddenError if what the URL names is not the principal's."""
        if self._authority is not None and not principal.owns_all:
            await self._authority.admit(principal, route.method, route.path, params)

    def _same_site(self, origin: str, host: str) -> bool:
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return netloc == host.lower() or host_name(netloc) in self._settings.allowed_hosts

    def _known(self, host: str) -> bool:
        name = host_name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A page can rebind a name, never an address: any literal is safe where we listen on all.
        return self._any_address or address.is_loopback


def check_role(principal: Principal, roles: frozenset[Role], what: str) -> None:
    """Raise ForbiddenError unless one of the principal's roles is among ``roles``."""
    if principal.roles.isdisjoint(roles):
        needed = ", ".join(sorted(roles))
        raise ForbiddenError(
            f"{what} is not for {principal}\nit takes a token of one of the roles {needed}",
            field="Authorization",
        )


def host_name(host: str) -> str:
    """Return the name in a ``name:port`` header, lower case and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def outward_address() -> str:
    """Return the address by which other machines most likely reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Documentation range; a UDP connect sends nothing.
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
