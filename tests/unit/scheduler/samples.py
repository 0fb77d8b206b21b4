"""Nodes, requirements and clusters that several tests of the scheduler use."""

from __future__ import annotations

from hypothesis import strategies as st

from stoker_scheduler.core.model.nodes import NodeInfo, make_node_spec
from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.wire_types import node_filter_of, terms_of


def filtered(resources: dict[str, float], text: str) -> Requirements:
    return make_requirements(resources, node_filters=(node_filter_of(text),))


requirement_sets = st.sampled_from(
    [
        make_requirements({"CPU": 1}),
        make_requirements({"CPU": 3}),
        make_requirements({"GPU": 1}),
        make_requirements({"GPU": 0.5}),
        make_requirements({"CPU": 1, "GPU": 2}),
        make_requirements({"CPU": 1}, policy=PlacementPolicy.SPREAD),
        make_requirements({"CPU": 1}, terms=terms_of({"zone": "a"})),
        make_requirements({"CPU": 16}),
        filtered({"CPU": 1}, "labels.zone = 'a'"),
    ]
)
volatile_sets = st.sampled_from(
    [
        filtered({"CPU": 1}, "free.gpu between 0.5 and 1"),
        filtered({"GPU": 1}, "free.cpu < total.cpu"),
        filtered({}, "free.cpu <= 1 or slow_ranks > 0"),
        filtered({"CPU": 1}, "not (free.cpu = 4 and total.gpu > 0)"),
    ]
)
"""Requirements that may fit where they did not because less is free."""


clusters = st.lists(
    st.sampled_from([{"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}]),
    min_size=1,
    max_size=4,
)


GIB = 1 << 30


def a_node(name: str = "n_1", **options: object) -> NodeInfo:
    resources = options.pop("resources", {"CPU": 4, "GPU": 2, "memory": 8 * GIB, "ssd": 1})
    return NodeInfo(make_node_spec(name, resources, **options))  # type: ignore[arg-type]


def used(node: NodeInfo, **resources: float) -> NodeInfo:
    requirements = make_requirements(resources)
    node.allocate(requirements, node.devices.choose(requirements.gpu) or {})
    return node
