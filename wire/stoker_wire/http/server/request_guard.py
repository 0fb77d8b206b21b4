"""The checks of a request's Host, Origin and token, before anything is decoded.

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

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

ALWAYS_OPEN = frozenset({"/healthz", "/readyz"})
"""Probes of container engines and load balancers carry no token, and learn one bit."""
OPEN_ON_LOOPBACK = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})

_ANY = frozenset({"0.0.0.0", "::", ""})


class RequestGuard:
    """The rules of one service, fixed once it is known where it listens."""

    def __init__(
        self, settings: Settings, token: str, authenticator: auth.Authenticator | None = None
    ) -> None:
        self.authenticator = authenticator
        self._token = token
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

    async def check(self, headers: Mapping[str, str], path: str) -> str:
        """Return the principal; ForbiddenError or UnauthorizedError say what is wrong."""
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
        if header is not None and auth.check(header, self._token):
            return auth.SHARED_PRINCIPAL
        if path in self._open:
            return ""
        if self.authenticator is not None and header is not None:
            principal = await self.authenticator.principal(auth.bearer(header))
            if principal is not None:
                return principal
        raise UnauthorizedError(
            "this token is not the cluster's\n"
            "compare STOKER_TOKEN or the token file with the head node's"
            if header
            else "the request has no token\n"
            "send 'Authorization: Bearer <token>' (STOKER_TOKEN or the token file)",
            field="Authorization",
        )

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
