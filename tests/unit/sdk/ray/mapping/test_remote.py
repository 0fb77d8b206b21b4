"""Ray's options of tasks and actors as Stoker's."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.exceptions import BadRequestError, UnknownOptionError
from stoker.ray.mapping.remote import any_of, condition, mapped_options, method, remote
from stoker.ray.util.placement_group import PlacementGroup
from stoker.ray.util.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
)
from stoker.runtime.options.strategies import NodeAffinity, PlacementGroupSchedulingStrategy
from stoker_wire.constraints import node_filters

GROUP = PlacementGroup("pg_1", [{"CPU": 1}, {"CPU": 1}])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"num_cpus": 0.5, "_metadata": {"a": 1}}, {"num_cpus": 0.5}),
        (
            {"resources": {"node:10.0.0.1": 0.01, "disk": 1}},
            {"resources": {"disk": 1}, "label_selector": {"stoker.io/address": "10.0.0.1"}},
        ),
        (
            {"resources": {"node:__internal_head__": 1}},
            {"resources": {}, "label_selector": {"stoker.io/head": "true"}},
        ),
        (
            {"label_selector": {"ray.io/node-id": "n_1", "zone": "!a"}},
            {"label_selector": {"stoker.io/node-id": "n_1", "zone": "!a"}},
        ),
        (
            {"placement_group": GROUP, "placement_group_bundle_index": 1},
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(GROUP, 1)},
        ),
        ({"placement_group": "default", "placement_group_bundle_index": -1}, {}),
        (
            {"runtime_env": {"pip": {"packages": ["x"], "pip_check": False}}},
            {"runtime_env": {"pip": ["x"]}},
        ),
        (
            {
                "label_selector": {"zone": "a"},
                "fallback_strategy": [{"label_selector": {"zone": "in(b,c)"}}],
            },
            {
                "label_selector": None,
                "node_filter": "((labels.\"zone\" = 'a') or (labels.\"zone\" in ('b', 'c')))",
            },
        ),
    ],
)
def test_options(given: dict[str, Any], taken: dict[str, Any]) -> None:
    assert mapped_options(given) == taken


def test_strategies() -> None:
    assert NodeAffinitySchedulingStrategy("n_1", True) == NodeAffinity(node_id="n_1", soft=True)
    labels = NodeLabelSchedulingStrategy(
        hard={
            "zone": In("a", "b'c"),
            "disk": NotIn("slow"),
            "rack": Exists(),
            "old": DoesNotExist(),
        }
    )
    node_filter = mapped_options({"scheduling_strategy": labels})["node_filter"]
    node_filters.check(node_filter)
    assert """labels."zone" in ('a', 'b''c')""" in node_filter
    with pytest.raises(BadRequestError):
        NodeLabelSchedulingStrategy()


@pytest.mark.parametrize("text", ["a", "!a", "in(a,b)", "!in(a, b)"])
def test_each_condition_of_a_label_is_a_node_filter(text: str) -> None:
    node_filters.check(condition("ray.io/node-id", text))


def test_a_fallback_that_is_no_selector_is_an_error() -> None:
    with pytest.raises(BadRequestError, match="label_selector"):
        any_of([{"num_cpus": 1}])


def test_a_remote_function_keeps_its_kind() -> None:
    @remote(num_cpus=2)
    def function() -> None: ...

    @remote
    class Thing:
        pass

    changed = function.options(resources={"node:10.0.0.1": 1})
    assert type(changed) is type(function)
    assert changed._options.label_selector == {"stoker.io/address": "10.0.0.1"}
    assert type(Thing.options(max_restarts=1)) is type(Thing)
    with pytest.raises(UnknownOptionError, match="num_cpus"):
        function.options(num_cpu=1)
    with pytest.raises(BadRequestError):
        method()
