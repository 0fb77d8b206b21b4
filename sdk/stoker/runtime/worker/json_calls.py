"""The worker's half of calls by HTTP: JSON becomes arguments, and results become JSON, here and nowhere else.

So the user's types are known where they are converted, and who passes a call on carries bytes. A registered
function is wrapped in a :class:`JsonFunction`; a method of an actor is called by :func:`call_method`, which
any actor runs through ``__stoker_call__``. Both are pickled by reference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from stoker.exceptions import BadRequestError, SerializationError

JsonResult: TypeAlias = tuple[bool, bytes]
"""Whether it is JSON (else it is bytes as they are), and the bytes."""

FIELD = "field"
"""Of an error that goes to the caller: the field of the request that it names."""


class JsonRequest(msgspec.Struct, frozen=True):
    """The arguments of one call. ``refs`` has the positions and names of those that come as objects, in
    their order; ``null`` is in their places.
    """

    args: tuple[msgspec.Raw, ...] = ()
    kwargs: dict[str, msgspec.Raw] = {}
    refs: tuple[int | str, ...] = ()


class _Arguments(msgspec.Struct, frozen=True):
    """A :class:`JsonRequest` as the worker reads it."""

    args: list[Any]
    kwargs: dict[str, Any]
    refs: tuple[int | str, ...] = ()


_decode = msgspec.json.Decoder(_Arguments).decode
encode_request = msgspec.json.Encoder().encode


class JsonFunction:
    """A function that takes the bytes of a :class:`JsonRequest`, and returns a :data:`JsonResult`."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonFunction, (self._function, self._name)

    def __call__(self, request: bytes, *objects: JsonResult) -> Any:
        """Return the result, or a coroutine of it."""
        return _call(self._function, self._name, request, objects)


def call_method(instance: object, method: str, request: bytes, *objects: JsonResult) -> Any:
    """Call a method of an actor's instance; return its result as :class:`JsonFunction` does."""
    name = f"{type(instance).__name__}.{method}"
    return _call(getattr(instance, method), name, request, objects)


def _call(
    function: Callable[..., Any], name: str, request: bytes, objects: tuple[JsonResult, ...]
) -> Any:
    arguments = _decode(request)
    args, kwargs = arguments.args, arguments.kwargs
    for where, (is_json, data) in zip(arguments.refs, objects, strict=True):
        value = msgspec.json.decode(data) if is_json else data
        if isinstance(where, int):
            args[where] = value
        else:
            kwargs[where] = value
    try:
        value = function(*args, **kwargs)
    except TypeError:
        _check_signature(function, name, args, kwargs)
        raise
    if inspect.isawaitable(value):
        return _encode_awaited(value, name)
    if isinstance(value, AsyncIterator):
        return _encode_all(value, name)
    return encode_result(value, name)


def _check_signature(
    function: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Raise if arguments do not fit a function: then a TypeError was the caller's mistake."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C that does not tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BadRequestError(
            f"args: {name} takes {signature}\n{error}", extra={FIELD: "args"}
        ) from None


async def _encode_awaited(value: Any, name: str) -> JsonResult:
    return encode_result(await value, name)


async def _encode_all(values: AsyncIterator[Any], name: str) -> JsonResult:
    return encode_result([value async for value in values], name)


def encode_result(value: Any, name: str) -> JsonResult:
    """Return a result as it goes out: bytes as they are, all else as JSON.

    What a generator yields is an array. Arrays of NumPy and tensors are lists of numbers. SerializationError
    names a type that is no JSON, and the fix.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return False, bytes(value)
    if isinstance(value, Iterator):
        value = list(value)
    try:
        return True, msgspec.json.encode(value, enc_hook=functools.partial(_plain, name))
    except SerializationError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SerializationError(
            f"the result of {name} is no JSON\n{error}; {_FIX}", extra={FIELD: "result"}
        ) from None


_FIX = "return numbers, texts, lists, mappings with texts as keys, dataclasses, or bytes"


def _plain(name: str, value: Any) -> Any:
    """Return a value that msgspec does not know as one that it does."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list) and hasattr(value, "dtype"):
        return to_list()
    kind = type(value)
    if isinstance(value, Iterator):
        return list(value)
    raise SerializationError(
        f"the result of {name} holds a {kind.__module__}.{kind.__qualname__}, which is no JSON\n{_FIX}",
        extra={FIELD: "result"},
    )
