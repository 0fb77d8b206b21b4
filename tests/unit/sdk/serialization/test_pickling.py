"""Values as bytes and back: what goes in comes out, and what cannot says why."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.exceptions import SerializationError
from stoker.runtime.serialization.pickling import pack, unpack, unpack_plain

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    packed = pack(value, what="value")
    assert unpack(packed.data, packed.buffers, what="value") == value


class Node:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def looped() -> Any:
    node = Node(None)
    node.inner = [node, threading.Lock()]
    return node


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: threading.Lock(), "value cannot"),
        (lambda: [1, {"k": threading.Lock()}], r"value\[1\]\['k'\]"),
        (lambda: Node(Node((1, threading.Lock()))), r"value\.inner\.inner\[1\]"),
        (looped, r"value\.inner\[1\]"),
    ],
    ids=["itself", "nested", "attributes", "loop"],
)
def test_the_member_at_fault_is_named_by_its_path(make: Any, path: str) -> None:
    with pytest.raises(SerializationError, match=path):
        pack(make(), what="value")


def test_an_error_that_is_not_the_values_is_passed_on() -> None:
    """As that of a signal's handler, which may come at any moment."""

    class Interrupted:
        rang = False

        def __reduce__(self) -> tuple[type, tuple[()]]:
            if not self.rang:
                self.rang = True
                raise TimeoutError("the alarm rang")
            return dict, ()

    with pytest.raises(TimeoutError, match="alarm"):
        pack([Interrupted()], what="value")


class RingsOnce:
    rang = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not RingsOnce.rang:
            RingsOnce.rang = True
            raise TimeoutError("the alarm rang")


def test_nor_is_one_while_a_value_is_read() -> None:
    value = RingsOnce()
    value.x = 1  # type: ignore[attr-defined]
    packed = pack(value, what="value")
    with pytest.raises(TimeoutError, match="alarm"):
        unpack(packed.data, packed.buffers, what="value")


@pytest.mark.parametrize("value", [(True, b"{}"), (False, b"x" * 100_000), [1, "a", {"b": None}]])
def test_a_plain_value_is_read_without_any_code(value: object) -> None:
    packed = pack(value, what="value")
    assert unpack_plain(packed.data, packed.buffers, what="value") == value


@pytest.mark.parametrize("value", [print, pathlib.PurePath("x"), {1: ValueError("x")}])
def test_a_value_that_needs_code_is_not_read_as_a_plain_one(value: object) -> None:
    packed = pack(value, what="value")
    with pytest.raises(SerializationError, match=r"value is not of plain types"):
        unpack_plain(packed.data, packed.buffers, what="value")
