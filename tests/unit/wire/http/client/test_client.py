"""The client retries what may be retried, within its deadline, and says what went wrong last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    NotLeaderError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.common import Record
from stoker_wire.settings import Settings
from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster


class Answer(Record):
    tries: int


class Flaky:
    """Fails with ``error`` so many times, then answers."""

    def __init__(self, service: Service, error: StokerError | None, failures: int) -> None:
        self.error = error
        self.failures = failures
        self.tries = 0
        self.again = asyncio.Event()
        self.keys: set[str | None] = set()
        self.timeouts: list[float] = []
        service.route("POST", "/v1/flaky", self.answer, reply=Answer, summary="Flaky.")

    async def answer(self, req: Request) -> Answer:
        self.tries += 1
        if self.tries > 1:
            self.again.set()
        self.keys.add(req.idempotency_key)
        self.timeouts.append(req.timeout_s)
        if self.tries <= self.failures:
            if self.error is not None:
                raise self.error
            assert req.http.transport is not None
            req.http.transport.abort()
        return Answer(tries=self.tries)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, until a service of the test does."""
    reserved = ReservedPort()
    yield reserved.number


@pytest.mark.parametrize(
    "error", [UnavailableError("busy"), DeadlineExceededError("late"), None], ids=repr
)
async def test_two_failures_are_retried_with_one_key(
    cluster: Cluster, error: StokerError | None
) -> None:
    service = cluster.service()
    flaky = Flaky(service, error, failures=2)
    client = cluster.client(await cluster.start(service))
    reply = await client.call("POST", "/v1/flaky", reply=Answer)
    # Of a reply that was cut off on its way, the retry gets the kept copy.
    assert reply.tries == (3 if error else 1)
    assert len(flaky.keys) == 1


async def test_the_peer_is_told_a_little_less_time_than_is_left(cluster: Cluster) -> None:
    service = cluster.service()
    flaky = Flaky(service, UnavailableError("busy"), failures=1)
    client = cluster.client(await cluster.start(service))
    await client.call("POST", "/v1/flaky", timeout_s=60.0)
    assert 30.0 < flaky.timeouts[1] <= flaky.timeouts[0] <= 59.8


@pytest.mark.parametrize("error", [ConflictError("no"), NotLeaderError("not me")], ids=repr)
async def test_what_would_fail_again_is_raised_at_once(
    cluster: Cluster, error: StokerError
) -> None:
    service = cluster.service()
    flaky = Flaky(service, error, failures=9)
    client = cluster.client(await cluster.start(service))
    with pytest.raises(type(error)):
        await client.call("POST", "/v1/flaky")
    assert flaky.tries == 1


async def test_retry_can_be_forbidden(cluster: Cluster) -> None:
    service = cluster.service()
    flaky = Flaky(service, UnavailableError("busy"), failures=9)
    client = cluster.client(await cluster.start(service))
    with pytest.raises(UnavailableError, match="busy"):
        await client.call("POST", "/v1/flaky", retry=False)
    assert flaky.tries == 1


async def test_a_passed_deadline_names_method_url_tries_and_last_cause(cluster: Cluster) -> None:
    service = cluster.service()
    Flaky(service, UnavailableError("the disk is full", explain="/v1/why"), failures=10**9)
    client = cluster.client(await cluster.start(service))
    with pytest.raises(DeadlineExceededError) as caught:
        await client.call("POST", "/v1/flaky", timeout_s=0.5)
    text = str(caught.value)
    assert text.startswith(f"POST {service.url}/v1/flaky passed its deadline of 0.5 s after ")
    assert text.endswith("tries.\nlast cause: the disk is full.")
    assert caught.value.explain == "/v1/why"


