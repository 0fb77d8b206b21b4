"""The order of one caller's calls of one actor: seeded histories of a caller, an actor and its channels."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from stoker.runtime.actors.call_order import CallOrder


@dataclass(eq=False)
class Call:
    """A call: ``deps`` are the calls whose results it takes."""

    task_id: str
    number: int
    group: str = ""
    deps: tuple[Call, ...] = ()
    done: bool = False
    attempts: int = 0
    failures_left: int = 0
    cancelled: bool = False

    @property
    def is_ready(self) -> bool:
        return all(dep.done for dep in self.deps)


def call(number: int, group: str = "", *deps: Call) -> Call:
    return Call(f"t_{number}", number, group, deps)


def take(order: CallOrder[Call]) -> list[int]:
    return [c.number for c in order.take(lambda c: c.is_ready)]


def test_an_unready_call_holds_up_its_ordered_group_only() -> None:
    other = call(100)
    order: CallOrder[Call] = CallOrder({"many"})
    first, second = call(0, "", other), call(1, "")
    for each in (first, second, call(2, "one"), call(3, "many", other), call(4, "many")):
        order.append(each)
    assert take(order) == [2, 4]
    assert order.ahead_of(second) is first
    assert order.ahead_of(first) is None
    assert len(order) == 3
    other.done = True
    assert take(order) == [0, 1]
    assert not take(order)


def test_an_unordered_call_goes_once_it_is_settled() -> None:
    other = call(100)
    order: CallOrder[Call] = CallOrder({""})
    late = call(0, "", other)
    order.append(late)
    order.append(call(1))
    assert take(order) == [1]
    other.done = True
    order.mark_ready(late)
    assert take(order) == [0]
    assert not order


def test_a_call_that_is_tried_again_waits_behind_nobody() -> None:
    order: CallOrder[Call] = CallOrder()
    one = call(0)
    two = call(1, "", one)
    order.append(one)
    order.append(two)
    assert take(order) == [0]
    order.requeue([one])
    assert take(order) == [0]
    one.done = True
    assert take(order) == [1]


def test_the_dropped_are_skipped_wherever_they_are() -> None:
    other = call(100)
    order: CallOrder[Call] = CallOrder({"many"})
    calls = [call(0, "", other), call(1), call(2, "many", other), call(3, "x")]
    for each in calls[:3]:
        order.append(each)
    assert take(order) == []
    order.append(calls[3])
    for each in (calls[0], calls[2], calls[3]):
        order.drop(each)
    assert [c.number for c in order] == [1]
    assert order.ahead_of(calls[1]) is None
    assert take(order) == [1]
    assert not order
    order.append(call(4))
    order.requeue([call(5)])
    assert [c.number for c in order.drain()] == [5, 4]
    assert len(order) == 0


@dataclass
class World:
    """A caller, and an actor whose answers, failures, restarts and cuts come in any order."""

    random: random.Random
    order: CallOrder[Call]
    unordered: set[str]
    calls: list[Call] = field(default_factory=list)
    sent: list[Call] = field(default_factory=list)
    started: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    connected: bool = True

    def submit(self) -> None:
        known = self.random.sample(
            self.calls, min(len(self.calls), self.random.choice((0, 0, 1, 2)))
        )
        group = self.random.choice(("", "a", "b"))
        new = Call(f"t_{len(self.calls)}", len(self.calls), group, tuple(known))
        new.failures_left = self.random.choice((0, 0, 1, 3))
        self.calls.append(new)
        self.order.append(new)

    def pump(self) -> None:
        if not self.connected:
            return
        for each in self.order.take(self.is_ready):
            assert each.is_ready
            assert not each.cancelled
            assert each not in self.sent
            if not each.attempts:
                self.started.append(each)
            self.sent.append(each)

    def is_ready(self, each: Call) -> bool:
        if not each.is_ready and each not in self.waiting:
            self.waiting.append(each)
        return each.is_ready

    def answer(self) -> None:
        if not self.sent or not self.connected:
            return
        each = self.sent.pop(self.random.randrange(len(self.sent)))
        each.attempts += 1
        if each.failures_left and not each.cancelled:
            each.failures_left -= 1
            self.order.requeue([each])
        else:
            self.settle(each)

    def settle(self, each: Call) -> None:
        each.done = True
        for other in [c for c in self.waiting if c.is_ready]:
            self.waiting.remove(other)
            self.order.mark_ready(other)

    def cut(self) -> None:
        """The actor restarts: what it had is retried, once there is a channel."""
        self.connected = False
        for each in self.sent:
            each.attempts += 1
        self.order.requeue(self.sent)
        self.sent = []

    def cancel(self) -> None:
        waiting = list(self.order)
        if waiting:
            each = self.random.choice(waiting)
            each.cancelled = True
            self.order.drop(each)
            self.settle(each)

    def check(self) -> None:
        for group in ("", "a", "b"):
            if group not in self.unordered:
                numbers = [c.number for c in self.started if c.group == group]
                assert all(a < b for a, b in pairwise(numbers)), numbers
        inside = list(self.order)
        assert len(inside) == len(self.order) == len({c.number for c in inside})
        locations = {c.number for c in inside} | {c.number for c in self.sent}
        assert locations == {c.number for c in self.calls if not c.done}


@pytest.mark.parametrize("unordered", [(), ("a",), ("", "a", "b")])
@pytest.mark.parametrize("history", range(60))
def test_no_call_is_lost_overtaken_or_stuck(
    seed: int, history: int, unordered: tuple[str, ...]
) -> None:
    chance = random.Random(f"{seed}-{history}")
    world = World(chance, CallOrder(frozenset(unordered)), set(unordered))
    for _ in range(300):
        step = chance.choices(
            (world.submit, world.answer, world.cut, world.cancel), weights=(8, 10, 1, 1)
        )[0]
        step()
        if not world.connected and chance.random() < 0.3:
            world.connected = True
        world.pump()
        world.check()
    world.connected = True
    for _ in range(5 * len(world.calls) + 5):
        world.pump()
        world.check()
        world.answer()
    assert all(each.done for each in world.calls)
    assert not world.order
