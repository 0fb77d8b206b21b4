"""Sessions: how the page of a browser shows a token without having it.

A person's token is exchanged for a session's, which travels in a cookie that no script can read and that
no other site's page sends (``SameSite=Strict``). A request that changes something must also carry what
only a page of this service can know: the session's CSRF token, in a header. Nothing is stored: a session
is signed like every token, ends with the token that it was made of, and when it expires.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, NamedTuple

from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http.server.tokens import TokenSigner, Use
from stoker_wire.messages.common import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_wire.http.principals import Principal

CSRF_HEADER = "Stoker-CSRF"
LIFETIME_S = 12 * 3600.0
LOGIN_LIFETIME_S = 120.0
"""How long the link of ``stoker dashboard`` may wait to be opened."""
_READS = frozenset({"GET", "HEAD"})


class Session(NamedTuple):
    """A session: whose it is, its token, and the CSRF token that goes with it."""

    principal: Principal
    token: str
    csrf: str


class Sessions:
    """Maker and verifier of the sessions of one service."""

    def __init__(self, tokens: TokenSigner) -> None:
        self._tokens = tokens

    def begin(self, principal: Principal) -> Session:
        """Return a new session; ForbiddenError for a token that is no person's."""
        if principal.role not in (Role.ADMIN, Role.USER, Role.VIEWER):
            raise ForbiddenError(
                f"{principal} has no sessions\nlog in with the token of an admin, a user or a viewer",
                field="Authorization",
            )
        token = self._tokens.person(principal, Use.SESSION, LIFETIME_S)
        return Session(self._tokens.verify(token, Use.SESSION), token, _csrf_of(token))

    def login_token(self, principal: Principal) -> str:
        """Return what begins a session of a person within the next minutes."""
        return self._tokens.person(principal, Use.LOGIN, LOGIN_LIFETIME_S)

    def of_link(self, token: str) -> Principal | None:
        """Return whose link a token is of that has not expired; None if of none."""
        try:
            return self._tokens.verify(token, Use.LOGIN)
        except UnauthorizedError:
            return None

    def of_bearer(self, token: str) -> Principal:
        """Return whose token it is; UnauthorizedError if it is none."""
        return self._tokens.verify(token)

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session whose cookie a request carries; UnauthorizedError if it has ended."""
        cookies = _cookies(headers.get("Cookie", ""))
        for name in self._names:
            if token := cookies.get(name):
                return Session(self._tokens.verify(token, Use.SESSION), token, _csrf_of(token))
        return None

    def check(self, headers: Mapping[str, str], method: str) -> Principal | None:
        """Return whose session a request comes with, or None.

        ForbiddenError for one that changes something without the CSRF token, and for a WebSocket.
        """
        session = self.find(headers)
        if session is None:
            return None
        given = headers.get(CSRF_HEADER, "")
        changes = method not in _READS or "Upgrade" in headers
        if changes and not hmac.compare_digest(
            given.encode(errors="replace"), session.csrf.encode()
        ):
            raise ForbiddenError(
                f"the session came without its CSRF token\nsend {CSRF_HEADER}: GET /v1/session has it",
                field=CSRF_HEADER,
            )
        return session.principal

    def cookie(self, token: str, *, secure: bool) -> str:
        """Return the ``Set-Cookie`` that keeps a session in the browser; of no token, that ends it.

        Browsers send a cookie to all ports of a host, so its name is the cluster's own.
        """
        lifetime_s = int(LIFETIME_S) if token else 0
        end = "; Secure" if secure else ""
        name = self._names[0]
        return f"{name}={token}; Path=/; Max-Age={lifetime_s}; HttpOnly; SameSite=Strict{end}"

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"stoker_{one}" for one in self._tokens.names_of("session"))


def _csrf_of(token: str) -> str:
    return hmac.digest(token.encode(), b"stoker csrf", "sha256").hex()


def _cookies(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, _, value in pairs}
