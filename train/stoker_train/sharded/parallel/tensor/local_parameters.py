"""Parameters as DTensors that a module computes with as plain tensors: the part that lies on its rank.

A parameter stays where it is and keeps its name, so that ZeRO, optimizers, clipping and checkpoints see the
DTensor; only the module's own code, whose kernels take plain tensors, reads the local part. Called by the
plans of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.extending import extend

if TYPE_CHECKING:
    from stoker_train.sharded.parallel.tensor.exchange import TensorGroup

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
"""How a parameter lies on the ranks: on each of them, or cut along its first or its second dimension."""


def fused(parts: int) -> Placement:
    """Return the placement of ``parts`` equal blocks of rows, each of which is cut: [gate | value]."""
    return _StridedShard(0, split_factor=parts)


class LocalParameters:
    """The modules of one model that were given to the ranks of a tensor group."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._done: set[tuple[int, str]] = set()

    def cut(
        self,
        module: nn.Module,
        name: str,
        placement: Placement,
        *,
        summed: bool = False,
        share: float = 1.0,
    ) -> None:
        """Make ``module``'s parameter a DTensor; one that is None, or was cut before, stays as it is.

        ``summed``: gradients of a whole parameter are parts of a sum, as each rank saw other tokens.
        ``share``: the module computes with that multiple of it. A parameter of two modules (tied weights)
        stays one.
        """
        parameter = module._parameters.get(name)
        if parameter is None or (id(module), name) in self._done:
            return
        self._done.add((id(module), name))
        made = self._made.get(id(parameter))
        if made is None:
            made = self._made[id(parameter)] = (parameter, self._distributed(parameter, placement))
        module._parameters[name] = made[1]

        def read(module: nn.Module) -> torch.Tensor | None:
            part = local(module._parameters[name], summed=summed)
            # A share of nothing has a gradient, too: all ranks reduce alike.
            return (
                part if share == 1.0 or part is None or isinstance(part, DTensor) else part * share
            )

        read_as(module, {name: read})

    def put(self, module: nn.Module, name: str, rows: torch.Tensor, like: nn.Parameter) -> None:
        """Add the parameter ``name``, cut by rows from the whole ``rows`` of ``like``."""
        whole = nn.Parameter(rows.detach(), requires_grad=like.requires_grad)
        module.register_parameter(name, self._distributed(whole, ROWS))
        self._done.add((id(module), name))

    def rest(self, model: nn.Module) -> None:
        """Keep all parameters that are no DTensors yet whole on each rank."""
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if not isinstance(parameter, DTensor):
                    self.cut(module, name, WHOLE)

    def _distributed(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            raise BadRequestError(
                "the model has DTensors already\ngive parallelize() the model as it was made",
                field="model",
            )
        mesh, rank, size = self._group.mesh, self._group.rank, self._group.size
        part = parameter.detach()
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            blocks = part.chunk(getattr(placement, "split_factor", 1), dim)
            part = torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)
        part = part.to(mesh.device_type).contiguous()
        made = DTensor.from_local(
            part, mesh, [placement], run_check=False,
            shape=parameter.shape, stride=parameter.detach().contiguous().stride(),
        )  # fmt: skip
        return nn.Parameter(made, requires_grad=parameter.requires_grad)


def local(parameter: torch.Tensor | None, *, summed: bool = False) -> torch.Tensor | None:
    """Return the part of a parameter that is here, through which its gradient flows.

    One that ZeRO has not gathered is no part to compute with: FSDP2 and others who ask get the DTensor.
    """
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if summed else None)


def read_as(module: nn.Module, readers: dict[str, Callable[[Any], Any]]) -> None:
    """Let ``module.name`` read ``readers[name](module)``; its parameters keep their places."""
    extend(module, {name: property(reader) for name, reader in readers.items()})


def divides(size: int, values: Sequence[tuple[str, int]], where: str) -> None:
    """Raise BadRequestError that names the field which a degree of ``size`` does not divide."""
    for field, value in values:
        if value % size:
            fitting = next(n for n in range(size, 0, -1) if value % n == 0)
            raise BadRequestError(
                f"tensor {size} does not divide {field} {value} of {where}\n"
                f"take a plan with tensor={fitting}, or a model whose {field} is a multiple of {size}",
                field=field,
            )
