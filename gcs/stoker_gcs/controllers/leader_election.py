"""Leader election, and the loops of the gcs that run on its leading replica only.

Leadership is compare and swap in SQL: the holder of a name's unexpired row leads. Schedulers
campaign over HTTP, gcs replicas among themselves. The epoch grows with each change of holder and
fences whatever the previous leader still sends.

On a store that one process owns, this gcs leads at once. On a shared store the replicas campaign for
the name ``gcs``, and a replica that cannot renew in time stops its loops before another may start.
Even two leaders at once would do no harm: every write they make is a compare and swap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Insert, Update, WriteConflict
from stoker_wire.errors import ConflictError, StokerError, UnavailableError
from stoker_wire.http.client.liveness import ANSWER_S, answers
from stoker_wire.http.client.refusal import refuses_connections
from stoker_wire.messages.control import Campaign, Leader
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Row, Value
    from stoker_wire.messages.control import Event
    from stoker_wire.tls.files import TlsFiles

_log = logging.getLogger(__name__)
GCS = "gcs"
TTL_S = 2.0
STANDBY_PAUSE_S = 0.3
RESTART_S = 0.5
_LOOKUP_S = 1.0


class LeaderElection:
    """The rows of all leaders, and a view of them for lookups that need no SQL."""

    def __init__(self, state: StateStore, tls: TlsFiles) -> None:
        self._state = state
        self._tls = tls
        self._view: dict[str, Leader] = {}

    def apply_event(self, event: Event) -> None:
        """Update the view from an event of the log."""
        leader = payload_as(event, Leader)
        if leader is not None:
            known = self._view.get(leader.name)
            if known is None or leader.epoch >= known.epoch:
                self._view[leader.name] = leader

    async def load(self) -> None:
        """Fill the view from SQL."""
        for row in await self._state.store.select(schema.LEADERS):
            self._view[row["name"]] = _leader(row)

    async def campaign(self, name: str, body: Campaign) -> Leader:
        """Acquire or renew leadership; ConflictError names the present leader.

        An expired leader may be replaced if it is silent, and in any case after another ``ttl_s``: on a
        busy machine it may renew late. So may one whose host refuses connections at its URL, or whose
        URL is the caller's own: two processes cannot listen on it, so the previous one is gone.
        """
        gone, silent_at_s = "", 0.0
        while True:
            row = await self._state.store.get(schema.LEADERS, {"name": name})
            if (
                row is not None
                and row["holder"] != body.holder
                and row["url"] not in (body.url, gone)
                and row["expires_at_s"] not in (schema.RESIGNED, silent_at_s)
            ):
                left_s = row["expires_at_s"] - self._state.now()
                if left_s > 0 and await refuses_connections(row["url"]):
                    gone = row["url"]
                    continue
                if left_s > ANSWER_S or (
                    left_s > -body.ttl_s and await answers(row["url"], self._tls)
                ):
                    raise _led(row, left_s)
                # It is late with its renewal, and says nothing: as soon as it has expired it is replaced.
                silent_at_s = row["expires_at_s"]
                await asyncio.sleep(max(0.0, silent_at_s - self._state.now()))
                continue
            change, leader = self._acquired(name, body, row, self._state.now())
            try:
                await self._state.writer.apply(change)
            except WriteConflict:
                continue
            self._view[name] = leader
            return leader

    def _acquired(
        self, name: str, body: Campaign, row: Row | None, now: float
    ) -> tuple[Change, Leader]:
        before = 0 if row is None else int(row["epoch"])
        renews = (
            row is not None
            and row["holder"] == body.holder
            and row["url"] == body.url
            and row["expires_at_s"] > schema.RESIGNED
            and body.epoch <= before
        )
        leader = Leader(
            name=name,
            holder=body.holder,
            url=body.url,
            # One that has led in a later epoch knows more than a database that was replaced.
            epoch=before if renews else max(before, body.epoch) + 1,
            expires_at_s=now + body.ttl_s,
        )
        values: dict[str, Value] = {
            "holder": leader.holder,
            "url": leader.url,
            "epoch": leader.epoch,
            "expires_at_s": leader.expires_at_s,
        }
        if row is None:
            operation: Insert | Update = Insert(schema.LEADERS, {"name": name, **values})
        else:
            expect = {"epoch": before, "expires_at_s": row["expires_at_s"]}
            operation = Update(schema.LEADERS, {"name": name}, values, expect)
        events = () if renews else (self._state.event(EventKind.LEADER_ELECTED, name, leader),)
        return Change((operation,), events), leader

    async def resign(self, name: str, holder: str) -> None:
        """Resign, so that the next leader need not wait for the expiry."""
        row = await self._state.store.get(schema.LEADERS, {"name": name})
        if row is None or row["holder"] != holder:
            return
        expect = {"epoch": row["epoch"], "holder": holder}
        update = Update(schema.LEADERS, {"name": name}, {"expires_at_s": schema.RESIGNED}, expect)
        try:
            await self._state.writer.apply(Change((update,)))
        except WriteConflict:
            return

    def last_known(self, name: str) -> Leader | None:
        """Return the leader as of the events applied so far: worth a try before a read of SQL."""
        return self._view.get(name)

    async def current(self, name: str) -> Leader:
        """Return the leader from SQL; UnavailableError (retryable) while there is none.

        Where the database does not answer it is the last one known: it leads on, for nobody can be elected.
        """
        try:
            async with asyncio.timeout(_LOOKUP_S):
                row = await self._state.store.get(schema.LEADERS, {"name": name})
        except (UnavailableError, TimeoutError) as error:
            if name not in self._view:
                raise UnavailableError(
                    f"which {name} leads is not known: the database does not answer"
                ) from error
            return self._view[name]
        if row is None or row["expires_at_s"] <= self._state.now():
            raise UnavailableError(
                f"no {name} leads now\n"
                f"start one with `python -m stoker_{name}`, or wait for the election if one runs"
            )
        return _leader(row)


def _led(row: Row, left_s: float) -> ConflictError:
    until = (
        f"for another {left_s:.1f} s, unless it renews that"
        if left_s > 0
        else f"it is late with its renewal, by {-left_s:.1f} s, and answers"
    )
    return ConflictError(
        f"{row['holder']} at {row['url']} leads {row['name']}\n{until}",
        extra={
            "leader": row["url"],
            "epoch": row["epoch"],
            "ask_in_s": max(0.0, left_s - ANSWER_S),
        },
    )


class LeaderLoops:
    """The loops (name -> coroutine function) that run while this replica leads."""

    def __init__(
        self,
        election: LeaderElection,
        *,
        holder: str,
        sole_replica: bool,
        loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    ) -> None:
        self._election = election
        self._holder = holder
        self._sole_replica = sole_replica
        self._loops = loops
        self._campaigned = False
        self.leads = False

    async def run(self, url: str) -> None:
        """Lead when possible, until cancelled; ``url`` is where this replica listens."""
        while True:
            if not self._sole_replica:
                await self._acquire(url)
            try:
                async with Background("gcs-leader") as background:
                    self.leads = True
                    for name, loop in self._loops.items():
                        background.spawn(run_forever(name, loop), name=name)
                    await self._renew_until_lost(url)
            finally:
                self.leads = False

    async def resign(self) -> None:
        """Let another replica take over at once."""
        if self._campaigned:
            with contextlib.suppress(StokerError):
                await self._election.resign(GCS, self._holder)

    async def _acquire(self, url: str) -> None:
        while True:
            try:
                await self._campaign(url)
            except ConflictError:
                await asyncio.sleep(STANDBY_PAUSE_S)
            except StokerError as error:
                _log.warning("cannot campaign: %s", error)
                await asyncio.sleep(TTL_S / 3)
            else:
                return

    async def _renew_until_lost(self, url: str) -> None:
        if self._sole_replica:
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        renew_by = loop.time() + TTL_S * 2 / 3
        while loop.time() < renew_by:
            await asyncio.sleep(TTL_S / 4)
            sent_at_s = loop.time()
            try:
                async with asyncio.timeout_at(renew_by):
                    await self._campaign(url)
            except ConflictError:
                return
            except (StokerError, TimeoutError):
                continue
            renew_by = sent_at_s + TTL_S * 2 / 3

    async def _campaign(self, url: str) -> None:
        self._campaigned = True
        body = Campaign(holder=self._holder, url=url, ttl_s=TTL_S)
        await self._election.campaign(GCS, body)


async def run_forever(name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop that must not end; when it fails (say, the database is away), start it again."""
    while True:
        try:
            await loop()
        except StokerError as error:
            _log.warning("the loop %s waits: %s", name, error)
        except Exception:
            _log.exception("the loop %s failed and starts again", name)
        await asyncio.sleep(RESTART_S)


def _leader(row: Row) -> Leader:
    return Leader(
        name=row["name"],
        holder=row["holder"],
        url=row["url"],
        epoch=row["epoch"],
        expires_at_s=row["expires_at_s"],
    )
