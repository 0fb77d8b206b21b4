"""``ray.util.collective``: Ray's names and signatures for ``stoker.collective``.

Operations work in place, as Ray's do. Unlike Ray's, a member that dies fails the others' calls at once, and
calls that do not match are named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker.ray.mapping.lacking import attribute_error
from stoker.ray.util.collective.types import Backend, ReduceOp

if TYPE_CHECKING:
    from stoker.collective import Group

__all__ = (
    "Backend",
    "ReduceOp",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "create_collective_group",
    "destroy_collective_group",
    "get_collective_group_size",
    "get_rank",
    "gloo_available",
    "init_collective_group",
    "is_group_initialized",
    "nccl_available",
    "recv",
    "reduce",
    "reducescatter",
    "send",
)

_TIMEOUT_MS = 30_000


def nccl_available() -> bool:
    """Return whether this process can use NCCL."""
    from stoker import collective

    with contextlib.suppress(BadRequestError):
        return bool(collective.usable("nccl"))
    return False


def gloo_available() -> bool:
    """Return whether torch is there, which brings gloo."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def init_collective_group(
    world_size: int,
    rank: int,
    backend: str = Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = _TIMEOUT_MS,
) -> None:
    """Join this process to a group; ``gloo_timeout`` in milliseconds bounds each operation."""
    from stoker import collective

    collective.join(
        group_name,
        rank=rank,
        world_size=world_size,
        backend=backend,
        timeout_s=gloo_timeout / 1000,
    )


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: str = Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = _TIMEOUT_MS,
) -> None:
    """Make a group of actors from outside; unlike Ray's it returns once they are connected."""
    from stoker import collective

    if len(actors) != world_size or sorted(ranks) != list(range(world_size)):
        raise BadRequestError(
            f"{len(actors)} actors with ranks {list(ranks)} are no group of {world_size}\n"
            "give each actor one of the ranks from 0",
            field="ranks",
        )
    ordered = [
        actor for _, actor in sorted(zip(ranks, actors, strict=True), key=lambda one: one[0])
    ]
    collective.init_group(ordered, backend=backend, name=group_name, timeout_s=gloo_timeout / 1000)


def is_group_initialized(group_name: str = "default") -> bool:
    """Return whether this process is in the group."""
    from stoker import collective

    return collective.is_initialized(group_name)


def destroy_collective_group(group_name: str = "default") -> None:
    """Leave the group."""
    from stoker import collective

    collective.destroy_group(name=group_name)


def get_rank(group_name: str = "default") -> int:
    """Return this process's rank in the group, or -1 if it is in none."""
    return _group(group_name).rank if is_group_initialized(group_name) else -1


def get_collective_group_size(group_name: str = "default") -> int:
    """Return the number of members, or -1 if this process is in no such group."""
    return _group(group_name).size if is_group_initialized(group_name) else -1


def allreduce(tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """All-reduce ``tensor`` in place."""
    _group(group_name).all_reduce(tensor, _op(op))


def barrier(group_name: str = "default") -> None:
    """Wait for all members."""
    _group(group_name).barrier()


def reduce(
    tensor: Any, dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """Reduce ``tensor`` in place to one rank."""
    _group(group_name).reduce(tensor, dst_rank, _op(op))


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = "default") -> None:
    """Broadcast ``tensor`` in place."""
    _group(group_name).broadcast(tensor, src_rank)


def allgather(tensor_list: list[Any], tensor: Any, group_name: str = "default") -> None:
    """Fill ``tensor_list`` with the tensors of all members."""
    group = _group(group_name)
    _check_list(tensor_list, group, "allgather")
    for place, found in zip(tensor_list, group.all_gather(tensor), strict=True):
        place[...] = found


def reducescatter(
    tensor: Any, tensor_list: list[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """Fill ``tensor`` with this member's part of the reduction of ``tensor_list``."""
    group = _group(group_name)
    _check_list(tensor_list, group, "reducescatter")
    tensor[...] = group.reduce_scatter(tensor_list, _op(op))


def send(tensor: Any, dst_rank: int, group_name: str = "default") -> None:
    """Send ``tensor`` to one rank."""
    _group(group_name).send(tensor, dst_rank)


def recv(tensor: Any, src_rank: int, group_name: str = "default") -> None:
    """Fill ``tensor`` with what one rank sends."""
    _group(group_name).recv(tensor, src_rank)


def _group(name: str) -> Group:
    from stoker import collective

    return collective.group(name)


def _op(op: ReduceOp) -> str:
    return ReduceOp(op).name.lower()


def _check_list(tensor_list: list[Any], group: Group, function: str) -> None:
    if len(tensor_list) != group.size:
        raise BadRequestError(
            f"{function} has {len(tensor_list)} tensors for {group.size} members\n"
            "give one for each member",
            field="tensor_list",
        )


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
