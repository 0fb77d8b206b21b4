"""The facts of an actor's class that travel with its handles: its methods, their options, its groups.

Callers check calls against them without the class, which they may not be able to import.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from stoker.exceptions import BadRequestError
from stoker.runtime.actors.parameters import Parameters, parameters_of
from stoker.runtime.options.actor_options import ActorOptions, MethodOptions

METHOD_OPTIONS = "__stoker_method__"
"""The attribute of a method that holds its options."""
SHUTDOWN = "__stoker_shutdown__"
TERMINATE = "__stoker_terminate__"
SAVE = "__stoker_save__"
RESTORE = "__stoker_restore__"
END_S = 30.0
"""How long an actor may take to end: the calls that run, ``__stoker_shutdown__`` and ``atexit``."""


class ActorPayload(msgspec.Struct, frozen=True):
    """The constructor's call, from an actor's creator to its worker: a data frame, and how many calls may
    run at once."""

    frame: bytes
    max_concurrency: int | None = None
    concurrency_groups: dict[str, int] = {}
    blob: bytes = b""
    """The pickled class, unless it is large and the gcs has it."""
    save_interval_s: float | None = 0.0


class MethodInfo(NamedTuple):
    """The facts of a method that its callers need. ``parameters`` is None where any arguments may fit."""

    options: MethodOptions
    generates: bool
    parameters: Parameters | None = None


SYSTEM_METHODS = {
    "__stoker_ready__": MethodInfo(MethodOptions(), generates=False),
    TERMINATE: MethodInfo(MethodOptions(), generates=False),
    "__stoker_call__": MethodInfo(MethodOptions(), generates=False),
}
"""The methods that every actor has, whatever its class."""
RAY_NAMES = {
    "__ray_ready__": "__stoker_ready__",
    "__ray_terminate__": TERMINATE,
    "__ray_call__": "__stoker_call__",
}
"""The same by the names that programs written for Ray use."""
RAY_SHUTDOWN = "__ray_shutdown__"


class HandleInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts of an actor that a handle needs, wherever it is.

    The gcs keeps it as msgpack (``published.py``): what a process reads there is never unpickled.
    """

    actor_id: str
    class_name: str
    methods: dict[str, MethodInfo]
    max_task_retries: int
    max_pending_calls: int
    groups: tuple[str, ...] = ()
    job_id: str = ""
    unordered: tuple[str, ...] = ()
    """The concurrency groups ('' is the default one) in which calls may start out of order."""


def methods_of(cls: type) -> dict[str, MethodInfo]:
    """Return the methods of a class, by name."""
    methods: dict[str, MethodInfo] = {}
    for name, member in inspect.getmembers(cls, callable):
        if name.startswith("__") and name != "__call__":
            continue
        generates = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
        options = getattr(member, METHOD_OPTIONS, MethodOptions())
        methods[name] = MethodInfo(options, generates, parameters_of(cls, name))
    return methods


def check_hooks(cls: type) -> None:
    """Raise if a class has one of the two hooks that carry its state over a restart, and not the other."""
    missing = [hook for hook in (SAVE, RESTORE) if not callable(getattr(cls, hook, None))]
    if len(missing) == 1:
        (has,) = {SAVE, RESTORE} - set(missing)
        raise BadRequestError(
            f"class {cls.__qualname__} has no {missing[0]}\n"
            f"it has {has}, and a state is carried over a restart by both: define {missing[0]} too",
            field=missing[0],
        )


def checked_groups(cls: type, options: ActorOptions) -> dict[str, int]:
    """Return the concurrency groups of a class; a method's unknown group is an error."""
    groups = dict(options.concurrency_groups or {})
    for name, info in methods_of(cls).items():
        check_group(f"method {cls.__qualname__}.{name}", info.options, groups)
    return groups


def unordered_groups(
    cls: type, options: ActorOptions, groups: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the concurrency groups ('' is the default one) in which calls may start out of order.

    Unless the options say so, those in which several run at once.
    """
    concurrency = {"": options.max_concurrency or (2 if is_async(cls) else 1), **groups}
    allowed = options.allow_out_of_order_execution
    return tuple(name for name, n in concurrency.items() if (n > 1 if allowed is None else allowed))


def is_async(cls: type) -> bool:
    """Return whether instances run on an event loop: some method is a coroutine or async generator."""
    return any(
        inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m)
        for _, m in inspect.getmembers(cls, inspect.isfunction)
    )


def check_group(what: str, options: MethodOptions, groups: Iterable[str]) -> None:
    """Raise if a method names a concurrency group that its class does not have."""
    group, known = options.concurrency_group, sorted(groups)
    if group and group not in known:
        raise BadRequestError(
            f"{what} names the concurrency group {group!r}, which the class does not have\n"
            f"it has {known or 'none'}",
            field="concurrency_groups",
        )
