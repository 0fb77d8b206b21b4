"""The state machine of nodes: silence decides, and the dead stay dead."""

from __future__ import annotations

import msgspec
import pytest

from stoker_gcs.registry.nodes import rules as nodes
from stoker_wire.errors import FencedError
from stoker_wire.messages.cluster import Device, NodeState, RegisterNode
from stoker_wire.messages.events import EventKind


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (0.0, NodeState.ALIVE),
        (2.9, NodeState.ALIVE),
        (3.0, NodeState.SUSPECT),
        (10, NodeState.DEAD),
    ],
)
def test_silence_decides_the_state_of_a_node(silent_s: float, state: NodeState) -> None:
    body = RegisterNode(
        node_id="n_1", url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
    )
    node = nodes.registered(body, None, 1.0)
    assert nodes.verdict(node, silent_s, suspect_after_s=3, dead_after_s=10) is state
    dead = nodes.moved(node, NodeState.DEAD, incarnation=1, reason="r", heartbeat_at_s=1.0)
    assert dead is not None
    assert nodes.verdict(dead.record, 0.0, suspect_after_s=3, dead_after_s=10) is NodeState.DEAD
    for to in NodeState:
        assert nodes.moved(dead.record, to, incarnation=1, reason="", heartbeat_at_s=2.0) is None
    assert nodes.registered(body, dead.record, 5.0).incarnation == 2
    with pytest.raises(FencedError):
        nodes.check_incarnation(dead.record, 1)


def test_terminal_states_have_no_way_out() -> None:
    assert nodes.TRANSITIONS[NodeState.DEAD] == frozenset()


def test_gpus_that_are_quarantined_or_come_back_are_events() -> None:
    gpus = (Device(index=0, uuid="a", name="g"), Device(index=1, uuid="b", name="g"))
    body = RegisterNode(
        node_id="n_1",
        url="u",
        unix="",
        hostname="h",
        host_id="h",
        pid=1,
        resources={},
        devices=gpus,
    )
    node = nodes.registered(body, None, 1.0)
    assert nodes.with_devices(node, gpus, incarnation=1) is None
    stuck = (msgspec.structs.replace(gpus[0], quarantine="stuck"), gpus[1])
    assert nodes.with_devices(node, stuck, incarnation=2) is None, "of another life"
    told = nodes.with_devices(node, stuck, incarnation=1)
    assert told is not None and told.kind is EventKind.GPU_QUARANTINED
    assert told.record.devices == stuck
    back = nodes.with_devices(told.record, gpus, incarnation=1)
    assert back is not None and back.kind is EventKind.GPU_RELEASED
    dead = msgspec.structs.replace(node, state=NodeState.DEAD)
    assert nodes.with_devices(dead, stuck, incarnation=1) is None
