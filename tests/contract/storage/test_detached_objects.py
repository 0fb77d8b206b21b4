"""Detached objects in the gcs, on every store: names, quota, copies, and who may free what."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_wire.errors import (
    BadRequestError,
    NameTakenError,
    NotFoundError,
    ObjectLostError,
    PayloadTooLargeError,
    UnavailableError,
)
from stoker_wire.http.principals import GCS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.service import Service
from stoker_wire.messages.control import Page
from stoker_wire.messages.objects import (
    CACHE_NAMESPACE,
    AdoptedObjects,
    AdoptObjects,
    CommitDetachedObject,
    CreateDetachedObject,
    DetachedObject,
    DetachedState,
    LocatedObject,
    LocateObject,
    ObjectInfo,
    PullObject,
    ReportDetachedObjects,
    UnknownObjects,
)
from stoker_wire.settings import Settings
from tests.contract.gcs_support import PATIENT, TOKEN, a_node, eventually, gcs, migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.request import Request

SETTINGS = msgspec.structs.replace(PATIENT, detached_max_bytes=1000, keep_cache_s=3600.0)
STORES = ("memory", "sqlite", "postgres")


class FakeNode:
    """A nodelet as the gcs asks it: what it has, what it keeps on disk, and whether it answers."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.on_disk: set[str] = set()
        self.full = False

    async def adopt(self, req: Request) -> AdoptedObjects:
        body: AdoptObjects = req.body
        here = [i for i in body.object_ids if i in self.has]
        if body.disk:
            if self.full:
                raise UnavailableError("the disk is full")
            self.on_disk |= set(here)
        return AdoptedObjects(objects=tuple(ObjectInfo(object_id=i, nbytes=9) for i in here))

    async def pull(self, req: Request) -> ObjectInfo:
        self.has.add(req.path["id"])
        return ObjectInfo(object_id=req.path["id"], nbytes=9)


ROUTES = (
    Route(
        "POST",
        "/v1/objects/adopt",
        FakeNode.adopt,
        body=AdoptObjects,
        reply=AdoptedObjects,
        roles=GCS,
        summary="Adopt",
    ),
    Route(
        "POST",
        "/v1/objects/{id}/pull",
        FakeNode.pull,
        body=PullObject,
        reply=ObjectInfo,
        roles=GCS,
        summary="Pull",
    ),
)


@contextlib.asynccontextmanager
async def node(client: Client, name: str) -> AsyncIterator[FakeNode]:
    """A node of the cluster, alive until the end of the block."""
    made = FakeNode()
    service = Service("nodelet", Settings(), token=TOKEN)
    service.add_routes(ROUTES, made)
    await service.start("127.0.0.1", 0)
    service.ready()
    body = msgspec.structs.replace(a_node(name), url=service.url)
    reply = await client.call("POST", "/v1/nodes", body, reply=dict[str, Any])
    try:
        yield made
    finally:
        await client.call("POST", f"/v1/nodes/{name}/leave", {"incarnation": reply["incarnation"]})
        await service.stop(0.0)


async def create(client: Client, object_id: str, **more: Any) -> DetachedObject:
    body = CreateDetachedObject(object_id=object_id, **{"nbytes": 9, **more})
    return await client.call("POST", "/v1/detached-objects", body, reply=DetachedObject)


async def commit(client: Client, object_id: str, node_id: str) -> DetachedObject:
    path = f"/v1/detached-objects/{object_id}/commit"
    body = CommitDetachedObject(node_id=node_id)
    return await client.call("POST", path, body, reply=DetachedObject)


async def locate(client: Client, object_id: str, without: str = "") -> LocatedObject:
    path = f"/v1/detached-objects/{object_id}/locate"
    body = LocateObject(without=without)
    return await client.call("POST", path, body, reply=LocatedObject, retry=False)


async def record(client: Client, object_id: str) -> DetachedObject:
    return await client.call("GET", f"/v1/detached-objects/{object_id}", reply=DetachedObject)


async def free(client: Client, object_id: str) -> None:
    await client.call("DELETE", f"/v1/detached-objects/{object_id}")


@pytest.fixture(params=STORES)
async def serving(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Running, Client]]:
    """A gcs on each store."""
    url = "memory://"
    if request.param != "memory":
        url = request.getfixturevalue(f"{request.param}_url")
        await migrate(url)
    async with gcs(url, settings=SETTINGS) as both:
        yield both


@pytest.fixture
def there(serving: tuple[Running, Client]) -> Client:
    return serving[1]


async def test_a_value_in_the_gcs_is_there_until_it_is_freed(there: Client) -> None:
    made = await create(there, "o_detached_1", name="x", value=b"value")
    assert (made.state, made.inline) == (DetachedState.READY, True)
    assert await create(there, "o_detached_1", name="x", value=b"value") == made, "asked again"
    assert (await locate(there, "o_detached_1")).value == b"value"
    with pytest.raises(NameTakenError, match="o_detached_1"):
        await create(there, "o_detached_2", name="x", value=b"other")
    await create(there, "o_detached_3", name="x", namespace="other", value=b"other")
    page = await there.call(
        "GET", "/v1/detached-objects", reply=Page[DetachedObject], query={"name": "x"}
    )
    assert {one.object_id for one in page.items} == {"o_detached_1", "o_detached_3"}
    await free(there, "o_detached_1")
    for missing in (locate(there, "o_detached_1"), free(there, "o_detached_1")):
        with pytest.raises(NotFoundError):
            await missing
    await create(there, "o_detached_2", name="x", value=b"other")


