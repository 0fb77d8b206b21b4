"""Quarantined GPUs, MIG slices and topology in the state machine."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import NodeSpec, make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.model.topology import make_topology
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.feasibility import NodeFit
from tests.unit.scheduler.core_driver import Core, of

GIB = 1 << 30
STUCK = "9.1 GiB are still allocated by pid 4711"


def spec(gpus: int, **more: object) -> NodeSpec:
    return make_node_spec("n_3", {"CPU": 8.0, "GPU": float(gpus)}, **more)  # type: ignore[arg-type]


def joined(core: Core, gpus: int, **more: object) -> None:
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=spec(gpus, **more)))


def changed(core: Core, gpus: int, **more: object) -> None:
    core.feed(ev.NodeChanged(at_s=core.at_s, spec=spec(gpus, **more)))


def devices_of(core: Core, request_id: str) -> list[int]:
    return [i for lease in core.granted(request_id) or () for i in core.state.leases[lease].gpus]


def why(core: Core, **resources: float) -> str:
    told = explain(core.state, make_requirements(resources), "")
    return told.summary + told.verdicts[0].detail + told.remedy


def test_a_quarantined_gpu_is_given_to_nobody_and_explained() -> None:
    core = Core()
    joined(core, 4)
    assert devices_of(core, core.ask(GPU=1)) == [0]
    changed(core, 4, quarantined={0: "XID 79", 2: STUCK})
    assert devices_of(core, core.ask(GPU=0.5)) == [1]
    assert devices_of(core, core.ask(GPU=1)) == [3]
    waits = core.ask(GPU=1)
    assert core.granted(waits) is None
    assert not of(cmd.Reject, core.out), "it may come back"
    text = why(core, GPU=1)
    assert "0 of 4 devices are wholly free; GPU 0 of n_3 is quarantined: XID 79; " in text
    assert f"; GPU 2 of n_3 is quarantined: {STUCK}" in text
    assert "or a quarantined GPU must come back" in text
    changed(core, 4, quarantined={0: "XID 79"})
    assert devices_of(core, waits) == [2], "what waited is woken"
    core.release(*core.state.leases)
    assert core.state.nodes["n_3"].devices.free_units == 3 * UNIT
    changed(core, 4)
    assert core.state.nodes["n_3"].devices.free_units == 4 * UNIT


def test_a_bundle_does_not_lend_its_quarantined_gpu() -> None:
    core = Core()
    joined(core, 2)
    core.group("PACK", {"GPU": 2})
    inside = make_requirements({"GPU": 1}, group_id="pg_1", bundle=0)
    changed(core, 2, quarantined={0: STUCK})
    other = make_gang([make_requirements({"GPU": 2})], GangStrategy.PACK)
    assert explain(core.state, other, "").fit is NodeFit.BUSY
    assert devices_of(core, core.ask(requirements=inside)) == [1]
    waits = core.ask(requirements=inside)
    assert core.granted(waits) is None
    changed(core, 2)
    assert devices_of(core, waits) == [0]


def test_slices_serve_memory_and_parts_and_whole_counts_only_alone() -> None:
    core = Core()
    memory = {0: 80 * GIB, 8: 10 * GIB, 9: 20 * GIB}
    joined(core, 3, device_indices=tuple(memory), device_memory=memory, mig_slices=(8, 9))
    assert devices_of(core, core.ask(gpu_memory=8.0 * GIB)) == [8], "the least is left over"
    assert devices_of(core, core.ask(GPU=1)) == [0], "the whole GPU"
    assert core.granted(core.ask(GPU=1)) is None
    assert explain(core.state, make_requirements({"GPU": 2}), "").fit is NodeFit.NEVER


def test_on_a_node_of_slices_alone_a_lease_gets_one() -> None:
    core = Core()
    joined(core, 2, device_indices=(8, 9), mig_slices=(8, 9))
    assert devices_of(core, core.ask(GPU=1)) == [8]
    assert "only MIG slices, of which a program can use one" in why(core, GPU=2)
    core.group("PACK", {"GPU": 1})
    core.group("STRICT_PACK", {"GPU": 2}, group_id="pg_2")
    held = [lease.gpus for lease in core.state.leases.values() if lease.kind is ev.Kind.BUNDLE]
    assert held == [{9: UNIT}]


def test_a_lease_of_more_gpus_goes_where_they_are_near() -> None:
    core = Core({"CPU": 8.0, "GPU": 4.0})
    topology = make_topology({0: {1: "nvlink"}, 2: {3: "nvlink"}})
    joined(core, 4, topology=topology)
    assert devices_of(core, core.ask(GPU=1))
    pair = core.ask(GPU=2)
    (lease_id,) = core.granted(pair) or ()
    assert core.state.leases[lease_id].node_id == "n_3"
    assert devices_of(core, pair) in ([0, 1], [2, 3])


def test_whole_gpus_near_each_other_leave_the_one_that_a_part_needs() -> None:
    core = Core()
    memory = {0: 40 * GIB, 1: 40 * GIB, 2: 80 * GIB, 3: 80 * GIB}
    near = make_topology({2: {3: "nvlink"}})
    joined(core, 4, device_memory=memory, topology=near)
    core.group("STRICT_PACK", {"GPU": 1}, {"GPU": 1}, {"gpu_memory": 60.0 * GIB})
    shares = [lease.gpus for lease in core.state.leases.values()]
    assert len(shares) == 3 and all(shares), shares


def test_a_node_may_lose_a_gpu_that_a_lease_has() -> None:
    core = Core()
    joined(core, 2)
    leases = [(core.granted(core.ask(GPU=1)) or ("",))[0] for _ in range(2)]
    changed(core, 1)
    core.release(*leases)
    assert core.granted(core.ask(GPU=1))
