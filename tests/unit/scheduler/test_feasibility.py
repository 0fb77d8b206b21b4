"""Each rule of placement: who fits, who is busy, who never fits, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.devices import Devices
from stoker_scheduler.core.model.labels import parse_selector
from stoker_scheduler.core.model.nodes import Health, NodeInfo, make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError, to_amounts, to_units
from stoker_scheduler.core.placement.feasibility import (
    NodeFit,
    Rule,
    could_ever_fit,
    detail,
    first_obstacle,
    obstacles,
    remedy,
)
from stoker_scheduler.core.placement.plan import PlacementRequest, choose, plan
from stoker_scheduler.core.placement.scoring import ScorePolicy

GIB = 1 << 30
POLICY = ScorePolicy()


def a_node(name: str = "n_1", **options: object) -> NodeInfo:
    resources = options.pop("resources", {"CPU": 4, "GPU": 2, "memory": 8 * GIB, "ssd": 1})
    return NodeInfo(make_node_spec(name, resources, **options))  # type: ignore[arg-type]


def used(node: NodeInfo, **resources: float) -> NodeInfo:
    requirements = make_requirements(resources)
    node.allocate(requirements, node.devices.choose(requirements.gpu) or {})
    return node


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
            make_requirements({}, label_selector={"zone": "in(b,c)"}),
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
            a_node(draining=True),
            make_requirements({}),
            NodeFit.BUSY,
            Rule.DRAINING,
            "the node is draining: it takes no new work",
            id="a draining node",
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


@pytest.mark.parametrize(
    ("written", "labels", "holds"),
    [
        ("a", {"zone": "a"}, True),
        ("a", {"zone": "b"}, False),
        ("a", {}, False),
        ("!a", {"zone": "b"}, True),
        ("!a", {"zone": "a"}, False),
        ("!a", {}, True),
        ("in(a, b)", {"zone": "b"}, True),
        ("in(a,b)", {"zone": "c"}, False),
        ("!in(a,b)", {"zone": "c"}, True),
        ("!in(a,b)", {"zone": "a"}, False),
        ("!in(a,b)", {}, True),
    ],
)
def test_a_label_selector(written: str, labels: dict[str, str], holds: bool) -> None:
    (term,) = parse_selector({"zone": written})
    assert term.holds(labels) is holds


def test_the_reasons_of_many_names_cost_one_pass_over_the_need() -> None:
    passes = 0

    class Counted(tuple):
        def __iter__(self) -> object:
            nonlocal passes
            passes += 1
            return super().__iter__()

    names = {f"r{i:04}": 1.0 for i in range(2000)}
    requirements = make_requirements(names, label_selector=dict.fromkeys(names, "x"))
    for field in ("items", "terms"):
        object.__setattr__(requirements, field, Counted(getattr(requirements, field)))
    node = a_node()
    found = obstacles(node, requirements)
    assert len(found) == 4000
    for one in found:
        assert one.subject in detail(one, node, requirements)
        assert one.subject in remedy(one, node, requirements)
    assert passes < 10
    (placed,) = plan([node], [PlacementRequest(requirements)], POLICY).placements
    (verdict,) = placed.verdicts
    assert len(verdict.detail) < 5_000
    assert "3980 more" in verdict.detail


@pytest.mark.parametrize(
    "written", ["", "!", "in()", "in(a", "!in( , )", "in(a,, b)", "matches(x)", "??==zone!"]
)
def test_an_unreadable_selector_names_the_label(written: str) -> None:
    with pytest.raises(InvalidDemandError) as caught:
        parse_selector({"zone": written})
    assert caught.value.field == "label_selector.zone"


@pytest.mark.parametrize(
    "resources", [{"GPU": 1.5}, {"CPU": -1}, {"CPU": float("nan")}, {"CPU": 1e-6}]
)
def test_a_senseless_amount_is_refused(resources: dict[str, float]) -> None:
    with pytest.raises(InvalidDemandError):
        make_requirements(resources)


def test_amounts_become_whole_units_and_back() -> None:
    units = to_units({"memory": 1000.5, "CPU": 0.1, "GPU": 1 / 3, "none": 0})
    assert units == {"CPU": 1000, "GPU": 3333, "memory": 1001}
    assert to_amounts(units) == {"CPU": 0.1, "GPU": 0.3333, "memory": 1001.0}


def test_fractions_fill_one_gpu_before_the_next_and_whole_ones_take_free_devices() -> None:
    devices = Devices((0, 1, 2))
    taken = []
    for units in (5000, 3000, 3000, 2000, UNIT):
        shares = devices.choose(units)
        assert shares is not None
        devices.allocate(shares)
        taken.append(shares)
    assert taken == [{0: 5000}, {0: 3000}, {1: 3000}, {0: 2000}, {2: UNIT}]
    assert devices.choose(2 * UNIT) is None
    for shares in taken:
        devices.free(shares)
    assert devices.choose(3 * UNIT) == {0: UNIT, 1: UNIT, 2: UNIT}


sizes = st.one_of(st.integers(1, UNIT - 1), st.integers(1, 4).map(lambda n: n * UNIT))


@given(st.lists(st.tuples(sizes, st.integers(0, 5)), max_size=40))
def test_devices_are_never_over_allocated_and_end_free(steps: list[tuple[int, int]]) -> None:
    devices = Devices(range(4))
    taken: list[dict[int, int]] = []
    for units, give in steps:
        shares = devices.choose(units)
        if shares is not None:
            assert sum(shares.values()) == units
            assert len(shares) == max(1, units // UNIT)
            devices.allocate(shares)
            taken.append(shares)
        if taken and give == 0:
            devices.free(taken.pop(0))
        assert all(0 <= free <= UNIT for free in devices.free_by_device.values())
    for shares in taken:
        devices.free(shares)
    assert devices.free_units == devices.total_units


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
            PlacementRequest(make_requirements({"CPU": 1, "GPU": 1}, spread=True)),
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
    made = plan(nodes, [request_], POLICY)
    assert made.placements[0].node_id == chosen


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
            make_requirements({"CPU": 1, "GPU": 1}, spread=True),
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
    (placement,) = plan(nodes, [PlacementRequest(requirements, kernels="k")], POLICY).placements
    assert placement.node_id == chosen
    details = {verdict.node_id: verdict.detail for verdict in placement.verdicts}
    for node in nodes:
        fits = first_obstacle(node, requirements) is None
        warm = fits and "k" in node.spec.warm
        assert (details[node.node_id] == "it has compiled the kernels") == warm


def test_a_plan_sees_its_own_placements_and_leaves_the_nodes_alone() -> None:
    nodes = [a_node("n_1"), a_node("n_2")]
    made = plan(nodes, [PlacementRequest(make_requirements({"GPU": 2}))] * 3, POLICY)
    assert [p.node_id for p in made.placements] == ["n_1", "n_2", None]
    assert [v.fit for v in made.placements[2].verdicts] == [NodeFit.BUSY, NodeFit.BUSY]
    assert all(node.devices.free_units == 2 * UNIT for node in nodes)


amounts = st.fixed_dictionaries(
    {},
    optional={
        "CPU": st.sampled_from([0.5, 1, 2, 4, 8]),
        "GPU": st.sampled_from([0.25, 0.5, 1, 2, 4]),
        "ssd": st.just(1),
    },
)


@given(amounts, st.lists(amounts, max_size=5), amounts)
def test_idle_nodes_judge_as_could_ever_fit_says(
    has: dict[str, float], others: list[dict[str, float]], asks: dict[str, float]
) -> None:
    node, requirements = a_node(resources=has), make_requirements(asks)
    assert (first_obstacle(node, requirements) is None) == could_ever_fit(node, requirements)
    for other in others:
        if first_obstacle(node, make_requirements(other)) is None:
            used(node, **other)
    if first_obstacle(node, requirements) is None:
        assert could_ever_fit(node, requirements) and not obstacles(node, requirements)