async def test_the_quota_counts_copies_and_what_is_freed_no_more(there: Client) -> None:
    await create(there, "o_detached_1", nbytes=400, copies=2)
    with pytest.raises(PayloadTooLargeError, match="800 of 1000 bytes are in use"):
        await create(there, "o_detached_2", nbytes=201)
    await create(there, "o_detached_3", nbytes=200)
    await free(there, "o_detached_1")
    await create(there, "o_detached_2", nbytes=800)


async def test_what_was_reserved_by_a_job_that_has_ended_is_reserved_anew(there: Client) -> None:
    await create(there, "o_detached_1", job_id="job_gone", namespace=CACHE_NAMESPACE, name="key")
    made = await create(there, "o_detached_1", nbytes=7, namespace=CACHE_NAMESPACE, name="key")
    assert (made.job_id, made.nbytes) == ("", 7)


@pytest.mark.parametrize(
    "body",
    [
        {"object_id": "x", "nbytes": 1},
        {"object_id": "o_1", "nbytes": -1},
        {"object_id": "o_1", "nbytes": 1, "copies": 0},
        {"object_id": "o_1", "nbytes": 1, "name": "/x"},
    ],
)
async def test_bad_requests_name_the_field(there: Client, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        await there.call("POST", "/v1/detached-objects", body)
    assert caught.value.field in body


async def test_copies_are_made_and_made_again_when_nodes_die(there: Client) -> None:
    async with node(there, "n_1") as first, node(there, "n_2") as second:
        await create(there, "o_detached_1", copies=2)
        with pytest.raises(UnavailableError, match="is being written"):
            await locate(there, "o_detached_1")
        first.has.add("o_detached_1")
        done = await commit(there, "o_detached_1", "n_1")
        assert done.nodes == ("n_1", "n_2") and second.has == {"o_detached_1"}
        sources = (await locate(there, "o_detached_1")).sources
        assert {one.node_id for one in sources} == {"n_1", "n_2"}
        async with node(there, "n_3") as third:
            second.has.clear()  # as if it was evicted by mistake
            found = await locate(there, "o_detached_1", without="n_2")
            assert {one.node_id for one in found.sources} >= {"n_1"} and len(found.sources) == 2
            third.has.add("o_detached_1")
            first.has.clear()
            second.has.clear()
            found = await locate(there, "o_detached_1", without="n_1")
            assert "n_3" in found.object.nodes, "any node may have it"


async def test_what_no_node_has_is_lost_until_one_comes_back_with_it(there: Client) -> None:
    async with node(there, "n_1") as first:
        await create(there, "o_detached_1", disk=True)
        first.has.add("o_detached_1")
        await commit(there, "o_detached_1", "n_1")
        assert first.on_disk == {"o_detached_1"}
    with pytest.raises(ObjectLostError, match=r"node n_1 .* is dead"):
        await locate(there, "o_detached_1")
    assert (await record(there, "o_detached_1")).state is DetachedState.LOST
    async with node(there, "n_4"):
        body = ReportDetachedObjects(object_ids=("o_detached_1", "o_detached_gone"))
        reply = await there.call(
            "POST", "/v1/nodes/n_4/detached-objects", body, reply=UnknownObjects
        )
        assert reply.object_ids == ("o_detached_gone",)
        assert (await record(there, "o_detached_1")).nodes == ("n_4",)


async def test_a_copy_that_finds_no_disk_is_none(there: Client) -> None:
    async with node(there, "n_1") as first, node(there, "n_2") as second:
        first.has.add("o_detached_1")
        second.full = True
        await create(there, "o_detached_1", disk=True, copies=2)
        assert (await commit(there, "o_detached_1", "n_1")).nodes == ("n_1",)
        second.full = False

        async def copied() -> bool:
            return (await record(there, "o_detached_1")).nodes == ("n_1", "n_2")

        await eventually(copied, "the controller has tried again")


async def test_the_controller_frees_what_is_over_and_makes_copies(
    serving: tuple[Running, Client],
) -> None:
    running, client = serving
    async with node(client, "n_1") as first:
        await create(client, "o_detached_1", job_id="job_gone", name="half")

        async def gone(object_id: str) -> bool:
            try:
                await record(client, object_id)
            except NotFoundError:
                return True
            return False

        await eventually(lambda: gone("o_detached_1"), "its maker's job is not there")
        first.has.add("o_detached_2")
        await create(client, "o_detached_2", copies=2)
        assert (await commit(client, "o_detached_2", "n_1")).nodes == ("n_1",)
        async with node(client, "n_2"):

            async def copied() -> bool:
                return (await record(client, "o_detached_2")).nodes == ("n_1", "n_2")

            await eventually(copied, "a node that came later has a copy")
        await create(client, "o_detached_3", namespace=CACHE_NAMESPACE, value=b"v")
        running.app.objects._keep_cache_s = 0.01
        await eventually(lambda: gone("o_detached_3"), "the cache forgets it")
