"""The lineage table: a record lives as long as anything can be made again by it, and all fit a bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from stoker.runtime.objects.table import Entry
from stoker.runtime.tasks.lineage import Lineage
from stoker_wire.messages.data import Inline, Location, Stored


@dataclass
class Ref:
    _entry: Entry
    task_id: str


@dataclass
class Call:
    """A call that has ended, of a function with these options."""

    task_id: str
    deps: list[Any] = field(default_factory=list)
    nested: list[Any] = field(default_factory=list)
    args: Location = field(default_factory=lambda: Inline(b"a" * 100))
    parent_task_id: str = ""
    attempt: int = 0
    max_retries: int = 3
    actor_id: str = ""

    @property
    def spec(self) -> Any:
        return SimpleNamespace(
            options=SimpleNamespace(max_retries=self.max_retries),
            actor_id=self.actor_id,
            template=SimpleNamespace(streaming=False),
        )

    def result(self, index: int = 0) -> Any:
        """A ref to a stored result of it."""
        object_id = f"o{self.task_id[1:]}.{index}"
        return Ref(Entry(object_id, None, stored(object_id)), self.task_id)


def stored(object_id: str = "o_x") -> Stored:
    return Stored(1 << 20, "n_1", "http://n1", (), object_id)


def test_a_record_goes_with_the_last_of_its_results() -> None:
    lineage = Lineage(1 << 20)
    call = Call("t_1", args=stored("o_1.args"))
    assert lineage.keep(call, [stored(), stored(), Inline(b"small")])
    assert lineage.release("t_1") == []
    assert lineage.release("t_1") == [call.args], "its arguments are freed with it"
    assert lineage.release("t_1") == []
    assert (lineage.records, lineage.nbytes) == ({}, 0)


def test_what_a_result_was_made_from_is_known_while_the_result_lives() -> None:
    lineage = Lineage(1 << 20)
    first = Call("t_1")
    second = Call("t_2", deps=[first.result()])
    third = Call("t_3", nested=[second.result()])
    for call in (first, second, third):
        lineage.keep(call, [stored()])
    assert lineage.release("t_1") == []
    assert lineage.release("t_2") == []
    assert set(lineage.records) == {"t_1", "t_2", "t_3"}, "values are freed, their making is known"
    assert lineage.records["t_3"].depth == 3
    lineage.release("t_3")
    assert lineage.records == {}


def test_the_depth_of_a_task_is_its_longest_chain() -> None:
    lineage = Lineage(1 << 20)
    leaves = [Call(f"t_{i}") for i in range(5)]
    middle = Call("t_m", deps=[leaves[0].result()])
    top = Call("t_t", deps=[one.result() for one in leaves], nested=[middle.result()])
    for call in (*leaves, middle, top):
        lineage.keep(call, [stored()])
    assert [lineage.records[i].depth for i in ("t_0", "t_m", "t_t")] == [1, 2, 3]


def test_a_long_chain_is_let_go_without_recursion() -> None:
    lineage = Lineage(1 << 40)
    before = Call("t_0")
    lineage.keep(before, [stored()])
    for number in range(1, 50_000):
        call = Call(f"t_{number}", deps=[before.result()])
        lineage.keep(call, [stored()])
        lineage.release(before.task_id)
        before = call
    assert len(lineage.records) == 50_000
    assert lineage.records[before.task_id].depth == 50_000
    lineage.release(before.task_id)
    assert (lineage.records, lineage.nbytes) == ({}, 0)


def test_small_arguments_are_kept_as_values() -> None:
    lineage = Lineage(1 << 20)
    small = Ref(Entry("o_p", None, Inline(b"value")), "")
    lineage.keep(Call("t_1", deps=[small]), [stored()])
    [dep] = lineage.records["t_1"].deps
    assert (dep.inline, dep.task_id) == (Inline(b"value"), "")


def test_the_oldest_record_goes_when_there_are_too_many() -> None:
    lineage = Lineage(3_500)
    calls = [Call("t_1", args=stored("o_1.args"))]
    calls[0].args = Inline(b"")
    calls += [Call(f"t_{i}", deps=[calls[0].result()]) for i in (2, 3, 4)]
    freed: list[Location] = []
    for call in calls:
        lineage.keep(call, [stored()])
        freed += lineage.evict()
    assert list(lineage.records) == ["t_2", "t_3", "t_4"]
    assert freed == [calls[0].args]
    assert "t_1" in lineage.evicted
    for call in calls:
        lineage.release(call.task_id)
    assert (lineage.records, lineage.nbytes) == ({}, 0)


def test_a_generator_that_goes_on_keeps_its_record_and_its_arguments() -> None:
    lineage = Lineage(500)
    call = Call("t_1", args=stored("o_1.args"))
    for _ in range(3):
        lineage.keep_item(call)
        assert lineage.release("t_1") == [], "another attempt needs its arguments"
    lineage.keep_item(call)
    assert lineage.evict() == [] and set(lineage.records) == {"t_1"}
    call.attempt = 2
    assert lineage.end_items(call) == [], "an item is left"
    assert lineage.records["t_1"].attempt == 2
    assert lineage.release("t_1") == [call.args]
    assert (lineage.records, lineage.nbytes) == ({}, 0)


def test_the_arguments_of_a_generator_without_items_go_with_its_end() -> None:
    lineage = Lineage(1 << 20)
    small, large = Call("t_1", args=stored("o_1.args")), Call("t_2", args=stored("o_2.args"))
    lineage.keep_item(large)
    lineage.release("t_2")
    assert lineage.end_items(small) == (small.args,)
    assert lineage.end_items(large) == [large.args]
    assert (lineage.records, lineage.nbytes) == ({}, 0)


def test_what_must_not_run_twice_has_no_record() -> None:
    lineage = Lineage(1 << 20)
    assert not lineage.keep(Call("t_1", max_retries=0), [stored()])
    assert not lineage.keep(Call("t_2", actor_id="a_1"), [stored()])
    assert lineage.records == {}
