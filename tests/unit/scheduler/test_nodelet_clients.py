"""The scheduler's clients of nodelets: one per URL, closed with the last node that has it."""

from __future__ import annotations

import pytest

from stoker_scheduler.nodelet_clients import NodeletClients
from stoker_wire.errors import UnavailableError
from stoker_wire.http.client.pool import ClientPool
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings


def a_node(node_id: str, url: str) -> Node:
    return Node(
        node_id=node_id, incarnation=1, state=NodeState.ALIVE, url=url, unix="", hostname="h",
        host_id="h", pid=1, resources={}, devices=(), labels={}, version="", arena_dir="",
        session_dir="", registered_at_s=0.0,
    )  # fmt: skip


async def test_a_node_removed_late_leaves_the_url_to_the_one_that_took_it_over() -> None:
    pool = ClientPool(token="t", peer="tester", settings=Settings())
    background = Background("test")
    nodelets = NodeletClients(pool, epoch=1, background=background)
    url = "http://127.0.0.1:1"
    nodelets.add(a_node("n_old", url))
    nodelets.add(a_node("n_new", url))
    client = pool.client(url)
    nodelets.remove("n_old")
    assert pool.client(url) is client
    nodelets.remove("n_new")
    assert pool.client(url) is not client
    await background.close()
    with pytest.raises(UnavailableError, match="are closed"):
        await client.call("GET", "/v1/leases", raw=True, retry=False)
    await nodelets.close()
