"""The supervisor of a group, in each of its members: who has died, who does not come, why all must stop.

It follows the deaths of the members' actors and the group's own keys in the control store (an abort, a
question, who has left), and looks at the member's lanes a few times a second. When one waits too long, all
are asked where they are; who has not come, or does not answer, is named. It fails all lanes of the group
at once. It exchanges no tensors, and works while the members' connections do not.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from stoker.exceptions import StokerError
from stoker.runtime import current
from stoker_train.collective.errors import Failure
from stoker_wire.errors import CompactedError
from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.control import Event, KvEntry, KvGet, KvPut, KvReply, Page
from stoker_wire.messages.events import EventKind, KvChange
from stoker_wire.messages.work import Actor

if TYPE_CHECKING:
    from stoker_train.collective.lane import Lane, Operation
    from stoker_train.collective.members import Member

_log = logging.getLogger("stoker.collective")
_TICK_S = 0.25
_ANSWER_S = (1.0, 5.0)
"""At least and at most how long members have to say where they are: a third of the limit between."""
_GRACE_S = 2.5
"""How long after a connection broke the news of a death may take."""
_CALL_S = 15.0
_RETRY_S = 0.5
_KEPT_S = 600.0
_MAX_NEWS = 10_000
_MAX_VALUE = 1000
"""Bytes of a key's value: one with more is not in the news of its change."""
_MAX_TEXT = 700
_MAX_CALL = 80
_DEATHS = f"{EventKind.ACTOR_DIED},{EventKind.ACTOR_RESTARTING}"


class Status(msgspec.Struct, frozen=True):
    """The place of a member: by label of a lane, how many operations it has begun, and which runs."""

    rank: int
    begun: dict[str, int]
    running: dict[str, str]


