"""One valid value of any type of the wire, with all its members given: what mutations start from."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

_DEPTH = 6
_TEXTS = ("x", "0", "0" * 64)
"""One of these fits every pattern."""


def example_of(type_: Any) -> Any:
    """Return a value of ``type_`` as plain data is converted to it; ValidationError if none was found."""
    return msgspec.convert(_plain(inspect.type_info(type_), 0), type_, strict=False)


def _plain(kind: inspect.Type, depth: int) -> Any:
    match kind:
        case inspect.Metadata():
            return _plain(kind.type, depth)
        case inspect.UnionType(types=types):
            ranked = sorted(types, key=lambda one: isinstance(one, inspect.NoneType))
            return None if depth > _DEPTH and kind.includes_none else _plain(ranked[0], depth)
        case inspect.StructType(array_like=True):
            values = [_plain(field.type, depth + 1) for field in kind.fields]
            return values if kind.tag is None else [kind.tag, *values]
        case inspect.StructType():
            members = {
                field.encode_name: _plain(field.type, depth + 1)
                for field in kind.fields
                if field.required or depth <= _DEPTH
            }
            return members if kind.tag_field is None else {kind.tag_field: kind.tag, **members}
        case inspect.DictType():
            return {_plain(kind.key_type, depth + 1): _plain(kind.value_type, depth + 1)}
        case inspect.TupleType():
            return [_plain(one, depth + 1) for one in kind.item_types]
        case inspect.CollectionType():
            return [_plain(kind.item_type, depth + 1) for _ in range(max(1, kind.min_length or 0))]
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
    return _scalar(kind)


def _scalar(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StrType(pattern=str(pattern)):
            return next((one for one in _TEXTS if re.search(pattern, one)), _TEXTS[0])
        case inspect.StrType():
            return "x" * max(1, kind.min_length or 0)
        case inspect.BytesType():
            return b"x"
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            least = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + 1
            return max(1, least or 1)
        case inspect.AnyType() | inspect.NoneType():
            return None
    raise TypeError(f"no example of {kind}")
