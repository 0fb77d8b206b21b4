"""The checks of a request's Host, Origin, token and role, before anything is decoded.

Called by the HTTP server for every request.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http import auth
from stoker_wire.http.principals import ANONYMOUS, Principal
from stoker_wire.http.server.site_guard import SiteGuard

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_wire.http.dashboard.sessions import Sessions
    from stoker_wire.http.server.request import BoundRoute
    from stoker_wire.http.server.tokens import Authority, TokenSigner
    from stoker_wire.messages.common import Role
    from stoker_wire.settings import Settings

ALWAYS_OPEN = frozenset({"/healthz", "/readyz"})
"""Probes of container engines and load balancers carry no token, and learn one bit."""
OPEN_ON_LOOPBACK = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})


class RequestGuard:
    """The rules of one service, fixed once it is known where it listens."""

    def __init__(
        self, settings: Settings, tokens: TokenSigner, authority: Authority | None = None
    ) -> None:
        self._authority = authority
        self._tokens = tokens
        self.sessions: Sessions | None = None
        """Set where pages of browsers are served, whose requests come with a cookie."""
        self._site = SiteGuard(settings)
        self._open = ALWAYS_OPEN
        self.listens_on(None)

    def listens_on(self, host: str | None) -> None:
        """Set the names that requests may use; ``host`` is None for a Unix socket alone."""
        self._site.listens_on(host)
        loopback = host is None or auth.is_loopback(host)
        self._open = OPEN_ON_LOOPBACK if loopback else ALWAYS_OPEN

    async def check(
        self, headers: Mapping[str, str], path: str, method: str, *, public: bool = False
    ) -> Principal:
        """Return who sends it, nobody to a ``public`` route.

        ForbiddenError and UnauthorizedError say what is wrong.
        """
        self._site.check(headers)
        header = headers.get("Authorization")
        if public:
            return ANONYMOUS
        if path in self._open:
            return self._shown(header)
        if header:
            principal = self.verify(header)
        else:
            of_session = self.sessions and self.sessions.check(headers, method)
            if not of_session:
                raise UnauthorizedError(
                    "the request has no token\n"
                    "send 'Authorization: Bearer <token>' (STOKER_TOKEN or the token file)",
                    field="Authorization",
                )
            principal = of_session
        return await self.resolve(principal)

    async def resolve(self, principal: Principal) -> Principal:
        """Return the principal as the state has it; UnauthorizedError if its token is not valid any more."""
        return principal if self._authority is None else await self._authority.resolve(principal)

    def verify(self, header: str) -> Principal:
        """Return whose token an Authorization header has; UnauthorizedError if it is none of ours."""
        return self._tokens.verify(auth.bearer(header))

    def verifies(self, headers: Mapping[str, str]) -> bool:
        """Return whether the token or session that a request came with, if any, is still one of ours."""
        try:
            if header := headers.get("Authorization"):
                self.verify(header)
            elif self.sessions is not None:
                self.sessions.find(headers)
        except UnauthorizedError:
            return False
        return True

    def _shown(self, header: str | None) -> Principal:
        """Return who sends a request that needs no token, if its token is good."""
        try:
            return self.verify(header) if header else ANONYMOUS
        except UnauthorizedError:
            return ANONYMOUS

    async def admit(
        self, principal: Principal, route: BoundRoute, params: Mapping[str, str]
    ) -> None:
        """Raise ForbiddenError if what the URL names is not the principal's."""
        if self._authority is not None and not principal.owns_all:
            await self._authority.admit(principal, route.method, route.path, params)


def check_role(principal: Principal, roles: frozenset[Role], what: str) -> None:
    """Raise ForbiddenError unless one of the principal's roles is among ``roles``."""
    if principal.roles.isdisjoint(roles):
        needed = ", ".join(sorted(roles))
        raise ForbiddenError(
            f"{what} is not for {principal}\nit takes a token of one of the roles {needed}",
            field="Authorization",
        )


def check_confidential(http: web.Request) -> None:
    """Raise ForbiddenError unless nobody on the way can read the reply."""
    encrypted = http.transport is not None and http.transport.get_extra_info("ssl_object")
    if not encrypted and http.remote and not auth.is_loopback(http.remote):
        raise ForbiddenError(
            "the reply would cross a network in the clear\n"
            "turn TLS on (docs/tls.md), or copy the token file by hand",
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
