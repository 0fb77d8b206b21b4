"""What many may add to has a bound, whose error says what to do: keys, functions, packages, objects."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_gcs.registry.kv import quota
from stoker_wire.errors import BadRequestError, PayloadTooLargeError
from stoker_wire.messages.control import KvAdd, KvCompareSet, KvDelete, KvPut
from stoker_wire.messages.objects import CreateDetachedObject
from tests.contract.gcs_support import PATIENT, gcs, migrate
from tests.contract.storage._kv import do, value_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_wire.http.client.client import Client

SETTINGS = msgspec.structs.replace(
    PATIENT,
    kv_value_max_bytes=100,
    kv_namespace_max_bytes=250,
    kv_namespace_max_keys=4,
    blobs_max_count=3,
    blobs_max_bytes=1000,
    detached_max_count=2,
)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def client(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setattr(quota, "_AGAIN_S", 0.0)
    url = "memory://"
    if request.param != "memory":
        url = request.getfixturevalue(f"{request.param}_url")
        await migrate(url)
    async with gcs(url, settings=SETTINGS) as (_, made):
        yield made


async def test_a_namespace_has_room_for_so_many_keys_and_bytes(client: Client) -> None:
    value = bytes(100)
    for body in (KvPut(key="a", value=bytes(101)), KvCompareSet(key="a", desired=bytes(101))):
        with pytest.raises(PayloadTooLargeError, match=r"(?s)too large.*STOKER_KV_VALUE_MAX_BYTES"):
            await do(client, body)
    for _ in range(5):  # the same key again takes no room
        await do(client, KvPut(key="a", value=value))
        await do(client, KvPut(key="b", value=value, if_revision=None))
    for body in (KvPut(key="c", value=value), KvCompareSet(key="c", desired=value)):
        with pytest.raises(
            PayloadTooLargeError, match=r"(?s)namespace 'ns' is full.*200 bytes of 250"
        ):
            await do(client, body)
    with pytest.raises(PayloadTooLargeError, match="full"):
        await client.call("PUT", "/v1/kv/ns/c", value)
    await client.call("PUT", "/v1/kv/other/c", value)
    assert await value_of(client, "c") is None
    await do(client, KvDelete(key="a"))
    await do(client, KvPut(key="c", value=value))
    await do(client, KvDelete(key="c"))
    for key in ("x", "y"):
        await do(client, KvAdd(key=key))
    await do(client, KvPut(key="z"))
    with pytest.raises(PayloadTooLargeError, match="it has 4 of 4"):
        await do(client, KvAdd(key="more"))
    assert (await do(client, KvAdd(key="x"))).value == b"2", "what is there may change"
    with pytest.raises(BadRequestError, match="too long"):
        await do(client, KvPut(key="\U0001f511" * 512))


@pytest.mark.parametrize("kind", ["functions", "packages"])
async def test_the_cluster_has_room_for_so_many_functions_and_packages(
    client: Client, kind: str
) -> None:
    async def put(content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        await client.call("PUT", f"/v1/{kind}/{digest}", content)

    await put(bytes(900))
    with pytest.raises(PayloadTooLargeError, match=r"(?s)is full.*900 bytes of 1000.*KEEP_BLOBS"):
        await put(bytes(101))
    await put(b"1")
    await put(b"2")
    with pytest.raises(PayloadTooLargeError, match="it has 3 of 3"):
        await put(b"3")
    await put(b"2")


async def test_the_cluster_has_room_for_so_many_detached_objects(client: Client) -> None:
    for number in range(3):
        body = CreateDetachedObject(object_id=f"o_detached_{number}", nbytes=1, value=b"v")
        if number < 2:
            await client.call("POST", "/v1/detached-objects", body)
            continue
        with pytest.raises(PayloadTooLargeError, match="STOKER_DETACHED_MAX_COUNT"):
            await client.call("POST", "/v1/detached-objects", body)
