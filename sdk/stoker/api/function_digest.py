"""The hash of a function by which the cache of the cluster knows it: its code, and what the code refers to.

Equal functions have equal hashes in every process: nothing depends on addresses or hash order. It counts the
code of the function, its defaults and closure; the globals that it names, where they are plain data; and all
that of the functions and classes of the same module that are among them. It must not run any of that code.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from stoker.exceptions import StokerError
from stoker.runtime.serialization.pickling import pack

_MAX_PARTS = 1000
"""How many functions and classes count."""
_MAX_ITEMS = 100_000
"""How many items of containers are hashed one by one; a larger one is hashed as its pickle."""
_ATOMS = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, range, slice),
    *(PurePath, date, time, timedelta, Decimal),
)
"""Types whose repr says all."""
_SIZE = 16


def digest_of(function: Callable[..., Any]) -> bytes:
    """Return a hash of a function, its defaults, and what it closes over or names."""
    return _Digest(function).digest()


class _Digest:
    """The walk over a function and the parts of its module that it refers to, each once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._module = getattr(function, "__module__", "")
        self._numbers: dict[int, int] = {}
        self._parts: list[Any] = []
        self._items = 0
        self._open: set[int] = set()
        self._is_global = False
        """Whether the value at hand is a global: of those only plain data counts."""
        self._root = function

    def digest(self) -> bytes:
        """Return the hash; call it once."""
        name = getattr(self._root, "__qualname__", type(self._root).__qualname__)
        hashed = _hash(f"{self._module} {name} {sys.version_info[:2]}")
        if isinstance(self._root, FunctionType):
            self._number(self._root)
        else:
            hashed.update(self._of(self._root))
        for part in self._parts:  # which grows meanwhile
            of = self._of_class if isinstance(part, type) else self._of_function
            hashed.update(of(part))
        return bytes(hashed.digest())

    def _number(self, part: Any) -> int:
        """Have a function or class counted; return its number, or -1 for one that is too many."""
        number = self._numbers.get(id(part))
        if number is None and len(self._parts) < _MAX_PARTS:
            number = self._numbers[id(part)] = len(self._parts)
            self._parts.append(part)
        return -1 if number is None else number

    def _of_function(self, function: FunctionType) -> bytes:
        defaults = (function.__defaults__, function.__kwdefaults__)
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        hashed = _hash(function.__qualname__)
        hashed.update(self._of_code(function.__code__))
        self._is_global = False
        hashed.update(self._of(defaults))
        hashed.update(self._of(cells))
        self._is_global = True
        for name in sorted(set(_names(function.__code__))):
            if name in function.__globals__:
                hashed.update(name.encode())
                hashed.update(self._of(function.__globals__[name]))
        return bytes(hashed.digest())

    def _of_code(self, code: CodeType) -> bytes:
        hashed = _hash(repr((code.co_names, code.co_varnames, code.co_freevars)))
        hashed.update(code.co_code)
        hashed.update(code.co_exceptiontable)
        for constant in code.co_consts:
            nested = isinstance(constant, CodeType)
            hashed.update(self._of_code(constant) if nested else self._of(constant))
        return bytes(hashed.digest())

    def _of_class(self, cls: type) -> bytes:
        hashed = _hash(cls.__qualname__)
        hashed.update(self._of(cls.__bases__))
        for name, value in sorted(vars(cls).items()):
            if not name.startswith("__") or isinstance(value, FunctionType):
                hashed.update(name.encode())
                hashed.update(self._of(value))
        return bytes(hashed.digest())

    def _of(self, value: Any) -> bytes:
        """Return the hash of a value as far as it counts; of one that does not, the hash of its type."""
        kind = type(value)
        named = _hash(f"{kind.__module__} {kind.__qualname__}")
        if isinstance(value, Enum):
            value = (value.name, value.value)
        elif isinstance(value, _ATOMS):
            named.update(repr(value).encode())
            return bytes(named.digest())
        if id(value) in self._open:
            return bytes(named.digest())  # it contains itself
        self._open.add(id(value))
        try:
            for item in self._inside(value):
                named.update(item)
        finally:
            self._open.discard(id(value))
        return bytes(named.digest())

    def _inside(self, value: Any) -> Iterator[bytes]:
        """Yield the hashes of what a value consists of."""
        if isinstance(value, FunctionType | type):
            yield f"{value.__module__}.{value.__qualname__}".encode()
            if value.__module__ == self._module:
                yield str(self._number(value)).encode()
        elif isinstance(value, staticmethod | classmethod | MethodType):
            yield self._of(value.__func__)
        elif isinstance(value, property):
            yield self._of((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            yield self._of(value.func)
        elif isinstance(value, ModuleType | BuiltinFunctionType):
            yield value.__name__.encode()
        elif isinstance(value, re.Pattern):
            yield self._of((value.pattern, value.flags))
        elif isinstance(value, functools.partial):
            yield self._of((value.func, value.args, value.keywords))
        elif isinstance(value, dict):
            yield from self._each(value, (part for item in value.items() for part in item))
        elif isinstance(value, set | frozenset):
            yield from sorted(self._each(value, value))
        elif isinstance(value, list | tuple):
            yield from self._each(value, value)
        elif dataclasses.is_dataclass(value):
            yield from self._each(value, (getattr(value, one.name) for one in _fields(value)))
        elif type(value).__module__ == "numpy" or isinstance(value, bytearray):
            yield _pickled(value)
        elif (wrapped := getattr(value, "__dict__", {}).get("__wrapped__")) is not None:
            yield self._of(wrapped)
        elif not self._is_global:
            yield _pickled(value)

    def _each(self, container: Any, items: Iterable[Any]) -> Iterator[bytes]:
        self._items += len(container) if hasattr(container, "__len__") else 1
        if self._items > _MAX_ITEMS:
            yield _pickled(container)
            return
        for item in items:
            yield self._of(item)


def _hash(text: str) -> Any:
    return hashlib.blake2b(text.encode(), digest_size=_SIZE)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _fields(value: Any) -> tuple[Any, ...]:
    return tuple(one for one in dataclasses.fields(value) if hasattr(value, one.name))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is assigned later
        return None


def _pickled(value: Any) -> bytes:
    """Return the hash of a value's pickle, or nothing where it has none."""
    hashed = hashlib.blake2b(digest_size=_SIZE)
    try:
        packed = pack(value, what="value")
    except StokerError:
        return b""
    hashed.update(packed.data)
    for view in packed.buffers:
        hashed.update(view)
    return hashed.digest()
