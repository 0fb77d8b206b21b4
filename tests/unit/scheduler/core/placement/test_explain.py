"""Explanations: rejections, what starts where, and remedies that do what they say."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.nodes import NodeInfo, NodeSpec, make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.resources import GPU, UNIT
from stoker_scheduler.core.placement.explain import explain, starting_text
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule, obstacles
from tests.unit.scheduler.core_driver import POLICY, Core, of
from tests.unit.scheduler.samples import clusters, requirement_sets


def test_infeasible_demands_are_rejected_after_the_grace_with_every_node_and_a_remedy() -> None:
    core = Core({"CPU": 4}, {"CPU": 2, "GPU": 1})
    request = core.ask(CPU=1, GPU=2, name="train")
    patient = core.ask("p_2", CPU=64, wait_if_infeasible=True)
    assert not of(cmd.Reject, core.wait(1.5))
    (reject,) = of(cmd.Reject, core.wait(1))
    assert reject.request_id == request and reject.reason is cmd.RejectReason.INFEASIBLE
    for words in (
        "'train'",
        "n_1: needs 2 GPU",
        "n_2: needs 2 GPU",
        "start a node with 1 CPU, 2 GPU",
    ):
        assert words in reject.text
    assert core.state.is_infeasible(core.state.pending[patient])
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_3", {"CPU": 64})))
    assert core.granted(patient)


def test_no_nodes_at_all_is_said_so() -> None:
    core = Core()
    core.ask(CPU=1, wait_s=500)
    assert not of(cmd.Reject, core.wait(POLICY.infeasible_grace_s + 1))
    (reject,) = of(cmd.Reject, core.wait(POLICY.no_nodes_grace_s))
    assert "no node is registered" in reject.text and "start a nodelet" in reject.text


def test_a_start_says_where_what_and_since_when() -> None:
    core = Core({"CPU": 4}, slow=True)
    requirements = make_requirements({"CPU": 1}, env="e")
    assert starting_text(core.state, requirements, "job_1", "pip (numpy)") == ""
    core.ask(requirements=requirements)
    core.wait(1.5, renew=False)
    text = starting_text(core.state, requirements, "job_1", "pip (numpy)", now_s=core.at_s + 10.6)
    assert text == "its environment is being installed on node n_1: pip (numpy), since 12 s"
    assert starting_text(core.state, requirements, "job_2", "") == ""
    text = starting_text(core.state, requirements, "job_1", "")
    assert text == "a worker is being started on node n_1, since 2 s"


@settings(max_examples=100, deadline=None)
@given(clusters, st.lists(requirement_sets, max_size=12), requirement_sets)
def test_applying_the_remedy_of_any_verdict_makes_a_pending_demand_start(
    nodes: list[dict[str, float]], holders: list[Requirements], requirements: Requirements
) -> None:
    core = Core(*nodes)
    for index, holder in enumerate(holders):
        core.ask(f"p_{index}", requirements=holder, wait_if_infeasible=True)
    for request_id in list(core.state.pending):
        core.feed(ev.LeaseRequestCancelled(at_s=0.0, request_id=request_id))
    explanation = explain(core.state, requirements, "")
    if explanation.fit is NodeFit.FITS:
        assert core.granted(core.ask("p_x", requirements=requirements))
        return
    request = core.ask("p_x", requirements=requirements, wait_if_infeasible=True)
    assert core.granted(request) is None
    node = core.state.nodes[explanation.verdicts[0].node_id]
    spec = _restarted(node, requirements)
    if spec != node.spec:
        core.feed(ev.NodeChanged(at_s=0.0, spec=spec))
    for lease_id in list(node.leases):
        if core.granted(request):
            break
        core.release(lease_id)
    assert core.granted(request), explanation.remedy


def _restarted(node: NodeInfo, requirements: Requirements) -> NodeSpec:
    """Return the node's spec as its remedies for what never fits would have it."""
    spec = node.spec
    for obstacle in obstacles(node, requirements):
        if obstacle.rule is Rule.TOTAL and obstacle.subject == GPU:
            spec = replace(spec, gpus=tuple(range(max(1, requirements.gpu // UNIT))))
        elif obstacle.rule is Rule.TOTAL:
            name = obstacle.subject
            spec = replace(spec, total={**spec.total, name: dict(requirements.items)[name]})
        elif obstacle.rule is Rule.LABEL:
            term = next(term for term in requirements.terms if term.label == obstacle.subject)
            spec = replace(spec, labels={**spec.labels, term.label: term.values[0]})
        elif obstacle.rule is Rule.FILTER:
            assert requirements.node_filters[0].text == "labels.zone = 'a'"
            spec = replace(spec, labels={**spec.labels, "zone": "a"})
    return spec
