"""Extenders behind a scheduler that listens: they refuse, score, fail, and are explained."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.control import Explanation
from stoker_wire.messages.groups import PlanReply, PlanRequest
from tests.unit.scheduler.extender_server import ExtenderServer
from tests.unit.scheduler.service_setup import Setup, until

if TYPE_CHECKING:
    from pathlib import Path

DEMAND = Demand(job_id="job_1", resources={"CPU": 1}, name="train")


async def lead(setup: Setup, tmp_path: Path, **options: object) -> ExtenderServer:
    server = ExtenderServer()
    await server.start()
    setup.stack.push_async_callback(server.stop)
    extender = {"urlPrefix": server.url, "filterVerb": "filter", "nodeCacheCapable": True}
    file = tmp_path / "extenders.json"
    file.write_text(json.dumps({"extenders": [{**extender, **options}]}))
    setup.settings = msgspec.structs.replace(
        setup.settings, extenders=str(file), extender_answer_s=0.2
    )
    await setup.lead()
    return server


async def explain(setup: Setup) -> Explanation:
    return await setup.client.call("POST", "/v1/explain", DEMAND, reply=Explanation)


async def test_an_extender_chooses_the_node_and_says_why_not_another(
    setup: Setup, tmp_path: Path
) -> None:
    for _ in range(3):
        await setup.node(CPU=4)
    server = await lead(setup, tmp_path, prioritizeVerb="prioritize", weight=1)
    server.refused, server.scores = {"n_1": "no licence left"}, {"n_3": 10}
    body = PlanRequest(demands=(DEMAND,))
    planned = await setup.client.call("POST", "/v1/plan", body, reply=PlanReply)
    assert planned.placements[0].node_id == "n_3"
    (granted,) = (await setup.ask(CPU=1)).granted
    assert granted.lease.node_id == "n_3"
    verdicts = {verdict.node_id: verdict for verdict in (await explain(setup)).verdicts}
    assert verdicts["n_1"].rule == "extender"
    assert verdicts["n_1"].detail == f"extender {server.url}: no licence left"


async def test_what_an_extender_refuses_waits_until_it_admits_it(
    setup: Setup, tmp_path: Path
) -> None:
    await setup.node(CPU=4)
    server = await lead(setup, tmp_path)
    server.refused = {"n_1": "no licence left"}
    waiting = asyncio.create_task(setup.ask(CPU=1))

    async def is_refused() -> bool:
        return "no licence left" in (await explain(setup)).verdicts[0].detail

    await until(is_refused)
    server.refused = {}
    assert (await waiting).granted


async def test_a_request_waits_for_the_extender_by_name_and_is_refused_without_its_answer(
    setup: Setup, tmp_path: Path
) -> None:
    await setup.node(CPU=4)
    server = await lead(setup, tmp_path, httpTimeout="20s")
    server.silent = True
    reply = await setup.ask(CPU=1, wait_s=0.5)
    assert not reply.granted and f"waits for extender {server.url}" in reply.note


async def test_without_an_answer_in_time_one_that_is_not_ignorable_refuses_all(
    setup: Setup, tmp_path: Path
) -> None:
    await setup.node(CPU=4)
    server = await lead(setup, tmp_path, httpTimeout="50ms")
    server.silent = True
    explanation = await explain(setup)
    assert "did not answer filter within its httpTimeout" in explanation.verdicts[0].detail
    server.silent = False
    assert (await setup.ask(CPU=1)).granted


async def test_an_ignorable_extender_that_is_silent_holds_nothing_up(
    setup: Setup, tmp_path: Path
) -> None:
    await setup.node(CPU=4)
    server = await lead(setup, tmp_path, httpTimeout="50ms", ignorable=True)
    server.silent = True
    assert (await setup.ask(CPU=1)).granted
    assert server.calls


async def test_a_bad_file_of_extenders_stops_the_start(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="needs a filterVerb"):
        await lead(setup, tmp_path, filterVerb="")
