"""Decoding that ignores the fields which a newer minor version has added, at any depth.

Requests are messages that refuse unknown fields, so that a typing error is an error. The same types are
inside of records, replies and events, and those come from components that may be one minor version ahead.
Only what does not decode as it is takes the slow way here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_PATH = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")


class TolerantDecoder(Generic[T]):
    """A decoder of msgpack (or JSON) that ignores unknown fields of every type inside."""

    def __init__(self, type_: type[T], *, json: bool = False) -> None:
        self._type = type_
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
        return convert_known(self._untyped(raw), self._type)


def convert_known(document: Any, type_: type[T]) -> T:
    """Return a document of plain values as ``type_``, without the fields that it does not know."""
    try:
        return msgspec.convert(document, type_, str_keys=True)
    except msgspec.ValidationError as error:
        if UNKNOWN.search(str(error)) is None:
            raise
    # All of them in one pass: a conversion for each would take for ever where a peer sends many.
    of_type: Any = type_
    return msgspec.convert(_known(document, _info(of_type)), type_, str_keys=True)


@functools.cache
def _info(type_: Any) -> inspect.Type:
    return inspect.type_info(type_)


def _known(value: Any, kind: inspect.Type) -> Any:
    """Return ``value`` without what ``kind`` has no field for; what does not fit it stays as it is."""
    match kind:
        case inspect.Metadata():
            return _known(value, kind.type)
        case inspect.UnionType():
            member = _member(value, kind)
            return value if member is None else _known(value, member)
        case inspect.StructType(array_like=True) if isinstance(value, list):
            given = value[1:] if kind.tag is not None else value
            fields = [_known(one, f.type) for one, f in zip(given, kind.fields, strict=False)]
            return [*value[: len(value) - len(given)], *fields, *given[len(fields) :]]
        case inspect.StructType() if isinstance(value, dict):
            known = {
                f.encode_name: _known(value[f.encode_name], f.type)
                for f in kind.fields
                if f.encode_name in value
            }
            if kind.tag_field is not None and kind.tag_field in value:
                known[kind.tag_field] = value[kind.tag_field]
            return known
        case inspect.DictType() if isinstance(value, dict):
            return {key: _known(one, kind.value_type) for key, one in value.items()}
        case inspect.ListType() | inspect.VarTupleType() if isinstance(value, list):
            return [_known(one, kind.item_type) for one in value]
        case inspect.TupleType() if isinstance(value, list):
            known_items = [_known(*pair) for pair in zip(value, kind.item_types, strict=False)]
            return [*known_items, *value[len(known_items) :]]
    return value


def _member(value: Any, union: inspect.UnionType) -> inspect.Type | None:
    """Return the type of a union that ``value`` is to be, as its shape and its tag say."""
    lists = inspect.ListType | inspect.VarTupleType | inspect.TupleType
    for one in union.types:
        kind = one.type if isinstance(one, inspect.Metadata) else one
        if isinstance(kind, inspect.StructType):
            shaped = isinstance(value, list if kind.array_like else dict)
            if shaped and (kind.tag is None or _tag_of(value, kind) == kind.tag):
                return kind
        elif isinstance(kind, inspect.DictType):
            if isinstance(value, dict):
                return kind
        elif isinstance(kind, lists) and isinstance(value, list):
            return kind
    return None


def _tag_of(value: Any, kind: inspect.StructType) -> object:
    if kind.array_like:
        return value[0] if value else None
    return value.get(kind.tag_field)


def steps_to(
    text: str, document: object, type_: Any, *, lax: bool = False
) -> tuple[str, list[str]]:
    """Return what a msgspec error says, without its path, and the steps of that path in ``document``.

    ``[...]`` in it (some member of a mapping) is found by trying some of them.
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
            # Alone, so that no other member with the same fault is taken for it below.
            document = _with(document, steps, {key: at[key]})
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
    """Return the first key whose member raises ``text``, by halves: each try is a whole conversion."""

    def fails(count: int) -> bool:
        some = _with(document, steps, {key: mapping[key] for key in keys[:count]})
        try:
            msgspec.convert(some, type_, strict=not lax)
        except msgspec.ValidationError as error:
            return str(error) == text
        return False

    keys = list(mapping)
    good, bad = 0, len(keys)
    if not fails(bad):
        return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return keys[good]


def _with(document: Any, steps: list[str], value: object) -> Any:
    """Copy ``document`` with the member at ``steps`` replaced by ``value``."""
    if not steps:
        return value
    head, rest = steps[0], steps[1:]
    if isinstance(document, list):
        index = int(head)
        return [_with(v, rest, value) if i == index else v for i, v in enumerate(document)]
    return {k: _with(v, rest, value) if str(k) == head else v for k, v in document.items()}
