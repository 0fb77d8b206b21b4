"""Extenders over real HTTP: filters one after the other, points, silence, and answers in any case."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.extenders.client import Extenders
from stoker_scheduler.extenders.config import ExtenderConfig, ManagedResource
from tests.unit.scheduler.extender_server import ExtenderServer
from tests.unit.scheduler.samples import a_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NODES = [a_node("n_1"), a_node("n_2"), a_node("n_3")]
WANTED = make_requirements({"CPU": 1})


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def server(stack: AsyncExitStack, **options: Any) -> ExtenderServer:
    made = ExtenderServer(**options)
    await made.start()
    stack.push_async_callback(made.stop)
    return made


def extenders(stack: AsyncExitStack, *configs: ExtenderConfig) -> Extenders:
    made = Extenders(configs)
    stack.push_async_callback(made.close)
    return made


def config(one: ExtenderServer, **options: Any) -> ExtenderConfig:
    options = {"filter_verb": "filter", "http_timeout": "20s", **options}
    return ExtenderConfig(url_prefix=one.url, **options)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("lower_case", [True, False])
async def test_an_extender_refuses_nodes_and_scores_the_others(
    stack: AsyncExitStack, cached: bool, lower_case: bool
) -> None:
    one = await server(stack, lower_case=lower_case)
    one.refused, one.scores = {"n_2": "no licence"}, {"n_1": 5, "n_3": 30}
    asked = extenders(
        stack, config(one, prioritize_verb="prioritize", weight=2, node_cache_capable=cached)
    )
    gains, refusals = await asked.ask(asked.extend(WANTED), NODES)
    assert gains == {"n_1": 1.0, "n_3": 2.0}
    assert refusals == {"n_2": f"extender {one.url}: no licence"}
    verbs = [verb for verb, _ in one.calls]
    assert verbs == ["filter", "prioritize"]
    args = one.calls[0][1]
    assert set(args) == {"Pod", "Nodes", "NodeNames"}
    assert args["NodeNames"] == (["n_1", "n_2", "n_3"] if cached else None)
    assert (args["Nodes"] is None) is cached
    assert args["Pod"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1"}


async def test_a_later_extender_sees_what_the_earlier_left(stack: AsyncExitStack) -> None:
    first, second = await server(stack), await server(stack)
    first.refused, second.refused = {"n_1": "x"}, {"n_2": ""}
    options = {"node_cache_capable": True}
    asked = extenders(stack, config(first, **options), config(second, **options))
    gains, refusals = await asked.ask(asked.extend(WANTED), NODES)
    assert second.calls[0][1]["NodeNames"] == ["n_2", "n_3"]
    assert list(gains) == ["n_3"]
    assert refusals["n_2"] == f"extender {second.url}: it left the node out without a reason"


@pytest.mark.parametrize("ignorable", [True, False])
@pytest.mark.parametrize("how", ["silent", "error", "gone"])
async def test_without_an_answer_an_ignorable_extender_admits_all_and_another_none(
    stack: AsyncExitStack, ignorable: bool, how: str
) -> None:
    one = await server(stack)
    asked = extenders(stack, config(one, ignorable=ignorable, http_timeout="50ms"))
    one.silent, one.error = how == "silent", "no database" if how == "error" else ""
    if how == "gone":
        await one.stop()
    gains, refusals = await asked.ask(asked.extend(WANTED), NODES)
    assert list(gains) == (["n_1", "n_2", "n_3"] if ignorable else [])
    assert list(refusals) == ([] if ignorable else ["n_1", "n_2", "n_3"])
    words = {
        "silent": "within its httpTimeout of 0.05 s",
        "error": "no database",
        "gone": "reached",
    }
    assert ignorable or words[how] in refusals["n_1"]


async def test_one_that_only_scores_and_fails_changes_nothing(stack: AsyncExitStack) -> None:
    one = await server(stack)
    one.error = "no database"
    asked = extenders(stack, config(one, filter_verb="", prioritize_verb="prioritize", weight=1))
    gains, refusals = await asked.ask(asked.extend(WANTED), NODES)
    assert gains == {"n_1": 0.0, "n_2": 0.0, "n_3": 0.0} and not refusals


def test_only_what_asks_for_managed_resources_is_of_interest() -> None:
    gpus = (ManagedResource(name="nvidia.com/gpu"),)
    config = ExtenderConfig(url_prefix="http://h/", filter_verb="f", managed_resources=gpus)
    asked = Extenders([config])
    needs_gpu = make_requirements({"GPU": 1})
    assert asked.extend(WANTED).extenders == ()
    assert asked.extend(needs_gpu).extenders == ("http://h",)
    assert asked.extend(make_requirements({"GPU": 1}, group_id="pg_1")).extenders == ()
    gang = asked.extend(make_gang([WANTED, needs_gpu], GangStrategy.PACK))
    assert [bundle.extenders for bundle in gang.bundles] == [(), ("http://h",)]
    assert Extenders().extend(needs_gpu) is needs_gpu
