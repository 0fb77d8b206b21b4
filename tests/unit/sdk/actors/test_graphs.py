"""Graphs of calls: what is made, how often, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime.actors.graphs import ActorNode, CallNode, InputNode, MultiOutputNode


class Remote:
    """A remote function that runs at once, and notes its calls."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[Any] = []

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> CallNode:
        return CallNode(self, args, kwargs)


def test_a_shared_node_is_called_once_in_each_run() -> None:
    square, add = Remote(lambda x: x * x), Remote(lambda a, b: a + b)
    with InputNode() as given:
        shared = square.bind(given)
        graph = MultiOutputNode([add.bind(shared, b=shared), shared])
    assert [graph.execute(number) for number in (2, 3)] == [[8, 4], [18, 9]]
    assert len(square.calls) == 2


def test_nodes_inside_of_values_are_filled_in() -> None:
    total = Remote(lambda values, named: sum(values) + named["c"][0])
    one = Remote(lambda: 1)
    graph = total.bind([one.bind(), 2], named={"c": (one.bind(),)})
    assert graph.execute() == 4


def test_inputs_by_place_by_name_and_by_attribute() -> None:
    collect = Remote(lambda *values: values)
    given = InputNode()
    assert collect.bind(given[1], given.name).execute(1, 2, name=3) == (2, 3)
    assert collect.bind(given["x"], given[0]).execute({"x": 4, 0: 5}) == (4, 5)
    assert collect.bind(given.real).execute(7) == (7,)


@pytest.mark.parametrize(
    "part", [lambda given: given, lambda given: given[1], lambda given: given.b]
)
def test_an_input_that_was_not_given_is_named(part: Any) -> None:
    graph = Remote(lambda value: value).bind(part(InputNode()))
    with pytest.raises(BadRequestError, match="execute"):
        graph.execute()


def test_what_is_no_node_is_no_output() -> None:
    with pytest.raises(WrongTypeError, match="item 0 is a int"):
        MultiOutputNode([1])  # type: ignore[list-item]


def test_calls_of_an_actor_run_in_the_order_of_their_binding() -> None:
    class Handle:
        def __init__(self, value: int) -> None:
            self.value = value
            self.add = Remote(self._add)
            self.get = Remote(lambda: self.value)

        def _add(self, more: int) -> None:
            self.value += more

    actor: Any = ActorNode(Remote(Handle), (10,), {}, ("add", "get").__contains__)
    actor.add.bind(1)
    first = actor.get.bind()
    actor.add.bind(5)
    last = actor.get.bind()
    assert [first.execute(), last.execute(), last.execute()] == [11, 16, 16]
    assert MultiOutputNode([last, first]).execute() == [16, 11]
    with pytest.raises(AttributeError, match="nothing"):
        actor.nothing.bind()