async def test_the_servers_own_deadline_text_is_kept_and_comes_first(cluster: Cluster) -> None:
    service = cluster.service()
    given_s: list[float] = []

    async def wait(req: Request) -> None:
        given_s.append(req.deadline_s)
        raise DeadlineExceededError("it passed its deadline while it waited for a GPU")

    service.route("GET", "/v1/wait", wait, summary="Waits.")
    client = cluster.client(await cluster.start(service))
    with pytest.raises(DeadlineExceededError, match="while it waited for a GPU"):
        await client.call("GET", "/v1/wait", timeout_s=60, retry=False)
    assert given_s[0] <= 59.8, "the server's answer would come after the client's own deadline"


async def test_nobody_listening_is_unavailable_or_a_passed_deadline(closed_port: int) -> None:
    settings = Settings(retry_initial_s=0.001, retry_max_s=0.01)
    url = f"http://127.0.0.1:{closed_port}"
    async with Client(url, token="t", peer="p", settings=settings) as client:
        with pytest.raises(UnavailableError, match=f"GET {url}/x"):
            await client.call("GET", "/x", retry=False)
        with pytest.raises(DeadlineExceededError, match="Connect call failed"):
            await client.call("GET", "/x", timeout_s=0.5)
        with pytest.raises(UnavailableError):
            await client.ws("/x")
        with pytest.raises(UnavailableError):
            async with client.open("GET", "/x"):
                pass


@pytest.mark.parametrize("timeout_s", [10.0, 0.05])
async def test_an_error_that_is_handled_keeps_nothing_of_its_callers_alive(
    closed_port: int, timeout_s: float
) -> None:
    async def fails(client: Client) -> weakref.ref[Any]:
        held = Held()
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            # In a task of its own, as a thread of the user has it run on the loop thread.
            await asyncio.create_task(
                client.call("GET", "/v1/thing", timeout_s=timeout_s, retry=timeout_s < 1.0)
            )
        return weakref.ref(held)

    class Held:
        pass

    gc.disable()
    try:
        async with Client(f"http://127.0.0.1:{closed_port}", token="t", peer="test") as client:
            held = await fails(client)
            await asyncio.sleep(0)  # the loop itself lets go
            assert held() is None
    finally:
        gc.enable()


async def test_a_silent_peer_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client(url, token="t", peer="p") as client:
            with pytest.raises(
                DeadlineExceededError, match=r"0\.3 s after 1 try\.\nno answer came"
            ):
                await client.call("GET", "/x", timeout_s=0.3)


async def test_a_service_that_starts_late_is_waited_for(
    cluster: Cluster, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()
    pause_s = Client._pause_s

    def pause(client: Client, tries: int) -> float:
        refused.set()
        return pause_s(client, tries)

    monkeypatch.setattr(Client, "_pause_s", pause)
    service = cluster.service()
    Flaky(service, None, failures=0)
    settings = Settings(retry_initial_s=0.001, retry_max_s=0.01)
    url = f"http://127.0.0.1:{closed_port}"
    async with Client(url, token="correct-horse", peer="p", settings=settings) as client:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(client.call("POST", "/v1/flaky", reply=Answer))
            await refused.wait()
            await cluster.start(service, port=closed_port)
        assert call.result().tries == 1


async def test_a_users_own_error_leaves_an_open_response_unchanged(cluster: Cluster) -> None:
    client = cluster.client(await cluster.start(cluster.service()))
    with pytest.raises(OSError, match="disk"):
        async with client.open("GET", "/healthz"):
            raise OSError("disk full")
    async with client.open("GET", "/healthz") as response:
        assert b"ok" in await response.read()
    with pytest.raises(StokerError, match="no route"):
        async with client.open("GET", "/nothing"):
            pass


async def test_a_closed_client_stays_closed(cluster: Cluster) -> None:
    service = cluster.service()
    flaky = Flaky(service, UnavailableError("busy"), failures=10_000)
    client = cluster.client(await cluster.start(service))

    async def close_at_the_second_try() -> None:
        await flaky.again.wait()
        await client.close()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(client.call("POST", "/v1/flaky", reply=Answer, timeout_s=60))
            group.create_task(close_at_the_second_try())
    assert caught.group_contains(UnavailableError)
    with pytest.raises(UnavailableError, match="are closed"):
        await client.call("POST", "/v1/flaky", reply=Answer)
