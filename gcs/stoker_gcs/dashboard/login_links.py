"""Links that begin a session once: the database remembers those that were opened, for all replicas.

A row is of no use once its link has expired, and goes with the requests of the KV that are remembered.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Insert, WriteConflict
from stoker_wire.errors import UnauthorizedError
from stoker_wire.http.dashboard.sessions import LOGIN_LIFETIME_S

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Value

_KEPT_S = 2 * LOGIN_LIFETIME_S


class LoginLinks:
    """The links that were opened."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    async def use_up(self, token: str) -> None:
        """Take the token of a link; UnauthorizedError for one that was taken before."""
        row: dict[str, Value] = {
            "request": f"login-link {hashlib.sha256(token.encode()).hexdigest()}",
            "fingerprint": b"",
            "revision": 0,
            "reply": b"",
            "expires_at_s": self._state.now() + _KEPT_S,
        }
        try:
            await self._state.writer.apply(Change((Insert(schema.KV_REQUESTS, row),)))
        except WriteConflict:
            raise UnauthorizedError(
                "this link was opened before\nmake another, for each opens once: stoker dashboard",
                field="Authorization",
            ) from None
