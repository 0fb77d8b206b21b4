"""Reservations: a large demand gets its node, and the rest of the node stays in use."""

from __future__ import annotations

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
