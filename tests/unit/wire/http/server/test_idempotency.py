"""A POST that is sent twice happens once, whether the first is finished, running or lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import IdempotencyError, UnavailableError
from stoker_wire.http.server.idempotency import MemoryStore, StoredReply
from stoker_wire.messages.common import Message, Record

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


class Add(Message):
    amount: int


class Total(Record):
    total: int


class Account:
    """Counts what happened; can be made to wait or to fail."""

    def __init__(self) -> None:
        self.total = 0
        self.failures = 0
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def add(self, req: Request) -> Total:
        self.entered.set()
        await self.go.wait()
        if self.failures:
            self.failures -= 1
            raise UnavailableError("not now")
        self.total += req.body.amount
        return Total(total=self.total)


async def _account(cluster: Cluster) -> tuple[Account, Client]:
    account, service = Account(), cluster.service()
    for path in ("/v1/add", "/v1/add/{id}"):
        service.route("POST", path, account.add, body=Add, reply=Total, summary="Add.")
    service.route(
        "POST", "/v1/each", account.add, body=Add, reply=Total, summary="Add.", idempotency=False
    )
    return account, cluster.client(await cluster.start(service))


async def _add(client: Client, key: str | None, amount: int = 1, path: str = "/v1/add") -> int:
    reply = await client.call("POST", path, Add(amount=amount), reply=Total, idempotency_key=key)
    return reply.total


async def test_the_same_key_gets_the_first_reply_again(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    assert [await _add(client, "k") for _ in range(3)] == [1, 1, 1]
    assert account.total == 1


async def test_other_keys_paths_and_no_key_happen_each(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    for key, path in (("a", "/v1/add"), ("b", "/v1/add"), ("a", "/v1/add/1"), ("a", "/v1/add/2")):
        await _add(client, key, path=path)
    await _add(client, None)
    await _add(client, None)
    assert account.total == 6


async def test_a_route_may_opt_out(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    await _add(client, "k", path="/v1/each")
    await _add(client, "k", path="/v1/each")
    assert account.total == 2


async def test_the_same_key_with_another_body_is_refused(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    await _add(client, "k", 1)
    with pytest.raises(IdempotencyError, match="another body"):
        await _add(client, "k", 2)
    assert account.total == 1


async def test_duplicates_of_a_running_request_wait_for_it(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    account.go.clear()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_add(client, "k")) for _ in range(5)]
        await account.entered.wait()
        with pytest.raises(IdempotencyError):
            await _add(client, "k", 2)
        account.go.set()
    assert [call.result() for call in calls] == [1] * 5
    assert account.total == 1


async def test_a_failed_request_may_run_again(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    account.failures = 2
    assert await _add(client, "k") == 1
    assert (account.total, client.retries) == (1, 2)


async def test_a_reader_who_left_finds_the_reply_when_it_returns(cluster: Cluster) -> None:
    account, client = await _account(cluster)
    account.go.clear()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(_add(client, "k"))
        await account.entered.wait()
        call.cancel()
    account.go.set()
    assert await _add(client, "k") == 1
    assert account.total == 1


async def test_the_store_in_memory_is_bounded_by_count_and_bytes() -> None:
    store = MemoryStore(max_replies=3, max_nbytes=10)
    for key, nbytes in (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 9)):
        assert await store.claim(key, b"f") is None
        await store.finish(key, b"f", StoredReply(200, "t", b"x" * nbytes))
    kept = {key: await store.claim(key, b"f") for key in "abcde"}
    assert {key for key, reply in kept.items() if reply is not None} == {"d", "e"}
