"""Events for audits alone: refused requests, and changes of the cluster's secret.

All else that a person changes has an event of its own, which names that person (``Event.by``). Refusals are
counted by sender and written together, so that a flood of them is a few events: at most
:data:`MAX_SENDERS` and one for the rest, in :data:`WINDOW_S`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from stoker_gcs.store.changes import Change
from stoker_wire.errors import StokerError
from stoker_wire.http.principals import ANONYMOUS, Principal
from stoker_wire.messages.control import Author
from stoker_wire.messages.events import EventKind, Refusals, SecretsInUse

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.cluster_secret import ClusterSecret
    from stoker_wire.http.server.dispatch import Refused

MAX_SENDERS = 16
FIRST_S = 1.0
"""So long after the first refusal it is written, with those that came meanwhile."""
WINDOW_S = 60.0
"""So long after that nothing is written."""
_MESSAGE_CHARACTERS = 300

_log = logging.getLogger(__name__)


class _Sender(NamedTuple):
    """Whose refusals count together, and why they were refused."""

    name: str
    address: str
    code: str


_REST = _Sender("others", "", "")


class Audit:
    """The events of this replica's refusals."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._refusals: dict[_Sender, Refusals] = {}
        self._authors: dict[_Sender, Author] = {}
        self._due = asyncio.Event()

    def note_refused(self, refused: Refused) -> None:
        """Count a refused request."""
        principal, address, code = refused.principal, refused.address, refused.error.code
        name = "" if principal is ANONYMOUS else str(principal)
        sender = _Sender(name, address, code)
        if sender not in self._refusals and len(self._refusals) >= MAX_SENDERS:
            sender = _REST
        now, known = self._state.now(), self._refusals.get(sender)
        self._refusals[sender] = Refusals(
            code=code,
            count=1 if known is None else known.count + 1,
            route=refused.where,
            message=refused.error.one_line[:_MESSAGE_CHARACTERS],
            first_at_s=now if known is None else known.first_at_s,
            last_at_s=now,
        )
        if known is None:
            self._authors[sender] = _author(principal, address, sender)
            self._due.set()

    async def run(self) -> None:
        """Write what was refused, until cancelled."""
        while True:
            await self._due.wait()
            await asyncio.sleep(FIRST_S)
            self._due.clear()
            refusals, self._refusals = self._refusals, {}
            authors, self._authors = self._authors, {}
            events = tuple(
                self._state.event(
                    EventKind.AUDIT_REFUSED,
                    sender.name or sender.address or "a local socket",
                    one,
                    by=authors[sender],
                )
                for sender, one in refusals.items()
            )
            try:
                await self._state.writer.apply(Change((), events))
            except StokerError as error:
                _log.warning("refused requests are not in the event log: %s", error.one_line)
            await asyncio.sleep(WINDOW_S)

    async def note_secrets(self, secret: ClusterSecret) -> None:
        """Write that other secrets are in use."""
        used = SecretsInUse(signs=secret.id, accepts=secret.ids)
        event = self._state.event(EventKind.SECRET_ROTATED, secret.id, used)
        try:
            await self._state.writer.apply(Change((), (event,)))
        except StokerError as error:
            _log.warning("a change of the secret is not in the event log: %s", error.one_line)


def _author(principal: Principal, address: str, sender: _Sender) -> Author:
    if sender is _REST or principal is ANONYMOUS:
        return Author(name="", address=address)
    return Author(
        name=principal.name or principal.job_id,
        role=principal.role,
        token_id=principal.token_id,
        address=address,
    )
