"""Functions whose results the cluster owns: kept under a name, or in the cache that all jobs share.

They run in the worker in place of the user's function, and return a ``DetachedResult``, which leaves as the
location of a detached object: it is stored once, and read from there by all.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from stoker.api.function_digest import digest_of
from stoker.exceptions import StokerError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.objects.detached import DetachedResult, Durability
from stoker.runtime.options.checks import short_text
from stoker.runtime.process.current_task import current_task
from stoker.runtime.serialization.pickling import pack
from stoker_wire.messages.common import MAX_NAME
from stoker_wire.messages.objects import is_detached, new_detached_id

_MAX_SHOWN = MAX_NAME // 2
"""How much of a function's name is in the name of its results."""


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
    """A function whose results are kept for all calls, of any job, with an equal key.

    The key is a hash of the code and the arguments, or what the user gives: a text, or a function of the
    arguments that returns one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        durability: Durability,
        key: str | Callable[..., Any] | None = None,
    ) -> None:
        self._function = function
        self._durability = durability
        self._own_key = key
        functools.update_wrapper(self, function)

    @functools.cached_property
    def _digest(self) -> bytes:
        return digest_of(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedFunction, (self._function, self._durability, self._own_key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = current.runtime()
        detached, namespace = runtime.objects.detached, runtime.job.cache_namespace
        key = self._key(args, kwargs)
        object_id = new_detached_id(f"{namespace} {key}")
        location = detached.find(object_id, namespace=namespace)
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
                namespace=namespace,
                durability=self._durability,
            )
        except StokerError:
            return value  # the quota has no room, or too few nodes: it is a result like others
        return DetachedResult(location, packed.nbytes)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._own_key is not None:
            own = self._own_key
            return checked_key(own(*args, **kwargs) if callable(own) else own)
        packed = pack((args, sorted(kwargs.items())), what="arguments")
        hashed = hashlib.blake2b(self._digest, digest_size=16)
        hashed.update(packed.data)
        for view in packed.buffers:
            hashed.update(view)
        return f"{self._function.__qualname__[:_MAX_SHOWN]}-{hashed.hexdigest()}"


def checked_key(key: Any) -> str:
    """Return a user's key of a cached result; raise WrongTypeError for what cannot be one."""
    if not isinstance(key, str) or not 0 < len(key) <= MAX_NAME or key[0] == "/" or "\0" in key:
        raise WrongTypeError(
            f"cache_key: {short_text(key)} is no key\n"
            f"give a text of 1 to {MAX_NAME} characters that does not begin with '/', or a function of "
            "the arguments that returns one",
            field="cache_key",
        )
    return key
