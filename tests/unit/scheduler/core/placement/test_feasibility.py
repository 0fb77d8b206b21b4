"""Each rule of feasibility: which nodes fit, are busy or never fit, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.nodes import Health, NodeInfo
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.placement.feasibility import (
    NodeFit,
    Rule,
    could_ever_fit,
    detail,
    first_obstacle,
    obstacles,
    remedy,
    rules_for,
)
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.placement.verdicts import PlacementRequest, evaluate
from stoker_scheduler.wire_types import terms_of
from tests.unit.scheduler.samples import GIB, a_node, used

POLICY = ScorePolicy()


@pytest.mark.parametrize(
    ("node", "requirements", "fit", "rule", "words"),
    [
        pytest.param(
            a_node(), make_requirements({"CPU": 4}), NodeFit.FITS, None, "", id="the whole node"
        ),
        pytest.param(
            a_node(),
            make_requirements({"CPU": 5}),
            NodeFit.NEVER,
            Rule.TOTAL,
            "needs 5 CPU, the node has 4 CPU in all",
            id="more CPUs than there are",
        ),
        pytest.param(
            used(a_node(), CPU=3),
            make_requirements({"CPU": 2}),
            NodeFit.BUSY,
            Rule.AVAILABLE,
            "needs 2 CPU, 1 CPU of 4 CPU is free",
            id="more CPUs than are free",
        ),
        pytest.param(
            used(a_node(), memory=7.5 * GIB),
            make_requirements({"memory": GIB}),
            NodeFit.BUSY,
            Rule.AVAILABLE,
            "needs 1 GiB memory, 0.5 GiB memory of 8 GiB memory is free",
            id="memory is said in GiB",
        ),
        pytest.param(
            a_node(),
            make_requirements({"tpu": 1}),
            NodeFit.NEVER,
            Rule.TOTAL,
            "needs 1 tpu, the node has 0 tpu in all",
            id="a custom resource that the node lacks",
        ),
        pytest.param(
            used(used(a_node(), GPU=0.6), GPU=0.6),
            make_requirements({"GPU": 0.5}),
            NodeFit.BUSY,
            Rule.AVAILABLE,
            "needs 0.5 GPU, at most 0.4 GPU is free on one device",
            id="a fraction is not put together from two devices",
        ),
        pytest.param(
            used(a_node(), GPU=0.1),
            make_requirements({"GPU": 2}),
            NodeFit.BUSY,
            Rule.AVAILABLE,
            "needs 2 GPU, 1 of 2 devices are wholly free",
            id="whole GPUs need wholly free devices",
        ),
        pytest.param(
            a_node(labels={"zone": "a"}),
            make_requirements({}, terms=terms_of({"zone": "in(b,c)"})),
            NodeFit.NEVER,
            Rule.LABEL,
            "label_selector needs zone=in(b,c), the node has zone=a",
            id="a label with another value",
        ),
        pytest.param(
            a_node(),
            make_requirements({}, node_id="n_2"),
            NodeFit.NEVER,
            Rule.AFFINITY,
            "the demand is pinned to node n_2",
            id="hard affinity to another node",
        ),
        pytest.param(
            a_node(),
            make_requirements({}, node_id="n_2", soft=True),
            NodeFit.FITS,
            None,
            "",
            id="soft affinity is only a wish",
        ),
        pytest.param(
            a_node(health=Health.SUSPECT, reason="silent for 4 s"),
            make_requirements({}),
            NodeFit.BUSY,
            Rule.STATE,
            "the node is SUSPECT: silent for 4 s",
            id="a suspect node",
        ),
        pytest.param(
            a_node(cordon="cordoned by ada since noon: disk"),
            make_requirements({}),
            NodeFit.BUSY,
            Rule.CORDON,
            "the node is cordoned by ada since noon: disk",
            id="a cordoned node",
        ),
        pytest.param(
            a_node(pressure="98% of memory are in use"),
            make_requirements({}),
            NodeFit.BUSY,
            Rule.PRESSURE,
            "the node takes no new work: 98% of memory are in use",
            id="a node short of memory",
        ),
    ],
)
def test_a_rule(
    node: NodeInfo, requirements: object, fit: NodeFit, rule: Rule | None, words: str
) -> None:
    found = obstacles(node, requirements)  # type: ignore[arg-type]
    if rule is None:
        assert found == () and fit is NodeFit.FITS
        return
    assert [o.rule for o in found] == [rule]
    assert found[0].fit is fit
    assert detail(found[0], node, requirements) == words  # type: ignore[arg-type]
    assert remedy(found[0], node, requirements)  # type: ignore[arg-type]


def test_the_reasons_of_many_names_cost_one_pass_over_the_requirements() -> None:
    passes = 0

    class Counted(tuple):
        def __iter__(self) -> object:
            nonlocal passes
            passes += 1
            return super().__iter__()

    names = {f"r{i:04}": 1.0 for i in range(2000)}
    requirements = make_requirements(names, terms=terms_of(dict.fromkeys(names, "x")))
    for field in ("items", "terms"):
        object.__setattr__(requirements, field, Counted(getattr(requirements, field)))
    node = a_node()
    found = obstacles(node, requirements)
    assert len(found) == 4000
    for one in found:
        assert one.subject in detail(one, node, requirements)
        assert one.subject in remedy(one, node, requirements)
    assert passes < 10
    (verdict,) = evaluate([node], PlacementRequest(requirements), POLICY)
    assert len(verdict.detail) < 5_000
    assert "3980 more" in verdict.detail


amounts = st.fixed_dictionaries(
    {},
    optional={
        "CPU": st.sampled_from([0.5, 1, 2, 4, 8]),
        "GPU": st.sampled_from([0.25, 0.5, 1, 2, 4]),
        "ssd": st.just(1),
    },
)


@given(amounts, st.lists(amounts, max_size=5), amounts)
def test_idle_nodes_fit_as_could_ever_fit_says(
    has: dict[str, float], others: list[dict[str, float]], asks: dict[str, float]
) -> None:
    node, requirements = a_node(resources=has), make_requirements(asks)
    assert (first_obstacle(node, requirements) is None) == could_ever_fit(node, requirements)
    for other in others:
        if first_obstacle(node, make_requirements(other)) is None:
            used(node, **other)
    if first_obstacle(node, requirements) is None:
        assert could_ever_fit(node, requirements) and not obstacles(node, requirements)


@given(amounts, amounts, st.sampled_from([None, "n_1", "n_2"]), st.booleans(), st.booleans())
def test_the_rules_for_requirements_find_the_same_first_obstacle_as_all_rules(
    has: dict[str, float], wants: dict[str, float], node_id: str | None, soft: bool, busy: bool
) -> None:
    node = a_node(resources=has, labels={"zone": "a"})
    for selector in ({}, {"zone": "a"}, {"zone": "b"}):
        requirements = make_requirements(
            wants, terms=terms_of(selector), node_id=node_id, soft=soft
        )
        if busy and first_obstacle(node, requirements) is None:
            used(node, **wants)
        expected = first_obstacle(node, requirements)
        assert first_obstacle(node, requirements, rules_for(requirements)) == expected
