"""The event log for readers: recent events in memory, older ones from SQL, and wake-ups.

Writers' commits arrive through :meth:`EventLog.committed`, those of other replicas by reading SQL
when they announce them, and every so often in any case. All readers (watches, long polls, the
reconciler) see the same events in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from stoker_gcs.state.numbering import GAP, Numbering, gap_of
from stoker_gcs.state.schema import META
from stoker_gcs.store.changes import Prefix
from stoker_wire.errors import CompactedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from stoker_gcs.store.protocol import Store
    from stoker_wire.messages.control import Event

RING_SIZE = 8192
POLL_S = 0.25
"""How often SQL is asked for other replicas' commits while they cannot announce them."""
ANNOUNCED_POLL_S = 1.0
"""The same while they can: an announcement may be lost, so asking never stops."""
READ_SIZE = 1000


class Announcer(Protocol):
    """The part of the ephemeral store that carries sequence numbers between replicas."""

    @property
    def subscribed(self) -> bool:
        """Whether announcements of other replicas arrive here, right now."""
        ...

    def announce(self, seq: int) -> None:
        """Announce to the other replicas that events up to ``seq`` are committed."""
        ...


class EventLog:
    """The log of one process: a ring of recent events, and the signals of those who wait for them."""

    def __init__(self, store: Store, announcer: Announcer) -> None:
        self._store = store
        self._announcer = announcer
        self._ring: deque[Event] = deque()
        self._floor = 0
        self._moved = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._behind = asyncio.Event()
        self.last = 0
        self.compacted = 0
        self.numbering = Numbering()
        self.kinds: Counter[str] = Counter()
        """How many events of each kind came since the start."""
        self.watchers = 0
        """Watches of others that follow it now."""

    async def start(self) -> None:
        """Read from SQL where the log ends, and which numbers it skips."""
        rows = await self._store.select(META, {"name": Prefix(GAP)})
        self.numbering = Numbering(gap_of(row["name"], row["value"]) for row in rows)
        self.compacted, self.last = await self._store.bounds()
        self._floor = self.last

    def committed(self, events: Sequence[Event]) -> None:
        """Take the events of a commit of this process."""
        if not events:
            return
        self._announcer.announce(events[-1].seq)
        if self._store.shared and events[0].seq != self.last + 1:
            # Another replica committed before; readers must get its events first.
            self._behind.set()
        else:
            self._advance(events)

    def notify(self, seq: int) -> None:
        """Wake the reader of SQL: another replica has committed up to ``seq``."""
        if seq > self.last:
            self._behind.set()

    async def tail(self) -> None:
        """Read what other replicas commit, until cancelled; only shared stores need it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    ANNOUNCED_POLL_S if self._announcer.subscribed else POLL_S
                ):
                    await self._behind.wait()
            self._behind.clear()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Read until nothing newer is in SQL."""
        while True:
            events = await self._store.events(self.last, READ_SIZE)
            new = [event for event in events if event.seq > self.last]
            self._advance(new)
            if len(events) < READ_SIZE:
                return

    def _advance(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._ring.extend(events)
        self.last = events[-1].seq
        while len(self._ring) > RING_SIZE:
            self._floor = self._ring.popleft().seq
        for event in events:
            self.kinds[event.kind] += 1
            for signal in self._waiting.get(event.subject, ()):
                signal.set()
        self._moved.set()
        self._moved = asyncio.Event()

    async def compact(self, keep: int, *, batch: int = READ_SIZE, pause_s: float = 0.0) -> None:
        """Forget all but the newest ``keep`` events, ``batch`` of them in a transaction."""
        upto = self.numbering.back(self.last, keep)
        while self.compacted < upto:
            before = min(upto, self.numbering.ahead(self.compacted, batch))
            await self._store.compact(before)
            self.compacted = before
            await asyncio.sleep(pause_s)

    async def read(self, since: int, limit: int = READ_SIZE) -> list[Event]:
        """Return events with ``seq > since``, at most ``limit``; CompactedError if some are gone.

        The same for a ``since`` that this log never had: the database was restored since.
        """
        if self.numbering.skips(since):
            raise CompactedError(
                f"the database was restored to before event {since}\n"
                f"list again, then watch with since={self.last}",
                extra={"compacted": self.compacted, "last": self.last},
            )
        if since >= self.last:
            return []
        self._check_kept(since)
        if since >= self._floor:
            recent = []
            for event in reversed(self._ring):
                if event.seq <= since:
                    break
                recent.append(event)
            recent.reverse()
            return recent[:limit]
        events = await self._store.events(since, limit)
        # Another replica may have forgotten some, of which this one is not told.
        self.compacted = max(self.compacted, (await self._store.bounds())[0])
        self._check_kept(since)
        # Not beyond the ring: all readers see one order.
        return [event for event in events if event.seq <= self.last]

    def _check_kept(self, since: int) -> None:
        """Raise CompactedError if events after ``since`` are gone."""
        if since < self.compacted:
            raise CompactedError(
                f"events up to {self.compacted} are gone and {since} is before\n"
                f"list again, then watch with since={self.last}",
                extra={"compacted": self.compacted, "last": self.last},
            )

    async def read_back(self, before: int, down_to: int, limit: int = READ_SIZE) -> list[Event]:
        """Return events with ``down_to < seq < before``, newest first, at most ``limit``."""
        if before > self._floor + 1 and self._ring:
            recent = [event for event in reversed(self._ring) if down_to < event.seq < before]
            if recent:
                return recent[:limit]
        events = await self._store.events_back(min(before, self.last + 1), limit)
        return [event for event in events if event.seq > down_to]

    async def wait_beyond(self, seq: int) -> None:
        """Wait until there is an event newer than ``seq``."""
        while self.last <= seq:
            await self._moved.wait()

    async def follow(self, since: int) -> AsyncIterator[list[Event]]:
        """Yield batches of events newer than ``since``, without end."""
        while True:
            await self.wait_beyond(since)
            events = await self.read(since)
            if events:
                since = events[-1].seq
                yield events

    @contextlib.contextmanager
    def signal(self, *subjects: str) -> Iterator[asyncio.Event]:
        """Yield an asyncio event that is set by each event of the log about one of ``subjects``.

        Enter before reading the state, so that no change falls between reading and waiting.
        """
        signal = asyncio.Event()
        for subject in subjects:
            self._waiting.setdefault(subject, set()).add(signal)
        try:
            yield signal
        finally:
            for subject in set(subjects):
                waiting = self._waiting[subject]
                waiting.discard(signal)
                if not waiting:
                    del self._waiting[subject]
