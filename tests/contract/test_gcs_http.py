"""The gcs over real HTTP: each route's promise, with a fake scheduler where placement is needed."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_wire.errors import (
    BadRequestError,
    CompactedError,
    ConflictError,
    FencedError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import (
    ClusterResources,
    Device,
    Heartbeat,
    Link,
    Node,
    NodeState,
    RegisteredNode,
)
from stoker_wire.messages.control import (
    Campaign,
    CreateToken,
    Event,
    KvEntry,
    Leader,
    Page,
    Token,
)
from tests.contract.gcs_support import (
    PATIENT,
    TOKEN,
    a_node,
    attach,
    eventually,
    gcs,
    register,
    scheduler,
)
from tests.services import ReservedPort

if TYPE_CHECKING:
    from stoker_gcs.service import Running


async def test_only_a_known_token_comes_in(served: tuple[Running, Client]) -> None:
    running, client = served
    async with Client(running.url, token="wrong", peer="test") as stranger:
        with pytest.raises(UnauthorizedError):
            await stranger.call("GET", "/v1/nodes", reply=Page[Node])
    body = CreateToken(name="ci", expires_in_s=60)
    made = await client.call("POST", "/v1/tokens", body, reply=Token, idempotency_key="k1")
    again = await client.call("POST", "/v1/tokens", body, reply=Token, idempotency_key="k1")
    assert made == again
    assert made.secret
    listed = await client.call("GET", "/v1/tokens", reply=Page[Token])
    assert [token.secret for token in listed.items] == [""]
    async with Client(running.url, token=made.secret, peer="ci") as friend:
        await friend.call("GET", "/v1/nodes", reply=Page[Node])
        await client.call("DELETE", f"/v1/tokens/{made.token_id}", reply=Token)

        async def refused() -> bool:
            try:
                await friend.call("GET", "/v1/nodes", reply=Page[Node])
            except UnauthorizedError:
                return True
            return False

        await eventually(refused, "the revoked token is refused")


async def test_a_quarantined_gpu_is_reported_by_a_heartbeat(stored: Client) -> None:
    gpu = Device(index=0, uuid="GPU-a", name="NVIDIA H100", links={1: Link.NVLINK})
    body = msgspec.structs.replace(
        a_node(), devices=(gpu,), driver_version="550.90.07", gpu_error="GPU 1 does not work"
    )
    node = await stored.call("POST", "/v1/nodes", body, reply=RegisteredNode)
    found = await stored.call("GET", "/v1/nodes/n_1", reply=Node)
    assert (found.devices, found.driver_version) == ((gpu,), "550.90.07")
    assert found.gpu_error == "GPU 1 does not work"
    stuck = msgspec.structs.replace(gpu, quarantine="the driver reported XID 79")
    for devices in ((stuck,), None, (stuck,), (gpu,)):
        beat = Heartbeat(incarnation=node.incarnation, devices=devices)
        await stored.call("POST", "/v1/nodes/n_1/heartbeat", beat)
        found = await stored.call("GET", "/v1/nodes/n_1", reply=Node)
        assert found.devices == (devices or (stuck,))
    page = await stored.call("GET", "/v1/events", query={"kind": "gpu."}, reply=Page[Event])
    assert [one.kind for one in page.items] == ["gpu.quarantined", "gpu.released"]
    assert {one.subject for one in page.items} == {"n_1"}
    with pytest.raises(NotFoundError, match="no node 'n_9'"):
        await stored.call("POST", "/v1/nodes/n_9/gpus/0/release")


async def test_a_node_registers_beats_falls_silent_and_comes_back(sqlite_url: str) -> None:
    impatient = msgspec.structs.replace(PATIENT, suspect_after_s=1.0, dead_after_s=3.0)
    async with gcs(sqlite_url, settings=impatient) as (_, client):
        await _lives_and_dies(client)


async def _lives_and_dies(client: Client) -> None:
    first = await register(client)
    beat = Heartbeat(incarnation=first.incarnation, usage={"cpu_percent": 12.0})

    async def state_is(state: NodeState) -> bool:
        return (await client.call("GET", "/v1/nodes/n_1", reply=Node)).state is state

    async def beats() -> bool:
        await client.call("POST", "/v1/nodes/n_1/heartbeat", beat)
        return await state_is(NodeState.ALIVE)

    # Each time again, if this machine stands still for so long in between that it is SUSPECT by then.
    await eventually(beats, "a heartbeat keeps it ALIVE")
    node = await client.call("GET", "/v1/nodes/n_1", reply=Node)
    assert node.usage == {"cpu_percent": 12.0}
    await eventually(lambda: state_is(NodeState.SUSPECT), "silence makes it SUSPECT")
    await eventually(beats, "a heartbeat makes it ALIVE again")
    await eventually(lambda: state_is(NodeState.DEAD), "longer silence makes it DEAD")
    with pytest.raises(FencedError, match="declared dead"):
        await client.call("POST", "/v1/nodes/n_1/heartbeat", beat)
    second = await register(client)
    assert second.incarnation == first.incarnation + 1
    with pytest.raises(FencedError, match="is at incarnation 2"):
        await client.call("POST", "/v1/nodes/n_1/heartbeat", beat)
    leave = {"incarnation": second.incarnation}
    for _ in range(2):
        await client.call("POST", "/v1/nodes/n_1/leave", leave)
    assert await state_is(NodeState.DEAD)
    events = (await client.call("GET", "/v1/events", reply=Page[Event])).items
    story = " ".join(event.kind.removeprefix("node.") for event in events)
    assert re.fullmatch(
        "registered (suspected recovered )+suspected died registered (suspected )?died", story
    )


async def test_a_node_whose_host_refuses_connections_is_dead_at_once(sqlite_url: str) -> None:
    settings = msgspec.structs.replace(PATIENT, suspect_after_s=1.0, dead_after_s=3600.0)
    refusing = ReservedPort()
    async with gcs(sqlite_url, settings=settings) as (_, client):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            urls = {
                "n_1": f"http://127.0.0.1:{refusing}",
                "n_2": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "n_3": "http://n-3.invalid:9",
            }
            for node_id, url in urls.items():
                await client.call("POST", "/v1/nodes", a_node(node_id, url), reply=RegisteredNode)

            async def states() -> list[str]:
                page = await client.call("GET", "/v1/nodes", reply=Page[Node])
                return [node.state.value for node in page.items]

            async def is_settled() -> bool:
                return await states() == ["DEAD", "SUSPECT", "SUSPECT"]

            await eventually(is_settled, "silence alone is no death")
            for _ in range(10):  # nor is it after more probes
                await asyncio.sleep(0.1)
                assert await is_settled()
            node = await client.call("GET", "/v1/nodes/n_1", reply=Node)
            assert node.reason == f"its host refuses connections at {urls['n_1']}"


async def test_a_port_that_outlives_the_connections_of_its_nodelet_is_probed_again(
    sqlite_url: str,
) -> None:
    settings = msgspec.structs.replace(PATIENT, suspect_after_s=3600.0, dead_after_s=7200.0)
    async with gcs(sqlite_url, settings=settings) as (running, client):
        probed = asyncio.Event()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            probed.set()

        listens = await asyncio.start_server(accept, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listens.sockets[0].getsockname()[1]}"
        async with Client(running.url, token=TOKEN, peer="nodelet n_1") as nodelet:
            await nodelet.call("POST", "/v1/nodes", a_node("n_1", url), reply=RegisteredNode)

        async def state_is(state: NodeState) -> bool:
            return (await client.call("GET", "/v1/nodes/n_1", reply=Node)).state is state

        async with asyncio.timeout(40):
            await probed.wait()
        assert await state_is(NodeState.ALIVE), "somebody listens there"
        listens.close()
        await eventually(lambda: state_is(NodeState.DEAD), "nobody listens there any more")


async def test_a_url_in_use_by_a_living_node_is_refused_with_the_fix(sqlite_url: str) -> None:
    url = "http://10.0.0.7:7620"
    async with gcs(sqlite_url) as (_, client):
        first = a_node("n_1", url)
        for incarnation in (1, 2):  # the node itself may register again
            told = await client.call("POST", "/v1/nodes", first, reply=RegisteredNode)
            assert told.incarnation == incarnation
        with pytest.raises(ConflictError, match=r"(?s)n_1.*STOKER_ADVERTISE_HOST.*STOKER_PORT"):
            await client.call("POST", "/v1/nodes", a_node("n_2", url), reply=RegisteredNode)
        await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": 2})
        told = await client.call("POST", "/v1/nodes", a_node("n_2", url), reply=RegisteredNode)
        assert (told.node_id, told.incarnation) == ("n_2", 1)
    async with gcs(sqlite_url) as (_, client):
        # Nobody is taken for silent by a gcs that could not hear it.
        with pytest.raises(ConflictError, match="n_2"):
            await client.call("POST", "/v1/nodes", a_node("n_3", url), reply=RegisteredNode)


async def test_a_node_that_was_killed_and_started_again_gets_its_url_back(
    sqlite_url: str,
) -> None:
    # It need not wait until its former life is declared dead.
    settings = msgspec.structs.replace(PATIENT, suspect_after_s=0.4, dead_after_s=3600.0)
    url = "http://10.0.0.7:7620"
    async with gcs(sqlite_url, settings=settings) as (_, client):
        await client.call("POST", "/v1/nodes", a_node("n_1", url), reply=RegisteredNode)

        async def admitted() -> bool:
            try:
                await client.call("POST", "/v1/nodes", a_node("n_2", url), reply=RegisteredNode)
            except ConflictError:
                return False
            return True

        await eventually(admitted, "the URL of a silent node is free")
        old = await client.call("GET", "/v1/nodes/n_1", reply=Node)
        assert old.state is NodeState.DEAD
        assert "n_2 registered at its URL" in old.reason
        with pytest.raises(FencedError):
            await client.call("POST", "/v1/nodes/n_1/heartbeat", Heartbeat(incarnation=1))


async def test_what_a_node_has_compiled_is_told_once_and_kept(client: Client) -> None:
    node = msgspec.structs.replace(a_node("n_1"), warm_kernels=("old",))
    told = await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)
    page = await client.call("GET", "/v1/nodes", reply=Page[Node])
    assert page.items[0].warm_kernels == ("old",)

    async def beat(*warm: str, incarnation: int = told.incarnation) -> None:
        body = Heartbeat(incarnation=incarnation, warm_kernels=warm or None)
        await client.call("POST", "/v1/nodes/n_1/heartbeat", body)

    await beat("old")
    await beat()  # as told before
    await beat("old", "new")
    await beat("old", "new")
    events = await client.call(
        "GET", "/v1/events", reply=Page[Event], query={"since": page.seq, "kind": "node.warmed"}
    )
    assert [event.payload["warm_kernels"] for event in events.items] == [["old", "new"]]
    assert (await client.call("GET", "/v1/nodes/n_1", reply=Node)).warm_kernels == ("old", "new")
    with pytest.raises(BadRequestError, match="warm_kernels"):
        await beat(*(f"k{index}" for index in range(65)))
    with pytest.raises(FencedError):
        await beat("late", incarnation=told.incarnation + 1)


async def test_one_scheduler_leads_at_a_time(client: Client) -> None:
    with pytest.raises(UnavailableError, match="python -m stoker_scheduler"):
        await client.call("GET", "/v1/leaders/scheduler", reply=Leader, retry=False)

    async def campaign(holder: str, ttl_s: float = 30.0) -> Leader:
        body = Campaign(holder=holder, url=f"http://{holder}", ttl_s=ttl_s)
        return await client.call("POST", "/v1/leaders/scheduler", body, reply=Leader)

    first = await campaign("a")
    node = a_node("n_1", "http://10.0.0.7:7620")
    told = await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)
    assert told.epoch == first.epoch  # a node that registers hears who leads
    with pytest.raises(ConflictError, match="a at http://a leads") as caught:
        await campaign("b")
    assert caught.value.extra["leader"] == "http://a"
    assert (await campaign("a", ttl_s=0.01)).epoch == first.epoch

    async def won() -> bool:
        try:
            return (await campaign("b")).epoch == first.epoch + 1
        except ConflictError:
            return False

    await eventually(won, "the term ends")
    await client.call("DELETE", "/v1/leaders/scheduler", query={"holder": "b"})
    assert (await campaign("c")).epoch == first.epoch + 2


async def test_keys_are_raw_waited_for_and_listed(client: Client) -> None:
    waiting = asyncio.ensure_future(
        client.call("GET", "/v1/kv/ns/dir/key", query={"wait_s": 30}, raw=True)
    )
    entry = await client.call("PUT", "/v1/kv/ns/dir/key", b"\x00raw", reply=KvEntry)
    assert entry.nbytes == 4
    assert await waiting == b"\x00raw"
    with pytest.raises(ConflictError, match="exists"):
        await client.call("PUT", "/v1/kv/ns/dir/key", b"x", query={"if_absent": 1}, reply=KvEntry)
    await client.call("PUT", "/v1/kv/ns/other", b"", reply=KvEntry)
    page = await client.call("GET", "/v1/kv/ns", query={"prefix": "dir/"}, reply=Page[KvEntry])
    assert [item.key for item in page.items] == ["dir/key"]
    await client.call("DELETE", "/v1/kv/ns/dir/key")
    with pytest.raises(NotFoundError):
        await client.call("DELETE", "/v1/kv/ns/dir/key")
    with pytest.raises(NotFoundError, match="no key 'dir/key'"):
        await client.call("GET", "/v1/kv/ns/dir/key", raw=True)


async def test_functions_and_packages_are_kept_by_content(client: Client) -> None:
    large = bytes(2 << 20)
    for kind, content in (("functions", b"code"), ("packages", b"zip"), ("functions", large)):
        digest = hashlib.sha256(content).hexdigest()
        path = f"/v1/{kind}/{digest}"
        with pytest.raises(NotFoundError):
            await client.call("GET", path, raw=True)
        for other in ("f_1", digest[:16], digest[:-1], "0" * 64):
            with pytest.raises(BadRequestError, match="not what it is named by"):
                await client.call("PUT", f"/v1/{kind}/{other}", content)
        for _ in range(2):
            await client.call("PUT", path, content)
        with pytest.raises(BadRequestError, match="not what it is named by"):
            await client.call("PUT", path, content + b"x")
        assert await client.call("GET", path, raw=True) == content


@pytest.mark.logs(
    r"the loop reconcile waits: events up to \d+ are gone"
)  # it may be behind what goes
async def test_a_watch_resumes_where_it_was_and_is_told_when_it_cannot(
    served: tuple[Running, Client],
) -> None:
    running, client = served
    await register(client, "n_1")
    page = await client.call("GET", "/v1/nodes", reply=Page[Node])
    await register(client, "n_2")
    await client.call("PUT", "/v1/kv/ns/k", b"", reply=KvEntry)
    watch = client.watch("/v1/events", page.seq, {"kind": "node.,job."})
    first = await anext(watch)
    assert (first.kind, first.subject) == ("node.registered", "n_2")
    job = await attach(client)
    second = await anext(watch)
    assert (second.kind, second.payload["job_id"]) == ("job.started", job.job_id)
    await watch.aclose()  # type: ignore[attr-defined]
    resumed = client.watch("/v1/jobs", first.seq)
    assert (await anext(resumed)).seq == second.seq
    await resumed.aclose()  # type: ignore[attr-defined]
    await running.app.state.log.compact(1)
    with pytest.raises(CompactedError, match="list again"):
        await anext(client.watch("/v1/events", 0))


async def test_lists_are_paged_and_filters_are_checked(client: Client) -> None:
    for i in range(5):
        await register(client, f"n_{i}")
    found: list[str] = []
    cursor = ""
    while True:
        query = {"limit": 2, "cursor": cursor}
        page = await client.call("GET", "/v1/nodes", query=query, reply=Page[Node])
        found += [node.node_id for node in page.items]
        cursor = page.next_cursor
        if not cursor:
            break
    assert found == [f"n_{i}" for i in range(5)]
    with pytest.raises(BadRequestError, match="state") as caught:
        await client.call("GET", "/v1/nodes", query={"stat": "ALIVE"}, reply=Page[Node])
    assert caught.value.field == "stat"


async def test_what_others_know_is_proxied_and_their_absence_is_named(client: Client) -> None:
    with pytest.raises(UnavailableError, match="no scheduler leads"):
        await client.call("GET", "/v1/cluster", reply=ClusterResources, retry=False)
    async with scheduler(client):
        found = await client.call("GET", "/v1/cluster", reply=ClusterResources)
        assert found.available == {"CPU": 1.0}
    with pytest.raises(UnavailableError, match="the scheduler at http://127"):
        await client.call("GET", "/v1/cluster", reply=ClusterResources, retry=False)


async def test_the_openapi_document_and_readiness(served: tuple[Running, Client]) -> None:
    running, client = served
    document = msgspec.json.decode(await client.call("GET", "/openapi.json", raw=True))
    assert "/v1/actors/{actor_id}/report" in document["paths"]
    await client.call("GET", "/readyz", raw=True)
    metrics = await client.call("GET", "/metrics", raw=True)
    assert b"stoker_task_records_dropped_total 0" in metrics
    assert running.leads
    assert TOKEN.encode() not in metrics
