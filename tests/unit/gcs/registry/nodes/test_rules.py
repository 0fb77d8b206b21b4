"""The state machine of nodes: silence decides, and the dead stay dead."""

from __future__ import annotations

import msgspec
import pytest

from stoker_gcs.registry.nodes import rules as nodes
from stoker_wire.constraints.conditions import ConditionKind, NodeCondition
from stoker_wire.constraints.taints import parse_taint
from stoker_wire.errors import BadRequestError, ConflictError, FencedError
from stoker_wire.messages.cluster import (
    ChangeTaints,
    Cordon,
    Device,
    Drain,
    NodeState,
    RegisterNode,
)
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


def a_body(**more: object) -> RegisterNode:
    return RegisterNode(
        **{  # type: ignore[arg-type]
            "node_id": "n_1",
            "url": "u",
            "unix": "",
            "hostname": "h",
            "host_id": "h",
            "pid": 1,
            "resources": {},
            **more,
        }
    )


def test_a_cordon_lasts_until_it_is_lifted_and_over_a_new_registration() -> None:
    node = nodes.registered(a_body(), None, 1.0)
    assert nodes.uncordoned(node) is None
    told = nodes.cordoned(node, Cordon(by="ada", at_s=0.0, reason="disk"))
    assert told is not None and told.kind is EventKind.NODE_CORDONED
    assert nodes.cordoned(told.record, Cordon(by="bob", at_s=9.0)) is None, "the first counts"
    again = nodes.registered(a_body(), told.record, 5.0)
    assert again.incarnation == 2 and again.cordon is not None
    assert again.cordon.text == "cordoned by ada since 1970-01-01 00:00:00 UTC: disk"
    opened = nodes.uncordoned(again)
    assert opened is not None and opened.kind is EventKind.NODE_UNCORDONED
    assert opened.record.cordon is None
    dead = nodes.moved(node, NodeState.DEAD, incarnation=1, reason="r", heartbeat_at_s=1.0)
    assert dead is not None
    with pytest.raises(ConflictError, match="is dead"):
        nodes.cordoned(dead.record, Cordon(by="ada", at_s=0.0))


def test_taints_are_set_replaced_and_removed_by_key_and_effect() -> None:
    own = parse_taint("gpu=a100:NoSchedule")
    node = nodes.registered(a_body(taints=(own,)), None, 1.0)
    assert [(one.text, one.at_s) for one in node.taints] == [("gpu=a100:NoSchedule", 1.0)]
    assert nodes.tainted(node, ChangeTaints(add=("gpu=a100:NoSchedule",)), 5.0) is None
    told = nodes.tainted(node, ChangeTaints(add=("gpu=h200:NoSchedule", "gone:NoExecute")), 5.0)
    assert told is not None and told.kind is EventKind.NODE_TAINTED
    node = told.record
    assert {one.text: one.at_s for one in node.taints} == {
        "gpu=h200:NoSchedule": 5.0,
        "gone:NoExecute": 5.0,
    }
    assert nodes.registered(a_body(taints=(own,)), node, 9.0).taints[1].at_s == 5.0
    told = nodes.tainted(node, ChangeTaints(remove=("gpu-", "gone:NoSchedule-")), 6.0)
    assert told is not None
    assert [one.text for one in told.record.taints] == ["gone:NoExecute"]


@pytest.mark.parametrize(
    ("add", "remove", "words"),
    [
        (("gpu",), (), "has no effect"),
        (("gpu:Never",), (), "none of NoSchedule, PreferNoSchedule, NoExecute"),
        (("=a:NoSchedule",), (), "the key ''"),
        (("a=b c:NoSchedule",), (), "the value 'b c'"),
        ((), ("gpu",), "removes nothing"),
        ((), ("gpu=a-",), "by its key"),
    ],
)
def test_what_is_no_taint_is_refused(
    add: tuple[str, ...], remove: tuple[str, ...], words: str
) -> None:
    node = nodes.registered(a_body(), None, 1.0)
    with pytest.raises(BadRequestError, match=words):
        nodes.tainted(node, ChangeTaints(add=add, remove=remove), 2.0)


def test_a_drain_is_an_order_that_ends_with_the_node() -> None:
    body = RegisterNode(
        node_id="n_1", url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
    )
    node = nodes.registered(body, None, 1.0)
    order = Drain(by="ada", began_at_s=2.0, deadline_at_s=10.0, reason="disk")
    begun = nodes.draining(node, order)
    assert begun is not None and begun.kind == EventKind.NODE_DRAINING
    sooner = Drain(by="bob", began_at_s=3.0, deadline_at_s=5.0)
    again = nodes.draining(begun.record, sooner)
    assert again is not None and again.record.drain == msgspec.structs.replace(
        order, deadline_at_s=5.0
    )
    assert nodes.registered(body, again.record, 4.0).drain == again.record.drain, "it outlives that"
    target = nodes.hands_over(begun.record, "n_2")
    assert target is not None and target.record.objects_at == "n_2"
    assert nodes.hands_over(target.record, "n_2") is None
    assert nodes.left(target.record, 2, 6.0) is None, "of another life"
    gone = nodes.left(target.record, 1, 6.0)
    assert gone is not None and gone.kind == EventKind.NODE_DRAINED
    assert gone.record.state is NodeState.DEAD and gone.record.objects_at == "n_2"
    assert gone.record.drain is not None and gone.record.drain.ended_at_s == 6.0
    assert nodes.left(gone.record, 1, 7.0) is None
    with pytest.raises(ConflictError):
        nodes.draining(gone.record, order)
    assert nodes.registered(body, gone.record, 8.0).drain is None, "it was carried out"
    spared = nodes.uncordoned(target.record)
    assert spared is not None and spared.record.drain is None and spared.record.objects_at == ""
    assert nodes.hands_over(spared.record, "n_2") is None, "nothing is drained any more"


def test_conditions_are_recorded_since_when_and_cleared() -> None:
    body = RegisterNode(
        node_id="n_1", url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
    )
    short = NodeCondition(kind=ConditionKind.DISK_PRESSURE, reason="no room")
    node = nodes.registered(body, None, 1.0)
    begun = nodes.with_conditions(node, (short,), incarnation=1, now_s=5.0)
    assert begun is not None and begun.kind is EventKind.NODE_PRESSED
    assert [(one.kind, one.at_s) for one in begun.record.conditions] == [("DiskPressure", 5.0)]
    assert nodes.with_conditions(begun.record, (short,), incarnation=1, now_s=6.0) is None
    assert nodes.with_conditions(begun.record, (), incarnation=2, now_s=6.0) is None
    ended = nodes.with_conditions(begun.record, (), incarnation=1, now_s=7.0)
    assert ended is not None and ended.kind is EventKind.NODE_RELIEVED
    assert ended.record.conditions == ()
