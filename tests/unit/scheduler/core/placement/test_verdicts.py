"""Verdicts: the best node of several, and what is said of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.core.placement.feasibility import first_obstacle
from stoker_scheduler.core.placement.scoring import NODE_ORDERS, ScorePolicy
from stoker_scheduler.core.placement.verdicts import PlacementRequest, choose, evaluate
from stoker_scheduler.wire_types import requirements_of
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import SpreadPolicy, Strategy
from tests.unit.scheduler.samples import GIB, a_node, used

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo

POLICY = ScorePolicy()


@pytest.mark.parametrize(
    ("nodes", "request_", "chosen"),
    [
        pytest.param(
            [used(a_node("n_1"), CPU=1), a_node("n_2")],
            PlacementRequest(make_requirements({"CPU": 1, "GPU": 1})),
            "n_1",
            id="packs below the threshold, in order",
        ),
        pytest.param(
            [used(a_node("n_1"), CPU=2), a_node("n_2")],
            PlacementRequest(make_requirements({"CPU": 1, "GPU": 1})),
            "n_2",
            id="spreads above the threshold",
        ),
        pytest.param(
            [a_node("n_1"), a_node("n_2", resources={"CPU": 1})],
            PlacementRequest(make_requirements({"CPU": 1})),
            "n_2",
            id="CPU work avoids GPU nodes even if that fills a CPU node",
        ),
        pytest.param(
            [used(a_node("n_1"), CPU=2), used(a_node("n_2"), CPU=1)],
            PlacementRequest(
                make_requirements({"CPU": 1, "GPU": 1}, policy=PlacementPolicy.SPREAD)
            ),
            "n_2",
            id="spread takes the least loaded above the threshold",
        ),
        pytest.param(
            [a_node("n_1"), a_node("n_2")],
            PlacementRequest(make_requirements({"CPU": 1}), {"n_2": 10 * GIB, "n_1": GIB}),
            "n_2",
            id="large arguments attract",
        ),
        pytest.param(
            [a_node("n_1"), a_node("n_2")],
            PlacementRequest(make_requirements({"CPU": 1}), {"n_2": 1000}),
            "n_1",
            id="small ones do not",
        ),
        pytest.param(
            [a_node("n_1"), a_node("n_2")],
            PlacementRequest(make_requirements({"CPU": 1}, node_id="n_2", soft=True)),
            "n_2",
            id="a wished node is taken if it fits",
        ),
        pytest.param(
            [a_node("n_2"), a_node("n_1")],
            PlacementRequest(make_requirements({"CPU": 1})),
            "n_1",
            id="ties go to the lowest id, whatever the order",
        ),
    ],
)
def test_the_best_node(nodes: list[NodeInfo], request_: PlacementRequest, chosen: str) -> None:
    assert choose(nodes, request_, POLICY) == chosen


@pytest.mark.parametrize(
    ("nodes", "requirements", "chosen"),
    [
        pytest.param(
            [a_node("n_1"), a_node("n_2", warm=("k",))],
            make_requirements({"GPU": 1}),
            "n_2",
            id="of equal nodes the warm one",
        ),
        pytest.param(
            [a_node("n_1"), used(a_node("n_2", warm=("k",)), GPU=1)],
            make_requirements({"GPU": 1}),
            "n_1",
            id="not one that this would fill, while another stays below the packing threshold",
        ),
        pytest.param(
            [a_node("n_1"), used(a_node("n_2", warm=("k",)), CPU=1)],
            make_requirements({"CPU": 2, "GPU": 1}),
            "n_1",
            id="nor one that passes the threshold by a little",
        ),
        pytest.param(
            [used(a_node("n_1"), CPU=1), used(a_node("n_2", warm=("k",)), CPU=2)],
            make_requirements({"CPU": 2, "GPU": 2}),
            "n_2",
            id="a warm one where both are filled",
        ),
        pytest.param(
            [a_node("n_1"), used(a_node("n_2", warm=("k",)), CPU=1)],
            make_requirements({"CPU": 1, "GPU": 1}, policy=PlacementPolicy.SPREAD),
            "n_1",
            id="spread means spread",
        ),
        pytest.param(
            [a_node("n_1"), used(a_node("n_2", warm=("k",)), GPU=2)],
            make_requirements({"GPU": 1}),
            "n_1",
            id="a busy warm node is not waited for",
        ),
        pytest.param(
            [a_node("n_1"), a_node("n_2", warm=("other",))],
            make_requirements({"GPU": 1}),
            "n_1",
            id="warm for other kernels is not warm",
        ),
    ],
)
def test_compiled_kernels_are_a_hint_and_no_rule(
    nodes: list[NodeInfo], requirements: Requirements, chosen: str
) -> None:
    request = PlacementRequest(requirements, kernels="k")
    assert choose(nodes, request, POLICY) == chosen
    details = {one.node_id: one.detail for one in evaluate(nodes, request, POLICY)}
    for node in nodes:
        fits = first_obstacle(node, requirements) is None
        counts = requirements.policy is PlacementPolicy.HYBRID
        warm = counts and fits and "k" in node.spec.warm
        assert ("it has compiled the kernels" in details[node.node_id]) == warm


def test_a_verdict_says_what_speaks_for_a_node_and_against_it() -> None:
    nodes = [used(a_node("n_1"), CPU=1), a_node("n_2", warm=("k",))]
    request = PlacementRequest(make_requirements({"CPU": 3}, node_id="n_2", soft=True), kernels="k")
    near, far = evaluate(nodes, request, POLICY)
    gpus = "it has GPUs, which are not asked for"
    load = "% of what is scarcest would be in use"
    assert near.detail == f"75{load}; {gpus}; it is preferred; it has compiled the kernels"
    assert far.detail == f"100{load}; {gpus}"


@pytest.mark.parametrize("policy", SpreadPolicy)
def test_every_policy_of_the_wire_has_its_order_of_the_nodes(policy: SpreadPolicy) -> None:
    requirements = requirements_of(
        Demand(job_id="job_1", resources={}, strategy=Strategy(policy=policy))
    )
    assert requirements.policy.value == policy.value
    assert requirements.policy in NODE_ORDERS
