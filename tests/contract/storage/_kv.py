"""What the tests of keys share: operations on one namespace, and what its watch says."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from stoker_wire.messages.control import Event, KvGet, KvItem, KvOperation, KvReply

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client

PATH = "/v1/kv/ns"


async def do(client: Client, body: KvOperation, *, key: str | None = None) -> KvReply:
    return await client.call("POST", PATH, body, reply=KvReply, idempotency_key=key)


async def read(client: Client, key: str) -> KvItem | None:
    items = (await do(client, KvGet(keys=(key,)))).items
    return items[0] if items else None


async def value_of(client: Client, key: str) -> bytes | None:
    item = await read(client, key)
    return None if item is None else item.value


async def events_of(client: Client, count: int, **query: Any) -> list[Event]:
    found: list[Event] = []
    async with aclosing(client.watch(PATH, query.pop("since", 0), query)) as events:
        async with asyncio.timeout(60):
            async for event in events:
                found.append(event)
                if len(found) == count:
                    break
    return found
