"""What only a lost node could run waits until that has had the time to come back."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.lost_nodes import awaited
from tests.unit.scheduler.core_driver import POLICY, Core, of

BIG = {"CPU": 8.0}


def lose(core: Core, node_id: str) -> None:
    core.feed(ev.NodeLost(at_s=core.at_s, node_id=node_id))


def test_what_only_a_lost_node_could_run_starts_when_it_comes_back() -> None:
    core = Core({"CPU": 1}, BIG)
    lose(core, "n_2")
    request = core.ask(CPU=4, wait_s=500)
    assert not of(cmd.Reject, core.wait(POLICY.node_return_s - 5))
    text = explain(core.state, make_requirements({"CPU": 4}), "").remedy
    assert text.startswith("none if n_2 comes back, which was lost 55 s ago; else start a node")
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_2", BIG, incarnation=2)))
    assert core.granted(request)
    assert not core.state.lost_nodes


def test_it_is_rejected_when_the_node_does_not_come_back() -> None:
    core = Core({"CPU": 1}, BIG)
    lose(core, "n_2")
    request = core.ask(CPU=4, wait_s=500)
    never = core.ask(CPU=9, wait_s=500)
    (reject,) = of(cmd.Reject, core.wait(POLICY.infeasible_grace_s + 1))
    assert reject.request_id == never, "that node could not run it either"
    (reject,) = of(cmd.Reject, core.wait(POLICY.node_return_s))
    assert (reject.request_id, reject.reason) == (request, cmd.RejectReason.INFEASIBLE)
    assert "comes back" not in reject.text


def test_the_last_node_of_a_cluster_may_come_back_too() -> None:
    core = Core(BIG)
    core.wait(1)
    lose(core, "n_1")
    core.ask(CPU=4, wait_s=500)
    assert not of(cmd.Reject, core.wait(POLICY.node_return_s - 1))
    assert of(cmd.Reject, core.wait(2))


def test_a_group_waits_for_the_node_that_it_needs_beside_the_others() -> None:
    core = Core(BIG, BIG)
    gang = make_gang([make_requirements(BIG)] * 2, GangStrategy.STRICT_SPREAD)
    lose(core, "n_2")
    lost = awaited(core.state, gang)
    assert lost is not None and lost.node.node_id == "n_2"
    assert awaited(fork(core.state), gang) is not None
    three = make_gang([make_requirements(BIG)] * 3, GangStrategy.STRICT_SPREAD)
    assert awaited(core.state, three) is None
