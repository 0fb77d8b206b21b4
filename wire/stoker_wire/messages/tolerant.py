"""Decoding that ignores the fields which a newer minor version has added, at any depth.

Requests are messages that refuse unknown fields, so that a typing error is an error. The same types are
inside of records, replies and events, and those come from components that may be one minor version ahead.
Only what does not decode as it is takes the slow way here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

UNKNOWN = re.compile(r"unknown field `([^`]*)`")
MOST_UNKNOWN = 10_000
_PATH = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")


class TolerantDecoder(Generic[T]):
    """A decoder of msgpack (or JSON) that ignores unknown fields of every type inside, ``most`` of them."""

    def __init__(self, type_: type[T], *, json: bool = False, most: int = MOST_UNKNOWN) -> None:
        self._type = type_
        self._most = most
        self._typed: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T] = (
            msgspec.json.Decoder(type_) if json else msgspec.msgpack.Decoder(type_)
        )
        self._untyped = msgspec.json.decode if json else msgspec.msgpack.decode

    def decode(self, raw: bytes) -> T:
        """Return the object; ValidationError if it is none, unknown fields aside."""
        try:
            return self._typed.decode(raw)
        except msgspec.ValidationError as error:
            if UNKNOWN.search(str(error)) is None:
                raise
        return convert_known(self._untyped(raw), self._type, self._most)


def convert_known(document: Any, type_: type[T], most: int = MOST_UNKNOWN) -> T:
    """Return a document of plain values as ``type_``, without the fields that it does not know.

    Each costs a pass, so ``most`` bounds them; more are a ValidationError.
    """
    while True:
        try:
            return msgspec.convert(document, type_, str_keys=True)
        except msgspec.ValidationError as error:
            unknown = UNKNOWN.search(str(error))
            if unknown is None or most == 0:
                raise
            most -= 1
            _, steps = steps_to(str(error), document, type_)
            document = _without(document, [*steps, unknown.group(1)])


def _without(document: Any, steps: list[str]) -> Any:
    """Copy ``document`` without the member at ``steps``."""
    head, rest = steps[0], steps[1:]
    if isinstance(document, list | tuple):
        index = int(head)
        return [_without(v, rest) if i == index else v for i, v in enumerate(document)]
    if not rest:
        return {k: v for k, v in document.items() if k != head}
    return {k: _without(v, rest) if str(k) == head else v for k, v in document.items()}


def steps_to(
    text: str, document: object, type_: Any, *, lax: bool = False
) -> tuple[str, list[str]]:
    """Return what a msgspec error says, without its path, and the steps of that path in ``document``.

    ``[...]`` in it (some member of a mapping) is found by trying each alone.
    """
    path = _PATH.search(text)
    if path is None:
        return text, []
    return text[: path.start()], _steps(path.group(1), document, type_, text, lax)


def _steps(path: str, document: object, type_: Any, text: str, lax: bool) -> list[str]:
    steps: list[str] = []
    at: Any = document
    for name, index, some in _STEP.findall(path):
        if some:
            if not isinstance(at, dict):
                break
            key = _culprit(document, steps, at, type_, text, lax)
            if key is None:
                break
            steps.append(str(key))
            at = at[key]
            continue
        step = name or index
        steps.append(step)
        try:
            at = at[int(index)] if index else at[name]
        except (KeyError, IndexError, TypeError):
            at = None
    return steps


def _culprit(
    document: object, steps: list[str], mapping: Mapping[Any, Any], type_: Any, text: str, lax: bool
) -> Any:
    for key in list(mapping)[:1000]:
        alone = _with(document, steps, {key: mapping[key]})
        try:
            msgspec.convert(alone, type_, strict=not lax)
        except msgspec.ValidationError as error:
            if str(error) == text:
                return key
    return None


def _with(document: Any, steps: list[str], value: object) -> Any:
    """Copy ``document`` with the member at ``steps`` replaced by ``value``."""
    if not steps:
        return value
    head, rest = steps[0], steps[1:]
    if isinstance(document, list):
        index = int(head)
        return [_with(v, rest, value) if i == index else v for i, v in enumerate(document)]
    return {k: _with(v, rest, value) if str(k) == head else v for k, v in document.items()}
