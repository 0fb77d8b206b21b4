"""Requests that fail on purpose: each kind of fault does what it says, to the routes it names alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import BadRequestError, UnavailableError
from stoker_wire.http.server.faults import FaultRule, parse_faults
from tests.unit.wire.orders import Order, Receipt

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster

# Services say at their start that they fail on purpose.
pytestmark = pytest.mark.logs(r"requests fail on purpose")

TRIES = 40


class Till:
    """A service that counts how often its handlers run."""

    def __init__(self, cluster: Cluster, faults: str, seed: int = 1) -> None:
        self.runs: list[str] = []
        self.service: Service = cluster.service(faults=faults, faults_seed=seed)
        add = self.service.route
        add("POST", "/v1/orders/{id}", self.take, body=Order, reply=Receipt, summary="Take.")
        add("GET", "/v1/orders/{id}", self.show, reply=Receipt, summary="Show.")
        add("POST", "/v1/other", self.take, body=Order, reply=Receipt, summary="Take.")

    async def take(self, req: Request) -> Receipt:
        self.runs.append("take")
        return Receipt(name=req.body.name, count=len(self.runs))

    async def show(self, req: Request) -> Receipt:
        self.runs.append("show")
        return Receipt(name="shown", count=len(self.runs))


async def outcomes(cluster: Cluster, till: Till, path: str = "/v1/orders/7") -> str:
    """What became of ``TRIES`` orders that nobody repeats: ``+`` answered, ``-`` not.

    Not of reads: aiohttp itself sends one again if the connection had served another before.
    """
    client = cluster.client(await cluster.start(till.service))
    told = ""
    for _ in range(TRIES):
        try:
            await client.call("POST", path, Order(name="x"), reply=Receipt, retry=False)
        except UnavailableError:
            told += "-"
        else:
            told += "+"
    return told


async def test_a_dropped_request_runs_nothing_and_a_dropped_reply_has_run(
    cluster: Cluster,
) -> None:
    before = Till(cluster, "POST /v1/orders/*: drop-request 1")
    assert await outcomes(cluster, before) == "-" * TRIES
    assert before.runs == []
    after = Till(cluster, "POST /v1/orders/*: drop-reply 1")
    assert await outcomes(cluster, after) == "-" * TRIES
    assert after.runs == ["take"] * TRIES
    either = Till(cluster, "POST /v1/orders/*: drop 1")
    assert await outcomes(cluster, either) == "-" * TRIES
    assert 0 < len(either.runs) < TRIES


async def test_the_routes_that_no_rule_names_are_left_alone(cluster: Cluster) -> None:
    till = Till(cluster, "PUT /v1/*: drop 1; POST /v1/orders/*: drop 1")
    assert await outcomes(cluster, till, "/v1/other") == "+" * TRIES


async def test_one_seed_gives_one_order_of_faults(cluster: Cluster) -> None:
    said = [
        await outcomes(cluster, Till(cluster, "* /v1/orders/{id}: drop-request 0.5", seed))
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]
    assert {"+", "-"} == set(said[0])


async def test_a_doubled_request_happens_once_where_it_has_a_key(cluster: Cluster) -> None:
    till = Till(cluster, "* /v1/*: double 1")
    client = cluster.client(await cluster.start(till.service))
    reply = await client.call("POST", "/v1/orders/7", Order(name="x"), reply=Receipt)
    assert (reply, till.runs) == (Receipt(name="x", count=1), ["take"])
    await client.call("GET", "/v1/orders/7", reply=Receipt)
    assert till.runs == ["take", "show"], "nobody repeats a read in vain"


async def test_a_doubled_request_runs_its_handler_twice(cluster: Cluster) -> None:
    till = Till(cluster, "* /v1/*: double 1")
    add = till.service.route
    add("PUT", "/v1/twice", till.take, body=Order, reply=Receipt, summary="Take.")
    client = cluster.client(await cluster.start(till.service))
    reply = await client.call("PUT", "/v1/twice", Order(name="x"), reply=Receipt)
    assert (reply, till.runs) == (Receipt(name="x", count=2), ["take", "take"])


async def test_a_delayed_request_is_answered_later(cluster: Cluster) -> None:
    till = Till(cluster, "GET /v1/orders/*: delay 0.3")
    client = cluster.client(await cluster.start(till.service))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.call("GET", "/v1/orders/7", reply=Receipt)
    assert loop.time() - began >= 0.3


async def test_a_client_that_repeats_gets_its_answer_through_all_of_it(cluster: Cluster) -> None:
    till = Till(cluster, "* /v1/orders/{id}: drop 0.5, delay 0.001@0.5, double 0.5")
    client = cluster.client(await cluster.start(till.service))
    counts = [
        (await client.call("POST", "/v1/orders/7", Order(name="x"), reply=Receipt)).count
        for _ in range(TRIES)
    ]
    assert counts == [*range(1, TRIES + 1)], "each order is taken once"


def test_a_rule_is_read_as_it_is_written() -> None:
    text = " POST /v1/leases: drop 0.1, delay 0.2@0.3, double 0.02 ;* /v1/*:drop-reply 1;"
    assert parse_faults(text) == (
        FaultRule("POST", "/v1/leases", 0.05, 0.05, double=0.02, delay=0.3, delay_s=0.2),
        FaultRule("*", "/v1/*", drop_reply=1.0),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("drop 0.1", "METHOD /path"),
        ("GET v1: drop 0.1", "METHOD /path"),
        ("GET /v1: lose 0.1", "'lose' is none of drop,"),
        ("GET /v1: drop much", "'much' is no number"),
        ("GET /v1: delay 1@2", "from 0 to 1"),
    ],
)
def test_what_is_no_rule_is_told_with_the_fix(text: str, says: str) -> None:
    with pytest.raises(BadRequestError, match="STOKER_FAULTS") as raised:
        parse_faults(text)
    assert says in str(raised.value)
    assert "write it like" in str(raised.value)
