"""JSON becomes arguments, and results become JSON, in the worker."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from stoker.exceptions import BadRequestError, SerializationError
from stoker.runtime.worker.json_calls import (
    FIELD,
    JsonFunction,
    JsonRequest,
    call_method,
    encode_request,
    encode_result,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def request(*args: Any, refs: tuple[int | str, ...] = (), **kwargs: Any) -> bytes:
    def raw(value: Any) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(value))

    named = {name: raw(value) for name, value in kwargs.items()}
    return encode_request(JsonRequest(tuple(map(raw, args)), named, refs))


def test_arguments_come_by_position_by_name_and_by_reference() -> None:
    function = JsonFunction(lambda *args, **kwargs: [args, kwargs, str(args[1])], "f")
    objects = ((True, b'{"a":1}'), (False, b"xyz"))
    data = request(1, None, refs=("k", 1), k=None)
    assert function(data, *objects) == (True, b'[[1,"eHl6"],{"k":{"a":1}},"b\'xyz\'"]')


def test_a_coroutine_and_an_async_generator_are_awaited() -> None:
    async def one(x: int) -> int:
        return x

    async def several(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    assert asyncio.run(JsonFunction(one, "one")(request(3))) == (True, b"3")
    assert asyncio.run(JsonFunction(several, "several")(request(3))) == (True, b"[0,1,2]")


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (None, b"null"),
        ({"a": (1, 2.5)}, b'{"a":[1,2.5]}'),
        (Point(1), b'{"x":1}'),
        (np.arange(3), b"[0,1,2]"),
        ({"n": np.int64(3)}, b'{"n":3}'),
        ((i for i in range(2)), b"[0,1]"),
    ],
)
def test_results_are_json(value: Any, json: bytes) -> None:
    assert encode_result(value, "f") == (True, json)


@pytest.mark.parametrize("value", [b"raw", bytearray(b"raw"), memoryview(b"raw")])
def test_bytes_stay_bytes(value: Any) -> None:
    assert encode_result(value, "f") == (False, b"raw")


@pytest.mark.parametrize("value", [object(), [{"deep": object()}], {(1, 2): 3}, "\ud800"])
def test_a_result_that_is_no_json_is_an_error_with_the_fix(value: Any) -> None:
    with pytest.raises(SerializationError, match=r"(?s)result of f .*no JSON.*return") as caught:
        encode_result(value, "f")
    assert caught.value.extra == {FIELD: "result"}


def test_wrong_arguments_are_the_callers_mistake_and_errors_of_the_code_its_own() -> None:
    def function(x: int) -> int:
        raise TypeError("of the code")

    with pytest.raises(BadRequestError, match="takes") as caught:
        JsonFunction(function, "f")(request())
    assert caught.value.extra == {FIELD: "args"}
    with pytest.raises(TypeError, match="of the code"):
        JsonFunction(function, "f")(request(1))


def test_a_method_of_an_instance_is_called() -> None:
    class Counter:
        def add(self, by: int) -> int:
            return by + 1

    assert call_method(Counter(), "add", request(2)) == (True, b"3")
