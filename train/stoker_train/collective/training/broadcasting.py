"""Bringing all members to one state at the start: parameters, and an optimizer's state, from one of them.

As Horovod's functions of these names. Called by user code before its first step, and after a resize.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stoker_train.collective.joining import group

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stoker_train.collective.communicator import Communicator


def broadcast_parameters(
    parameters: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    *,
    process_set: Communicator | None = None,
) -> None:
    """Replace the parameters of all members, in place, by those of rank ``root``.

    ``parameters`` is a module (its buffers are sent too), its ``state_dict()``, or pairs of name and
    tensor; MismatchError if the members have others. Entries that are no tensors are left alone.
    """
    pairs = parameters.state_dict() if isinstance(parameters, torch.nn.Module) else parameters
    named = dict(pairs.items() if isinstance(pairs, Mapping) else pairs)
    tensors = {key: one for key, one in named.items() if isinstance(one, torch.Tensor)}
    names = hashlib.blake2b("\n".join(tensors).encode(), digest_size=6).hexdigest()
    members = process_set or group()
    members.grouped_broadcast(list(tensors.values()), root, name=f"parameters {names}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a state whose values travel apart from it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: Optimizer, root: int = 0, *, process_set: Communicator | None = None
) -> None:
    """Load the state of rank ``root``'s optimizer on all members; that of the others may be empty.

    Learning rates and other options of the groups are part of it.
    """
    members = process_set or group()
    tensors: list[torch.Tensor] = []
    skeleton = _without(optimizer.state_dict(), tensors) if members.rank == root else None
    skeleton = members.broadcast_object(skeleton, root, name="optimizer state")
    if members.rank != root:
        places = sorted(_places(skeleton), key=lambda one: one.number)
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in places]
    members.grouped_broadcast(tensors, root, name="optimizer state")
    if members.rank != root:
        optimizer.load_state_dict(_with(skeleton, tensors))


def _without(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a state with a place for each tensor, which is added to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without(one, tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_without(one, tensors) for one in value]
    return value


def _with(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _with(one, tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_with(one, tensors) for one in value]
    return value


def _places(value: Any) -> list[_Place]:
    if isinstance(value, _Place):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [place for one in inside for place in _places(one)]
