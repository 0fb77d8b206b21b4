"""Parameters that lie in shards on several processes: the DTensors of FSDP2 and of tensor parallelism.

An optimizer updates each process's own shard in place; what it sums over a whole tensor, it sums over the
shards here. Called by ``optimizer`` alone. It must not import ``torch.distributed.tensor``: who has a DTensor
has imported it, and nobody else pays for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

SHARD_BIT = 24  # of the random seed: below it the parameter's place, above it the shard's number


class Shards(NamedTuple):
    """The processes that hold the shards of one tensor: those along ``dims`` of ``mesh``."""

    mesh: Any
    dims: tuple[int, ...]

    def sum_(self, values: torch.Tensor) -> None:
        """Add ``values`` over the processes, in place; each of them calls it."""
        for dim in self.dims:
            self._reduce_(values, dim, torch.distributed.ReduceOp.SUM)

    def max_(self, values: torch.Tensor) -> None:
        """Take the greatest of ``values`` over the processes, in place; each of them calls it."""
        for dim in self.dims:
            self._reduce_(values, dim, torch.distributed.ReduceOp.MAX)

    def _reduce_(self, values: torch.Tensor, dim: int, how: Any) -> None:
        # Offloaded parameters lie on the CPU, where their group may have no backend.
        there = values.to(self.mesh.device_type)
        torch.distributed.all_reduce(there, how, group=self.mesh.get_group(dim))
        if there is not values:
            values.copy_(there)

    @property
    def number(self) -> int:
        """The number of this process's shard: replicas of it have the same."""
        coordinate = self.mesh.get_coordinate()
        number = 0
        for dim in self.dims:
            number = number * self.mesh.size(dim) + coordinate[dim]
        return number


def dtensors_exist() -> bool:
    """Return whether this process can have a DTensor at all."""
    return "torch.distributed.tensor" in sys.modules


def is_distributed(tensor: Any) -> bool:
    """Return whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(tensor: Any) -> Shards | None:
    """Return who holds the other shards of ``tensor``; None where all of it is here."""
    if not is_distributed(tensor):
        return None
    placements = tensor.placements
    dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return Shards(tensor.device_mesh, dims) if dims else None


def local_of(tensor: Any) -> torch.Tensor:
    """Return the part of ``tensor`` that lies here, sharing its memory; a plain tensor is its own part."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # of a collective that is under way
    return local if wait is None else wait()


def placed_as(tensor: Any, param: Any, what: str) -> Any:
    """Return ``tensor`` placed as ``param``, by a collective where they differ.

    Raises ``TypeError`` where one is sharded and the other is not, or over other processes; ``what`` names
    the tensor.
    """
    if is_distributed(tensor) != is_distributed(param):
        one, other = (
            ("a plain tensor", "a DTensor") if is_distributed(param) else ("a DTensor", "none")
        )
        raise TypeError(
            f"{what} is {one}, its parameter is {other}: make the optimizer after fully_shard, and load "
            "checkpoints with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if not is_distributed(param) or tensor.placements == param.placements:
        return tensor
    return tensor.redistribute(param.device_mesh, param.placements)


class Across:
    """Sums over shards of values that stand for parameters, one each, in the parameters' order."""

    def __init__(self, params: Iterable[Any]) -> None:
        self._of: dict[Shards, list[int]] = {}
        self._count = 0
        for place, param in enumerate(params if dtensors_exist() else ()):
            self._count = place + 1
            shards = shards_of(param)
            if shards is not None:
                self._of.setdefault(shards, []).append(place)

    def __bool__(self) -> bool:
        return bool(self._of)

    def sum_(self, values: torch.Tensor) -> None:
        """Sum ``values`` (..., parameters) in place: one small collective for each kind of sharding.

        A parameter without gradient counts as any other, so all processes send alike.
        """
        for shards, places in self._of.items():
            if len(places) == self._count:
                shards.sum_(values)
                continue
            index = torch.tensor(places).to(values.device, non_blocking=True)
            part = values.index_select(-1, index)
            shards.sum_(part)
            values.index_copy_(-1, index, part)

    def max_(self, value: torch.Tensor) -> torch.Tensor:
        """Return the greatest ``value`` (scalar) among all that hold a shard of any parameter."""
        value = value.clone()
        for shards in self._of:
            shards.max_(value)
        return value
