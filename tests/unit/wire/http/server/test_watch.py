"""A watch never misses an event, tells its cursor while quiet, and ends when it should."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_wire.errors import CompactedError, NodeDiedError, StokerError, UnavailableError
from stoker_wire.http.server.service import bytes_response, stream_response, watch_response
from stoker_wire.messages.control import Event, LogLine
from stoker_wire.messages.events import EventQuery
from tests.unit.wire.conftest import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster


def event(seq: int, kind: str = "node.registered") -> Event:
    return Event(seq=seq, at_s=0.0, kind=kind, subject=f"n_{seq}", payload={"n": seq})


class Log:
    """An event log that can be appended to, cut, and made to fail."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.oldest = 0
        self.readers = 0
        self.reading = asyncio.Event()
        self.left = asyncio.Event()
        self.asked: list[int] = []
        self.error_at: dict[int, Exception] = {}
        self.changed = asyncio.Event()

    def append(self, *events: Event) -> None:
        self.events += events
        self.changed.set()
        self.changed = asyncio.Event()

    async def watch(self, req: Request) -> web.StreamResponse:
        since = req.query.since
        self.asked.append(since)
        if since < self.oldest:
            raise CompactedError(f"events before {self.oldest} are gone")
        return await watch_response(req, self.read(since), since=since)

    async def read(self, since: int) -> AsyncIterator[Event]:
        self.readers += 1
        self.reading.set()
        try:
            at = 0
            while True:
                changed = self.changed
                for entry in self.events[at:]:
                    at += 1
                    if entry.seq > since:
                        error = self.error_at.pop(entry.seq, None)
                        if error is not None:
                            raise error
                        yield entry
                await changed.wait()
        finally:
            self.readers -= 1
            self.left.set()


async def _log(cluster: Cluster) -> tuple[Log, Service, Client]:
    log, service = Log(), cluster.service(bookmark_s=0.02)
    service.route(
        "GET", "/v1/events", log.watch, query=EventQuery, reply=Event, stream=True, summary="Watch."
    )
    await cluster.start(service)
    return log, service, cluster.client(service)


async def _take(client: Client, count: int, since: int = 0) -> list[int]:
    seqs: list[int] = []
    async with aclosing(client.watch("/v1/events", since, {"kind": "node."})) as events:
        async for entry in events:
            seqs.append(entry.seq)
            if len(seqs) == count:
                break
    return seqs


