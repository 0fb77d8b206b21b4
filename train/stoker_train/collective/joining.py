"""Making groups: from the driver over actors, or from inside, each member by itself; and finding them again.

A process has its groups by name. Called by users, and by ``stoker.ray.util.collective``.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from stoker.api.calls import get
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from stoker.train.rendezvous import Rendezvous
from stoker_train.collective.channel import Backend, usable
from stoker_train.collective.group import Group, Options
from stoker_train.collective.members import exchange_members
from stoker_train.collective.supervisor import Supervisor

if TYPE_CHECKING:
    from stoker.runtime.actors.handle import ActorHandle

DEFAULT = "default"
_CALL_SLACK_S = 30.0
_JOIN_S = 60.0
"""Actors that were just made have torch to import."""


class _Groups:
    """The groups that this process is in, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Group] = {}

    def add(self, group: Group) -> None:
        with self._lock:
            self._by_name[group.name] = group

    def find(self, name: str) -> Group | None:
        with self._lock:
            return self._by_name.get(name)

    def take(self, name: str) -> Group | None:
        with self._lock:
            return self._by_name.pop(name, None)


_GROUPS: Final = _Groups()


def init_group(
    actors: Sequence[ActorHandle[Any]],
    *,
    backend: str | None = "gloo",
    name: str = DEFAULT,
    timeout_s: float = 60.0,
    join_timeout_s: float | None = None,
    stall_s: float = 30.0,
    check: bool = True,
) -> None:
    """Make a group of ``actors``, in this order of rank; returns once all are connected.

    Each of them has it by ``stoker.collective.group(name)`` then. They join between two of their calls: a
    busy one is waited for. The arguments are those of :func:`join`. If one cannot join, none has.

    Raises what the first of them raised: GetTimeoutError names the ranks that did not come.
    """
    if not actors or len({one.actor_id for one in actors}) != len(actors):
        raise BadRequestError(
            f"init_group() has {len(actors)} actors\ngive one or more, each once", field="actors"
        )
    world_size, token = len(actors), uuid.uuid4().hex[:12]
    limit_s = _join_limit_s(timeout_s, join_timeout_s)
    options = {
        "backend": backend,
        "timeout_s": timeout_s,
        "join_timeout_s": limit_s,
        "stall_s": stall_s,
        "check": check,
        "attempt": token,
    }
    refs = [
        actor.__stoker_call__.remote(_join_inside, name, rank, world_size, options)
        for rank, actor in enumerate(actors)
    ]
    try:
        get(refs, timeout=limit_s + _CALL_SLACK_S)
    except BaseException:
        for actor in actors:  # an older group of this name goes on
            actor.__stoker_call__.remote(_leave_inside, name, token)
        raise


def join(
    name: str = DEFAULT,
    *,
    rank: int,
    world_size: int,
    backend: str | None = "gloo",
    timeout_s: float = 60.0,
    join_timeout_s: float | None = None,
    stall_s: float = 30.0,
    check: bool = True,
    attempt: int | str = 0,
) -> Group:
    """Join this process, as ``rank`` of ``world_size``, to the group ``name``; returns once all are there.

    ``backend`` is ``"gloo"`` (CPU), ``"nccl"`` (CUDA tensors; others go by gloo), or None for NCCL where
    there is a GPU. ``timeout_s`` bounds each collective, ``join_timeout_s`` the rendezvous (by default
    a minute, or ``timeout_s`` if that is more). A collective in which others keep this member waiting for
    ``stall_s`` seconds is reported to the log. ``check``: headers are exchanged before each
    operation, so that what does not match is named. A group that is formed again after one that did not
    form needs another ``attempt``. torch's default group is left alone.

    Raises ``GetTimeoutError`` naming the ranks that are missing, ``ConflictError`` if the rank is taken, or
    this process is in a group of this name.
    """
    if not 0 <= rank < world_size:
        raise BadRequestError(
            f"group {name!r} has no rank {rank}\ngive one of 0..{world_size - 1}", field="rank"
        )
    if timeout_s <= 0 or stall_s <= 0:
        raise BadRequestError(
            f"timeout_s={timeout_s} and stall_s={stall_s} must be positive", field="timeout_s"
        )
    before = _GROUPS.find(name)
    if before is not None and not before.failed():
        raise ConflictError(
            f"this process is in a group {name!r} already\n"
            "leave it by destroy_group(), or give the new one another name"
        )
    if before is not None:
        destroy_group(name=name)
    limit_s = _join_limit_s(timeout_s, join_timeout_s)
    options = Options(usable(backend), timeout_s, limit_s, stall_s, check)
    rendezvous = Rendezvous(
        f"collective/{name}", rank, world_size, attempt=attempt, timeout_s=limit_s
    )
    supervisor = Supervisor(name, rank, timeout_s=timeout_s, stall_s=stall_s)
    store = rendezvous.open_store()
    try:
        group_id, members = exchange_members(store, rank, world_size)
    except RuntimeError as error:  # of the store
        text = str(error).partition("\n")[0]
        raise GetTimeoutError(
            f"group {name!r} did not form within {limit_s:g} s\na member came, and died: {text}"
        ) from None
    supervisor.start(group_id, members)
    group = Group(name, rank, members, store, supervisor, options, attempt)
    try:
        group.connect()
        rendezvous.close(store)
    except BaseException:
        group.destroy()
        raise
    _GROUPS.add(group)
    return group


def group(name: str = DEFAULT) -> Group:
    """Return this process's group of that name. Raises NotFoundError that says how to make one."""
    found = _GROUPS.find(name)
    if found is None:
        raise NotFoundError(
            f"this process is in no group {name!r}\n"
            "make it by stoker.collective.init_group(actors) in the driver, or join() in each member"
        )
    return found


def is_initialized(name: str = DEFAULT) -> bool:
    """Return whether this process is in a group of that name."""
    return _GROUPS.find(name) is not None


def destroy_group(
    actors: Sequence[ActorHandle[Any]] = (), *, name: str = DEFAULT, wait: bool = True
) -> None:
    """Have ``actors`` leave their group ``name``; without any, this process leaves its own.

    Nothing happens where there is none.
    """
    if actors:
        refs = [actor.__stoker_call__.remote(_leave_inside, name) for actor in actors]
        if wait:
            get(refs, timeout=_CALL_SLACK_S)
        return
    found = _GROUPS.take(name)
    if found is not None:
        found.destroy()


def _join_limit_s(timeout_s: float, join_timeout_s: float | None) -> float:
    return max(timeout_s, _JOIN_S) if join_timeout_s is None else join_timeout_s


def _join_inside(_instance: object, name: str, rank: int, size: int, options: Any) -> None:
    join(name, rank=rank, world_size=size, **options)


def _leave_inside(_instance: object, name: str, attempt: str | None = None) -> None:
    found = _GROUPS.find(name)
    if found is not None and attempt in (None, found.attempt):
        destroy_group(name=name)


__all__ = ("DEFAULT", "Backend", "destroy_group", "group", "init_group", "is_initialized", "join")
