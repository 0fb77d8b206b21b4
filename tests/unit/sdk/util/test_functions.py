"""Functions of others as tasks, without a cluster: chunks, their errors, initializers, shares."""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import cloudpickle
import pytest

from stoker.exceptions import BadRequestError, TaskError, UnknownOptionError, WrongTypeError
from stoker.runtime.serialization.exceptions import decode_error
from stoker.util import functions
from stoker.util.functions import Chunk, Functions, Setup, Single, note_item


def odd(x: int) -> int:
    if x % 2 == 0:
        raise ValueError(f"{x} is even")
    return x


def test_a_chunk_has_its_results_or_raises_with_the_index_of_the_item() -> None:
    seconds, groups = Chunk(odd, None, star=False)(10, 3, (1, 3, 5))
    assert (seconds >= 0, groups) == (True, [[1, 3, 5]])
    with pytest.raises(ValueError, match="4 is even") as caught:
        Chunk(odd, None, star=False)(10, 3, (1, 3, 4))
    assert caught.value.item_index == 12  # type: ignore[attr-defined]
    assert Chunk(pow, None, star=True)(0, 2, ((2, 3), (3, 2)))[1] == [[8, 9]]


def test_chunks_that_came_together_fail_one_by_one() -> None:
    _, groups = Chunk(odd, None, star=False)(0, 2, (1, 3, 5, 6, 7))
    assert (groups[0], groups[2]) == ([1, 3], [7])
    assert not isinstance(groups[1], list)
    error = decode_error(groups[1])
    assert isinstance(error, ValueError) and isinstance(error, TaskError)
    assert error.item_index == 3  # type: ignore[attr-defined]
    assert "odd" in str(error)


def test_what_is_left_after_a_long_one_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "YIELD_S", -1.0)
    assert Chunk(odd, None, star=False)(0, 1, (1, 3, 5))[1] == [[1]]


def test_arguments_that_came_as_values_of_refs_are_items_too() -> None:
    assert Chunk(odd, None, star=False)(0, 2, (), 1, 3)[1] == [[1, 3]]


def test_wrapped_functions_travel_and_a_single_one_may_come_with_the_call() -> None:
    double = cloudpickle.loads(cloudpickle.dumps(Single(lambda x: 2 * x, None)))
    assert double(4) == 8
    assert Single(None, None)(pow, 2, exp=3) == 8


def test_an_initializer_runs_once_in_a_process() -> None:
    ran: list[int] = []
    setup = Setup(ran.append, (3,))
    call = Single(len, setup)
    assert call("ab") == 2 == call("cd")
    assert ran == [3]
    again = pickle.loads(pickle.dumps(Setup(math.sqrt, (4.0,))))
    again()
    assert again._id in Setup._done


def test_an_error_keeps_its_first_index() -> None:
    error = KeyError("x")
    note_item(error, 4, 9)
    note_item(error, 5)
    assert error.item_index == 4  # type: ignore[attr-defined]
    assert error.__notes__ == ["stoker: items 4..8 of the iterable"]


def test_functions_are_made_remote_once_unless_they_may_change() -> None:
    made = Functions({}, what="test")
    assert made.single(odd)[0] is made.single(odd)[0]
    assert made.chunk(odd) is made.chunk(odd)
    assert made.chunk(odd) is not made.chunk(odd, star=True)
    assert made.single(odd)[0].name == "odd"
    partial = functools.partial(pow, 2)
    assert made.single(partial) == (made.single(partial)[0], (partial,))
    assert made.chunk(partial) is not made.chunk(partial)
    for number in range(200):
        made.single(eval(f"lambda: {number}"))
    assert len(made._known) == functions._KEPT


@pytest.mark.parametrize(
    ("options", "joins"),
    [({}, True), ({"max_retries": 0}, False), ({"timeout": 3}, False), ({"max_calls": 2}, False)],
)
def test_what_is_counted_per_call_keeps_chunks_apart(options: Any, joins: bool) -> None:
    assert Functions(options, what="test").may_join is joins


def test_shares_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "cluster_cpus", lambda: 4)
    first, second = (Functions({}, what="test", max_workers=2) for _ in range(2))
    assert first._share is not None and second._share is not None
    assert first._share != second._share
    number = first._share.number
    first.close()
    first.close()
    third = Functions({}, what="test", max_workers=8)
    assert third._share is not None
    assert (third._share.number, third._share.max_leases) == (number, 8)
    assert (third._options.num_cpus, second._options.num_cpus) == (0.5, None)
    assert (third.workers, second.workers) == (8, 2)
    for one in (second, third):
        one.close()


def test_wrong_input_is_an_error_here() -> None:
    with pytest.raises(UnknownOptionError):
        Functions({"num_cpu": 1}, what="test")
    with pytest.raises(BadRequestError):
        Functions({}, what="test", max_workers=0)
    for wrong in ({"max_workers": "2"}, {"initializer": 3}):
        with pytest.raises(WrongTypeError):
            Functions({}, what="test", **wrong)  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError):
        Functions({}, what="test").chunk(3)  # type: ignore[arg-type]