async def test_events_come_in_order_from_the_cursor_on(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(*(event(seq) for seq in range(1, 6)))
    assert await _take(client, 3, since=2) == [3, 4, 5]


async def test_events_that_happen_while_watching_arrive(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    async with asyncio.TaskGroup() as group:
        taken = group.create_task(_take(client, 2))
        await log.reading.wait()
        log.append(event(1))
        log.append(event(2))
    assert taken.result() == [1, 2]


async def test_a_watch_of_a_list_outlives_the_deadline_of_requests(cluster: Cluster) -> None:
    log, service = Log(), cluster.service(bookmark_s=0.02, request_timeout_s=0.1)
    service.route("GET", "/v1/events", log.watch, query=EventQuery, summary="List or watch.")
    await cluster.start(service)
    stream = cluster.client(service).stream("/v1/events", item=Event, query={"watch": 1})
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(40), aclosing(stream) as events:
        after_s = loop.time() + 0.3
        async for entry in events:
            if entry.kind != "bookmark":
                break
            if loop.time() > after_s and not log.events:
                log.append(event(1))
    assert (entry.seq, log.asked) == (1, [0])


async def test_a_broken_watch_resumes_from_the_last_event(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(*(event(seq) for seq in range(1, 5)))
    log.error_at = {3: UnavailableError("cut"), 4: ConnectionResetError("cut")}
    assert await _take(client, 4) == [1, 2, 3, 4]
    assert log.asked == [0, 2, 3]


async def test_bookmarks_move_the_cursor_and_are_not_shown(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(event(1), event(7, "bookmark"), event(8))
    log.error_at = {8: UnavailableError("cut")}
    assert await _take(client, 2) == [1, 8]
    assert log.asked == [0, 7]


@pytest.mark.parametrize("how", ["ends", "fails"])
async def test_a_source_that_ends_as_its_reader_leaves_logs_nothing(
    cluster: Cluster, how: str
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    left = asyncio.Event()

    async def source() -> AsyncIterator[Event]:
        try:
            yield event(1)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "fails":
                raise UnavailableError("too late") from None
            return  # as sources do that close what they read from
        finally:
            left.set()

    service = cluster.service(bookmark_s=0.02)
    service.route(
        "GET",
        "/v1/events",
        lambda req: watch_response(req, source()),
        query=EventQuery,
        reply=Event,
        stream=True,
        summary="Watch.",
    )
    await cluster.start(service)
    assert await _take(cluster.client(service), 1) == [1]
    await asyncio.wait_for(left.wait(), 30)
    await service.stop()
    gc.collect()
    assert not complaints


async def test_a_reader_that_left_before_its_answer_is_no_crash(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(req: Request) -> Any:
        asked.set()
        await left.wait()
        while req.http.transport and not req.http.transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            return await stream_response(req, _nothing())
        finally:
            answered.set()

    service = cluster.service()
    complaints: list[str] = []
    monkeypatch.setattr(
        service.dispatcher.log, "error", lambda event, **_: complaints.append(event)
    )
    service.route("GET", "/v1/logs", slow, reply=LogLine, stream=True, summary="Logs.")
    await cluster.start(service)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(
        f"GET /v1/logs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    )
    await asyncio.wait_for(asked.wait(), 30)
    writer.transport.abort()
    left.set()
    await asyncio.wait_for(answered.wait(), 30)
    await asyncio.wait_for(service.dispatcher.idle.wait(), 30)
    assert complaints == []


async def _nothing() -> AsyncIterator[LogLine]:
    for line in ():
        yield line


async def test_a_quiet_watch_sends_bookmarks_with_its_cursor(cluster: Cluster) -> None:
    log, service, client = await _log(cluster)
    log.append(event(5))
    async with client.session.get(f"{service.url}/v1/events?watch=1&since=4") as reply:
        assert reply.content_type == "application/x-ndjson"
        lines = [msgspec.json.decode(await reply.content.readline(), type=Event) for _ in range(3)]
    assert [(line.seq, line.kind) for line in lines] == [
        (5, "node.registered"),
        (5, "bookmark"),
        (5, "bookmark"),
    ]


async def test_a_browser_gets_server_sent_events(cluster: Cluster) -> None:
    log, service, client = await _log(cluster)
    log.append(event(5))
    async with client.session.get(
        f"{service.url}/v1/events?watch=1", headers={"Accept": "text/event-stream"}
    ) as reply:
        assert reply.content_type == "text/event-stream"
        assert await reply.content.readline() == b"id: 5\n"
        assert await reply.content.readline() == b"event: node.registered\n"
        data = await reply.content.readline()
    assert msgspec.json.decode(data.removeprefix(b"data: "), type=Event) == event(5)


async def test_a_compacted_cursor_is_410(cluster: Cluster) -> None:
    log, service, client = await _log(cluster)
    log.oldest = 10
    with pytest.raises(CompactedError, match="before 10"):
        await _take(client, 1, since=3)
    async with client.session.get(f"{service.url}/v1/events?watch=1") as reply:
        assert reply.status == 410


async def test_compaction_in_mid_stream_reaches_the_reader(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(event(1), event(2))
    log.error_at = {2: CompactedError("too slow", extra={"oldest": 9})}
    with pytest.raises(CompactedError) as caught:
        await _take(client, 2)
    assert caught.value.extra == {"oldest": 9}


async def test_a_lost_peer_behind_the_source_is_no_reader_that_left(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(event(1))
    log.error_at = {1: NodeDiedError("the node that told is gone")}  # also a ConnectionError
    with pytest.raises(NodeDiedError, match="that told"):
        await _take(client, 1)


async def test_a_crash_in_mid_stream_tells_no_secret(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(event(1))
    log.error_at = {1: ZeroDivisionError("secret")}
    with pytest.raises(StokerError) as caught:
        await _take(client, 1)
    assert (caught.value.code, "secret" in str(caught.value)) == ("internal", False)


async def test_the_source_is_closed_when_the_reader_leaves(cluster: Cluster) -> None:
    log, _, client = await _log(cluster)
    log.append(event(1))
    assert await _take(client, 1) == [1]
    await log.left.wait()
    assert log.readers == 0


async def test_a_watch_ends_when_the_service_stops(cluster: Cluster) -> None:
    log, service, client = await _log(cluster)
    async with client.session.get(f"{service.url}/v1/events?watch=1") as reply:
        await service.stop(grace_s=5)
        assert log.readers == 0
        await reply.read()


async def test_plain_lines_can_be_streamed_and_end(cluster: Cluster) -> None:
    service = cluster.service()
    long = "x" * 300_000

    async def lines() -> AsyncIterator[LogLine]:
        for number, text in enumerate(("one", long, "three")):
            yield LogLine(node_id="n", worker_id="w", pid=1, name="f", text=text, cursor=number)

    async def logs(req: Request) -> Any:
        return await stream_response(req, lines())

    service.route("GET", "/v1/logs", logs, reply=LogLine, stream=True, summary="Logs.")
    client = cluster.client(await cluster.start(service))
    texts = [line.text async for line in client.stream("/v1/logs", item=LogLine)]
    assert texts == ["one", long, "three"]


@pytest.mark.parametrize(
    "error", [UnavailableError("the node was silent"), ConnectionResetError("its peer is gone")]
)
async def test_bytes_that_are_cut_off_are_not_taken_for_a_whole_body(
    cluster: Cluster, error: Exception
) -> None:
    service = cluster.service()

    async def parts() -> AsyncIterator[bytes]:
        yield b"half of "
        raise error

    async def archive(req: Request) -> Any:
        return await bytes_response(req, parts(), "application/x-tar")

    service.route("GET", "/v1/archive", archive, stream=True, summary="Get the archive.")
    client = cluster.client(await cluster.start(service))
    with pytest.raises(UnavailableError, match="got no answer"):
        async with client.open("GET", "/v1/archive") as response:
            await response.read()
