"""The checks of a request's Host, Origin and token, before anything is decoded.

Called by the HTTP server for every request.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker_wire.errors import UnauthorizedError
from stoker_wire.http import auth
from stoker_wire.http.server.site_guard import SiteGuard

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

ALWAYS_OPEN = frozenset({"/healthz", "/readyz"})
"""Probes of container engines and load balancers carry no token, and learn one bit."""
OPEN_ON_LOOPBACK = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})


class RequestGuard:
    """The rules of one service, fixed once it is known where it listens."""

    def __init__(
        self, settings: Settings, token: str, authenticator: auth.Authenticator | None = None
    ) -> None:
        self.authenticator = authenticator
        self._token = token
        self._site = SiteGuard(settings)
        self._open = ALWAYS_OPEN
        self.listens_on(None)

    def listens_on(self, host: str | None) -> None:
        """Set the names that requests may use; ``host`` is None for a Unix socket alone."""
        self._site.listens_on(host)
        loopback = host is None or auth.is_loopback(host)
        self._open = OPEN_ON_LOOPBACK if loopback else ALWAYS_OPEN

    async def check(self, headers: Mapping[str, str], path: str) -> str:
        """Return the principal; ForbiddenError or UnauthorizedError say what is wrong."""
        self._site.check(headers)
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


def outward_address() -> str:
    """Return the address by which other machines most likely reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Documentation range; a UDP connect sends nothing.
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
