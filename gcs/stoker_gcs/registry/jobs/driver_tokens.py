"""Renewal of the tokens of attached drivers, over their sessions, when another secret signs.

Used by the sessions that this replica holds. A driver has a new token when it has said so.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.http.auth import bearer, token_digest
from stoker_wire.messages.work import SESSION_BEAT, SessionMessage

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_wire.http.server.service import Request
    from stoker_wire.http.server.tokens import TokenSigner


class DriverTokens:
    """The tokens of the drivers whose sessions are open here."""

    def __init__(self, signer: TokenSigner) -> None:
        self._signer = signer
        self._sessions: set[DriverToken] = set()
        signer.secret.on_change(self._on_change)

    @property
    def rotates(self) -> bool:
        """Whether what another secret than the present one has signed is good."""
        return len(self._signer.secret.values) > 1

    def behind(self) -> tuple[str, ...]:
        """Return the drivers that have not taken the token which the present secret signs."""
        return tuple(f"the driver of {one.job_id}" for one in self._sessions if one.is_behind)

    def _on_change(self) -> None:
        for one in self._sessions:
            one.due.set()

    async def renew(self, ws: web.WebSocketResponse, session: DriverToken) -> None:
        """Send a driver its token whenever it has another one, until cancelled."""
        self._sessions.add(session)
        try:
            while True:
                session.due.clear()
                if session.is_behind:
                    message = SessionMessage(token=session.current)
                    await ws.send_str(msgspec.json.encode(message).decode())
                await session.due.wait()
        except (ConnectionError, RuntimeError):
            return  # the session ends
        finally:
            self._sessions.discard(session)

    def of(self, req: Request) -> DriverToken | None:
        """Return the token of the driver that opens a session, if it is a process of that very job."""
        job_id = req.path["job_id"]
        if req.principal.job_id != job_id:
            return None
        shown = bearer(req.http.headers.get("Authorization"))
        return DriverToken(self._signer, job_id, shown)


class DriverToken:
    """The token of one driver, as it is known to have it."""

    def __init__(self, signer: TokenSigner, job_id: str, shown: str) -> None:
        self._signer = signer
        self.job_id = job_id
        self._took = token_digest(shown)
        self.due = asyncio.Event()

    @property
    def current(self) -> str:
        """The token that it should have."""
        return self._signer.job(self.job_id)

    @property
    def is_behind(self) -> bool:
        """Whether it shows another one."""
        return self._took != token_digest(self.current)

    def on_text(self, text: str) -> None:
        """Take note of what a driver says that it took."""
        if text != SESSION_BEAT:
            try:
                took = msgspec.json.decode(text, type=SessionMessage).took
            except msgspec.MsgspecError:
                return
            self._took = took or self._took
