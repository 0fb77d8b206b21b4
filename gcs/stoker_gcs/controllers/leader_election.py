"""Leadership by compare and swap in SQL: whoever holds a name's unexpired row leads.

Used by schedulers over HTTP and by gcs replicas among themselves (``leading``). The epoch grows with
each change of holder and fences whatever the leader before still sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Clash, Insert, Update
from stoker_wire.errors import ConflictError, UnavailableError
from stoker_wire.messages.control import Leader

if TYPE_CHECKING:
    from stoker_gcs.state.records import Truth
    from stoker_gcs.store.changes import Row, Value
    from stoker_wire.messages.control import Campaign, Event

RESIGNED = 0.0
"""The expiry of a leader that gave up its term."""


class Leaders:
    """See the module."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._view: dict[str, Leader] = {}

    def observe(self, event: Event) -> None:
        """Keep the view in step with the log."""
        if event.kind == "leader.elected":
            leader = msgspec.convert(event.payload, Leader)
            known = self._view.get(leader.name)
            if known is None or leader.epoch >= known.epoch:
                self._view[leader.name] = leader

    async def load(self) -> None:
        """Fill the view from SQL."""
        for row in await self._truth.store.select(schema.LEADERS):
            self._view[row["name"]] = _leader(row)

    async def campaign(self, name: str, body: Campaign) -> Leader:
        """Lead, or go on leading; ConflictError says who leads instead.

        An expired leader may be replaced, and so may one whose URL is the caller's own: two
        processes cannot listen on it, so the one before is gone.
        """
        while True:
            row = await self._truth.store.get(schema.LEADERS, {"name": name})
            now = self._truth.now()
            mine = row is not None and row["holder"] == body.holder
            if (
                row is not None
                and not mine
                and row["expires_at_s"] > now
                and row["url"] != body.url
            ):
                raise ConflictError(
                    f"{row['holder']} at {row['url']} leads {name} for another "
                    f"{row['expires_at_s'] - now:.1f} s",
                    extra={"leader": row["url"], "epoch": row["epoch"]},
                )
            change, leader = self._won(name, body, row, now)
            try:
                await self._truth.journal.apply(change)
            except Clash:
                continue
            self._view[name] = leader
            return leader

    def _won(self, name: str, body: Campaign, row: Row | None, now: float) -> tuple[Change, Leader]:
        goes_on = (
            row is not None
            and row["holder"] == body.holder
            and row["url"] == body.url
            and row["expires_at_s"] > RESIGNED
        )
        before = 0 if row is None else int(row["epoch"])
        leader = Leader(
            name=name,
            holder=body.holder,
            url=body.url,
            epoch=before if goes_on else before + 1,
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
        events = () if goes_on else (self._truth.event("leader.elected", name, leader),)
        return Change((operation,), events), leader

    async def resign(self, name: str, holder: str) -> None:
        """Give up leadership, so that another need not wait for its end."""
        row = await self._truth.store.get(schema.LEADERS, {"name": name})
        if row is None or row["holder"] != holder:
            return
        expect = {"epoch": row["epoch"], "holder": holder}
        update = Update(schema.LEADERS, {"name": name}, {"expires_at_s": RESIGNED}, expect)
        try:
            await self._truth.journal.apply(Change((update,)))
        except Clash:
            return

    def known(self, name: str) -> Leader | None:
        """Who led when last heard of, perhaps no longer: worth a try before asking SQL."""
        return self._view.get(name)

    async def current(self, name: str) -> Leader:
        """Who leads now; UnavailableError (retryable) while nobody does."""
        row = await self._truth.store.get(schema.LEADERS, {"name": name})
        if row is None or row["expires_at_s"] <= self._truth.now():
            raise UnavailableError(
                f"no {name} leads now\n"
                f"start one with `python -m stoker_{name}`, or wait for the election if one runs"
            )
        return _leader(row)


def _leader(row: Row) -> Leader:
    return Leader(
        name=row["name"],
        holder=row["holder"],
        url=row["url"],
        epoch=row["epoch"],
        expires_at_s=row["expires_at_s"],
    )
