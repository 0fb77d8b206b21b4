"""Functions whose results the cluster owns: kept under a name, or in the cache that all jobs share.

They run in the worker in place of the user's function, and return a ``DetachedResult``, which leaves as the
location of a detached object: it is stored once, and read from there by all.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from stoker.exceptions import StokerError
from stoker.runtime import current
from stoker.runtime.objects.detached import DetachedResult, Durability
from stoker.runtime.process.current_task import current_task
from stoker.runtime.serialization.pickling import pack
from stoker_wire.messages.objects import CACHE_NAMESPACE, is_detached, new_detached_id


class DetachedFunction:
    """A function whose result outlives its caller, by the name of the task if that has one."""

    def __init__(self, function: Callable[..., Any], name: str, durability: Durability) -> None:
        self._function = function
        self._name = name
        self._durability = durability
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> DetachedResult:
        value = self._function(*args, **kwargs)
        task = current_task.get()
        assert task is not None
        # A retry of a task whose worker died behind this finds what the first attempt has stored.
        object_id = new_detached_id(task.task_id)
        detached = current.runtime().objects.detached
        packed = detached.packed(value)
        location = detached.store(
            object_id, packed, value, name=self._name, durability=self._durability
        )
        return DetachedResult(location, packed.nbytes)


class CachedFunction:
    """A function whose results are kept for all calls, of any job, with equal code and arguments."""

    def __init__(self, function: Callable[..., Any], durability: Durability) -> None:
        self._function = function
        self._durability = durability
        functools.update_wrapper(self, function)

    @functools.cached_property
    def _digest(self) -> bytes:
        return digest_of(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedFunction, (self._function, self._durability)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        detached = current.runtime().objects.detached
        key = self._key(args, kwargs)
        object_id = new_detached_id(key)
        location = detached.find(object_id)
        if location is not None:
            return DetachedResult(location, 0)
        value = self._function(*args, **kwargs)
        packed = pack(value, what="result")
        if any(not is_detached(ref.id) for ref in packed.refs):
            return value  # refs inside would not outlive their owners
        try:
            location = detached.store(
                object_id,
                packed,
                value,
                name=key,
                namespace=CACHE_NAMESPACE,
                durability=self._durability,
            )
        except StokerError:
            return value  # the quota has no room, or too few nodes: it is a result like others
        return DetachedResult(location, packed.nbytes)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        packed = pack((args, sorted(kwargs.items())), what="arguments")
        hashed = hashlib.blake2b(self._digest, digest_size=16)
        hashed.update(packed.data)
        for view in packed.buffers:
            hashed.update(view)
        return f"{self._function.__qualname__}-{hashed.hexdigest()}"


def digest_of(function: Callable[..., Any]) -> bytes:
    """Return a hash of a function's code, its defaults and what it closes over.

    It does not see the code of functions that it calls: who changes those gives another ``cache_key``.
    """
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(f"{function.__module__} {function.__qualname__} {sys.version_info[:2]}".encode())
    code = getattr(function, "__code__", None)
    if code is not None:
        _add_code(hashed, code)
        defaults = (
            getattr(function, "__defaults__", None),
            getattr(function, "__kwdefaults__", None),
        )
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        hashed.update(pack((defaults, cells), what="closure").data)
    return hashed.digest()


def _add_code(hashed: Any, code: CodeType) -> None:
    hashed.update(code.co_code)
    hashed.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(hashed, constant)
        else:
            hashed.update(repr(constant).encode())