class Supervisor:
    """One member's view of its group. Lanes are added as they are made; ``failure`` is final."""

    def __init__(self, name: str, rank: int, *, timeout_s: float, stall_s: float) -> None:
        self.name = name
        self.rank = rank
        self.failure: Failure | None = None
        self._answer_s = min(max(timeout_s / 3, _ANSWER_S[0]), _ANSWER_S[1])
        self._stall_s = stall_s
        self._runtime = current.runtime()
        self._namespace = quote(self._runtime.job.namespace, safe="")
        self.group_id = ""
        self._prefix = ""
        self._on_request: Callable[[bytes], None] | None = None
        self._members: dict[int, Member] = {}
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._news: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_NEWS)
        self._statuses: dict[int, Status] = {}
        self._asked_s: float | None = None
        self._left: dict[int, Status] = {}
        self._broken: dict[Lane, float] = {}
        self._streams: list[asyncio.Task[None]] = []
        self._thread: threading.Thread | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._since = self._runtime.io.run(self._position(), _CALL_S)

    def start(self, group_id: str, members: Mapping[int, Member]) -> None:
        """Begin; no death since this object was made is missed."""
        self.group_id = group_id
        self._prefix = f"collective/{group_id}/"
        self._members = dict(members)
        self._runtime.io.run(self._follow_all(), _CALL_S)
        self._thread = threading.Thread(target=self._serve, name="collective-watch", daemon=True)
        self._thread.start()

    def add(self, lane: Lane) -> None:
        """Watch over a lane; one of a group that has failed already fails too."""
        with self._lock:
            self._lanes.append(lane)
            failure = self.failure
        if failure is not None:
            lane.fail(failure)

    def on_failure(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when the group fails."""
        self._on_failure.append(function)

    def on_request(self, function: Callable[[bytes], None]) -> None:
        """Hand ``function`` the value of each key ``want/RANK/...`` of this member, in the watch's thread."""
        self._on_request = function

    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Fail the group here, and have the other members told; the first reason stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            lanes = list(self._lanes)
        for lane in lanes:
            lane.fail(failure)
        for function in self._on_failure:
            function()
        self._end_streams()
        _log.warning("group %r failed: %s", self.name, failure.error().one_line)
        if tell:
            text = failure.text.encode()[:_MAX_TEXT].decode(errors="ignore")
            self.tell("abort", msgspec.structs.replace(failure, text=text, actors=()))

    def check(self) -> None:
        """Raise why the group failed, if it has."""
        if self.failure is not None:
            raise self.failure.error()

    def lost(self, lane: Lane, text: str) -> None:
        """Take note that a lane's connections failed: soon it is known why, or asked for."""
        self._post(lambda: self._on_broken(lane))

    def stalled(self) -> list[str]:
        """Return what this member waits for longest: a text for each lane with an operation that runs."""
        return [self._report(lane, one)[0] for lane, one in self._running()]

    def leave(self, timeout_s: float) -> None:
        """End it: the others are told that this member has left."""
        if self.failure is None:
            self.tell(f"left/{self.rank}", self._status())
        if self._thread is not None:
            self._news.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
        self._end_streams()

    def _end_streams(self) -> None:
        streams, self._streams = self._streams, []
        if streams and self._runtime.io.running:
            self._runtime.io.call_soon(lambda: [one.cancel() for one in streams])

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._runtime.io.running and self.failure is None:
            try:
                news = self._news.get(timeout=_TICK_S)
                if news is None:
                    return
                news()
            except queue.Empty:
                pass
            except Exception:  # of one news: the limits hold all the same
                _log.exception("group %r: news could not be read", self.name)
            self._tick(time.monotonic())

    def _post(self, news: Callable[[], None]) -> None:
        try:
            self._news.put_nowait(news)
        except queue.Full:
            _log.warning("group %r: more than %d news at once, some are lost", self.name, _MAX_NEWS)

    def _running(self) -> list[tuple[Lane, Operation]]:
        with self._lock:
            lanes = list(self._lanes)
        return [(lane, one) for lane in lanes if (one := lane.current) is not None]

    def _tick(self, now_s: float) -> None:
        for lane, operation in self._running():
            if self.failure is not None:
                return
            broken_s = self._broken.get(lane)
            waited_s = now_s - operation.began_s
            if gone := self._gone(lane):
                self.fail(self._has_left(lane, operation, gone))
            elif broken_s is not None:
                self._ask(now_s, not_before_s=broken_s)
                if now_s >= broken_s + _GRACE_S:
                    self.fail(self._cut_off(lane, operation))
            elif waited_s >= operation.limit_s - self._answer_s:
                self._ask(
                    now_s, not_before_s=operation.began_s + operation.limit_s - self._answer_s
                )
                if waited_s >= operation.limit_s:
                    self.fail(self._timed_out(lane, operation))
            elif waited_s >= (due_s := self._stall_s * (operation.reported + 1)):
                self._ask(now_s, not_before_s=operation.began_s + due_s)
                if self._asked_s is not None and now_s >= self._asked_s + self._answer_s:
                    operation.reported = int(waited_s / self._stall_s)
                    _log.warning("%s", self._report(lane, operation)[0])

    def _on_broken(self, lane: Lane) -> None:
        self._broken.setdefault(lane, time.monotonic())

    def _on_death(self, actor: Actor) -> None:
        for rank, member in self._members.items():
            if rank not in (self.rank, *self._left) and member.is_ended_by(actor):
                cause = actor.death_cause
                why = "" if cause is None else f"\n{cause.message}"
                self.fail(
                    Failure(
                        code="collective_member_lost",
                        text=f"rank {rank} of group {self.name!r} died: {member.title}{why}",
                        ranks=(rank,),
                        actors=(member.actor_id,),
                    ),
                    tell=False,  # each member hears of it by itself
                )
                return

    def _on_key(self, change: KvChange) -> None:
        what = change.key.removeprefix(self._prefix)
        if change.deleted:
            return
        if change.value is None:  # more than a watch carries
            self._runtime.io.background.spawn(self._read(change.key), name="collective key")
            return
        if what == "abort":
            self.fail(msgspec.msgpack.decode(change.value, type=Failure), tell=False)
        elif what == "ask":
            self.tell(f"at/{self.rank}", self._status())
        elif what.startswith("at/"):
            status = msgspec.msgpack.decode(change.value, type=Status)
            self._statuses[status.rank] = status
        elif what.startswith(f"want/{self.rank}/"):
            if self._on_request is not None:
                self._on_request(change.value)
        elif what.startswith("left/"):
            status = msgspec.msgpack.decode(change.value, type=Status)
            self._left[status.rank] = status

    async def _read(self, key: str) -> None:
        """Read a key whose value did not fit into its change."""
        body = KvGet(keys=(key,), wait_s=0.0)
        gcs = self._runtime.clients.gcs
        found = await gcs.call("POST", self._path, body, reply=KvReply, timeout_s=_CALL_S)
        for one in found.items:
            change = KvChange(namespace="", key=one.key, value=one.value)
            self._post(functools.partial(self._on_key, change))

    # -- who is where ----------------------------------------------------------------------------

    def _ask(self, now_s: float, *, not_before_s: float) -> None:
        """Ask all members where they are, unless that was done since."""
        if self._asked_s is None or self._asked_s < not_before_s:
            self._asked_s = now_s
            self._statuses.clear()
            self.tell("ask", self.rank)

    def _status(self) -> Status:
        with self._lock:
            lanes = list(self._lanes)
        running = {
            lane.label: str(operation.call)[:_MAX_CALL]
            for lane in lanes
            if (operation := lane.current) is not None
        }
        begun = {lane.label: lane.sequence for lane in lanes}
        status = Status(self.rank, begun, running)
        if len(msgspec.msgpack.encode(status)) > _MAX_VALUE:
            status = Status(self.rank, begun, {})
        return status

    def _gone(self, lane: Lane) -> list[int]:
        """Return the members that have left without what a lane does now."""
        return [
            rank
            for rank in lane.ranks
            if (left := self._left.get(rank)) is not None
            and left.begun.get(lane.label, 0) < lane.sequence
        ]

    def _missing(self, lane: Lane) -> tuple[dict[int, str], list[int]]:
        """Return the members that have not come, each with where it is, and those that do not answer."""
        late: dict[int, str] = {}
        silent = []
        for rank in lane.ranks:
            if rank == self.rank:
                continue
            status = self._statuses.get(rank)
            if status is None:
                if self.rank in self._statuses:  # else not even this one's own answer came back
                    silent.append(rank)
            elif (begun := status.begun.get(lane.label, 0)) < lane.sequence:
                doing = ", ".join(status.running.values())
                where = f"waits in {doing}" if doing else "is in no collective"
                late[rank] = f"has begun {begun} of them and {where}"
        return late, silent

    def _report(self, lane: Lane, operation: Operation) -> tuple[str, tuple[int, ...]]:
        """Return a text, the first line of which is a sentence, and the ranks that keep this one waiting."""
        waited_s = time.monotonic() - operation.began_s
        asked = self._asked_s is not None and self._asked_s >= operation.began_s
        late, silent = self._missing(lane) if asked else ({}, [])
        lines = [
            f"rank {self.rank} of group {self.name!r} has waited {waited_s:.1f} s in a collective",
            f"{operation.call} is #{lane.sequence} of {self._title(lane)}",
        ]
        lines += [f"rank {rank} ({self._whois(rank)}) {where}" for rank, where in late.items()]
        lines += [f"rank {rank} ({self._whois(rank)}) does not answer" for rank in silent]
        if not asked:
            lines.append("the members were not asked yet")
        elif self.rank not in self._statuses:
            lines.append("the control store does not answer: who has not come is not known")
        elif not late and not silent:
            lines.append("all members are in it: the exchange itself is slow")
        return "\n".join(lines), tuple(sorted((*late, *silent)))

    def _title(self, lane: Lane) -> str:
        return f"lane {lane.label}" if lane.label else "the group"

    def _whois(self, rank: int) -> str:
        member = self._members.get(rank)
        return "unknown" if member is None else member.title

    def _actors(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._members[rank].actor_id for rank in ranks if rank in self._members)

    def _timed_out(self, lane: Lane, operation: Operation) -> Failure:
        text, ranks = self._report(lane, operation)
        evidence = text.partition("\n")[2]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
        first = f"{who} of group {self.name!r} did not come"
        if not ranks:
            first = f"an exchange of group {self.name!r} did not end"
        return Failure(
            code="collective_timeout",
            text=f"{first} within {operation.limit_s:g} s\n{evidence}",
            ranks=ranks,
            actors=self._actors(ranks),
        )

    def _cut_off(self, lane: Lane, operation: Operation) -> Failure:
        _, silent = self._missing(lane)
        ranks = tuple(silent)
        evidence = f"{operation.call} at rank {self.rank}: {lane.broken}"
        if not ranks:
            text = f"the connections of group {self.name!r} broke\n{evidence}"
            return Failure(code="collective_failed", text=text)
        who = ", ".join(f"rank {rank} ({self._whois(rank)})" for rank in ranks)
        return Failure(
            code="collective_member_lost",
            text=f"a member of group {self.name!r} is lost\n{who} does not answer\n{evidence}",
            ranks=ranks,
            actors=self._actors(ranks),
        )

    def _has_left(self, lane: Lane, operation: Operation, gone: list[int]) -> Failure:
        return Failure(
            code="collective_failed",
            text=f"rank {gone[0]} has left group {self.name!r}\n"
            f"rank {self.rank} waited for it in {operation.call}; leave once all are done",
            ranks=tuple(gone),
            actors=self._actors(tuple(gone)),
        )

    # -- the control store -----------------------------------------------------------------------

    def tell(self, what: str, value: object) -> None:
        """Set a key of the group; nobody waits for it. The first abort stays."""
        key, encoded = f"{self._prefix}{what}", msgspec.msgpack.encode(value)

        async def put() -> None:
            body = KvPut(key=key, value=encoded, if_absent=what == "abort", ttl_s=_KEPT_S)
            try:
                await self._runtime.clients.gcs.call(
                    "POST", self._path, body, reply=KvReply, timeout_s=_CALL_S
                )
            except StokerError as error:
                _log.debug("group %r: %s was not told: %s", self.name, what, error.one_line)

        def begin() -> None:
            self._runtime.io.background.spawn(put(), name=f"collective-{what}")

        if self._runtime.io.running:
            self._runtime.io.call_soon(begin)

    @property
    def _path(self) -> str:
        return f"/v1/kv/{self._namespace}"

    async def _position(self) -> int:
        """Return where the events of actors are now."""
        page = await self._runtime.clients.gcs.call(
            "GET", "/v1/actors", reply=Page[Any], query={"limit": 1}, timeout_s=_CALL_S
        )
        return page.seq

    async def _follow_all(self) -> None:
        spawn = self._runtime.io.background.spawn
        self._streams = [
            spawn(self._follow_keys(), name="collective-keys"),
            spawn(self._follow_deaths(), name="collective-deaths"),
        ]

    async def _follow_keys(self) -> None:
        def take(event: Event) -> None:
            change = msgspec.convert(event.payload, KvChange)
            self._post(lambda: self._on_key(change))

        async def catch_up() -> int:
            gcs = self._runtime.clients.gcs
            query = {"limit": 1000, "prefix": self._prefix}
            page = await gcs.call(
                "GET", self._path, reply=Page[KvEntry], query=query, timeout_s=_CALL_S
            )
            if keys := tuple(entry.key for entry in page.items):
                body = KvGet(keys=keys, wait_s=0.0)
                found = await gcs.call("POST", self._path, body, reply=KvReply, timeout_s=_CALL_S)
                for one in found.items:
                    change = KvChange(namespace="", key=one.key, value=one.value)
                    self._post(functools.partial(self._on_key, change))
            return page.seq

        await self._follow(self._path, None, {"prefix": self._prefix}, take, catch_up)

    async def _follow_deaths(self) -> None:
        def take(event: Event) -> None:
            actor = convert_known(event.payload, Actor)
            self._post(lambda: self._on_death(actor))

        async def catch_up() -> int:
            gcs = self._runtime.clients.gcs
            seq = await self._position()
            for member in self._members.values():
                if member.actor_id:
                    path = f"/v1/actors/{member.actor_id}"
                    actor = await gcs.call("GET", path, reply=Actor, timeout_s=_CALL_S)
                    self._post(functools.partial(self._on_death, actor))
            return seq

        await self._follow("/v1/events", self._since, {"kind": _DEATHS}, take, catch_up)

    async def _follow(
        self,
        path: str,
        since: int | None,
        query: Mapping[str, object],
        take: Callable[[Event], None],
        catch_up: Callable[[], Coroutine[Any, Any, int]],
    ) -> None:
        """Hand on events until this task is cancelled; after a gap (None), what is the case now."""
        while self._runtime.io.running:
            try:
                if since is None:
                    since = await catch_up()
                async with aclosing(self._runtime.clients.gcs.watch(path, since, query)) as events:
                    async for event in events:
                        since = event.seq
                        take(event)
            except CompactedError:
                since = None
            except StokerError:
                since = None
                await asyncio.sleep(_RETRY_S)
