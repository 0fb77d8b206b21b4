"""The broadcast tree: who pulls from whom."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from stoker_nodelet.transfer.broadcast_tree import BroadcastTree
from stoker_wire.messages.objects import ObjectSource

HOME = ObjectSource(node_id="n_home", url="http://home")


def source(name: str) -> ObjectSource:
    return ObjectSource(node_id=f"n_{name}", url=f"http://{name}")


def test_pullers_beyond_the_fan_out_are_sent_to_those_before_them() -> None:
    tree = BroadcastTree()
    upstream = [tree.assign("o_1", HOME, source(f"{i}"), (), 0.0)[0].node_id for i in range(7)]
    assert upstream == ["n_home", "n_home", "n_0", "n_0", "n_1", "n_1", "n_2"]
    assert tree.assign("o_2", HOME, source("9"), (), 0.0)[0] == HOME


def test_who_has_a_whole_copy_is_a_source_and_no_load() -> None:
    tree = BroadcastTree()
    for name in ("0", "1"):
        tree.assign("o_1", HOME, source(name), (), 0.0)
        tree.end_pull("o_1", f"n_{name}", whole=True, now_s=0.0)
    found = tree.assign("o_1", HOME, source("2"), (), 1000.0)
    assert [one.node_id for one in found] == ["n_home", "n_0", "n_1"]
    assert tree.forget(["o_1", "o_unknown"]) == {
        "http://0": ["o_1"], "http://1": ["o_1"], "http://2": ["o_1"]
    }  # fmt: skip
    assert tree.forget(["o_1"]) == {}


def test_who_failed_or_fell_silent_is_no_source_and_no_load() -> None:
    tree = BroadcastTree()
    for name in ("0", "1", "2"):
        tree.assign("o_1", HOME, source(name), (), 0.0)
    again = tree.assign("o_1", HOME, source("2"), ("n_0",), 1.0)
    assert "n_0" not in [one.node_id for one in again]
    tree.end_pull("o_1", "n_1", whole=False, now_s=2.0)
    late = tree.assign("o_1", HOME, source("3"), (), 1000.0)
    assert [one.node_id for one in late] == ["n_home"]


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6)), st.booleans())))
@example(
    [(1, set(), 0), (0, set(), 0), (2, {0, 1}, 0), (3, set(), 1), (3, set(), 0), (1, {0, 1, 2}, 0)]
)
def test_nobody_ever_waits_for_itself(
    asks: list[tuple[int, set[int], bool]],
) -> None:
    tree = BroadcastTree()
    upstream: dict[str, str] = {}
    for at, (number, failed, ends) in enumerate(asks):
        node_id = f"n_{number}"
        found = tree.assign("o_1", HOME, source(f"{number}"), [f"n_{i}" for i in failed], float(at))
        ids = [one.node_id for one in found]
        assert node_id not in ids and "n_home" in ids and len(ids) == len(set(ids))
        upstream[node_id] = ids[0]
        if ends:
            tree.end_pull("o_1", node_id, whole=True, now_s=float(at))
            upstream[node_id] = "n_home"
        for begin in upstream:
            seen, one = set(), begin
            while one != "n_home":
                assert one not in seen, f"{begin} waits for itself: {upstream}"
                seen.add(one)
                one = upstream.get(one, "n_home")
