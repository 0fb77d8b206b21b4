"""Reservations: a large demand gets its node, and the rest of the node stays in use."""

from __future__ import annotations

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.nodes import make_node_spec
from tests.unit.scheduler.core_driver import POLICY, Core


def test_a_large_demand_gets_a_node_reserved_for_it_and_starts() -> None:
    core = Core({"CPU": 4})
    small = list(core.granted(core.ask("p_1", count=4, CPU=1)) or ())
    big = core.ask("p_2", CPU=4, wait_s=500)
    for turn in range(80):
        core.wait(1)
        if core.granted(big):
            break
        core.release(small.pop(0)) if small else None
        more = core.ask(f"p_s{turn % 5}", CPU=1, wait_s=0.1)
        small += core.granted(more) or ()
    assert core.granted(big), "starved by smaller demands"


def test_a_node_reserved_for_its_gpu_still_takes_cpu_work() -> None:
    core = Core({"CPU": 4, "GPU": 1})
    core.ask("p_1", GPU=1)
    core.ask("p_2", GPU=1, wait_s=500)
    core.wait(POLICY.reserve_after_s + 1)
    assert core.state.reserved
    assert core.granted(core.ask("p_3", CPU=1))


def test_a_review_that_comes_early_does_not_forget_when_nodes_are_to_be_reserved() -> None:
    core = Core({"CPU": 4})
    core.ask(owner="gcs", count=4, CPU=1)
    core.at_s = 10.0
    core.ask(owner="gcs", job_id="job_2", CPU=4)
    core.at_s = 10.1
    core.feed(ev.NodeChanged(at_s=10.1, spec=make_node_spec("n_1", {"CPU": 4}, labels={"x": "1"})))
    while core.state.timers and core.at_s < 60.0 and not core.state.reserved:
        core.at_s = max(core.at_s, core.state.wake_at_s)
        core.feed(ev.Tick(at_s=core.at_s))
    assert core.state.reserved
