"""The norm of all gradients of a model that is cut over many ranks, and their clipping to it.

Called by the rank's context before the optimizer's step. Our optimizers' ``max_grad_norm`` does the same
without another pass, but does not know the other stages of a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.mesh import DATA, PIPELINE, TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

_TINY = 1e-6
"""Added to the norm, as ``torch.nn.utils.clip_grad_norm_`` does."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    mesh: DeviceMesh,
    *,
    counted_elsewhere: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale gradients to a global 2-norm of ``max_norm`` at most; return the norm before, on all ranks.

    Each value counts once: shards are summed over the dimensions of ``mesh`` that cut them, stages over the
    pipeline. ``counted_elsewhere``: parameters that another stage counts, as a tied embedding; they are
    scaled. All ranks call it, one without gradients too. An infinite ``max_norm`` measures alone.
    BadRequestError for one that is not positive.
    """
    if not max_norm > 0.0:
        raise BadRequestError(
            f"max_norm {max_norm} must be above 0\ngive the greatest norm that is wanted, or None",
            field="max_norm",
        )
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    elsewhere = {id(p) for p in counted_elsewhere}
    device = torch.device(mesh.device_type)
    kinds: dict[tuple[bool, bool], list[torch.Tensor]] = {
        (data, tensor): [] for data in (False, True) for tensor in (False, True)
    }
    locals_: list[torch.Tensor] = []
    for parameter in given:
        grad = _reduced(parameter)
        if grad is None:
            continue
        own = grad._local_tensor if isinstance(grad, DTensor) else grad
        locals_.append(own)
        if id(parameter) not in elsewhere:
            cut = _cut_dims(grad)
            kinds[DATA in cut, TENSOR in cut].append(own)
    sums = torch.stack([_square_sum(found, device) for found in kinds.values()]).view(2, 2)
    for dim, part in ((DATA, sums[1]), (TENSOR, sums[:, 1])):
        _sum(part, mesh, dim)
    total = sums.sum().reshape(1)
    _sum(total, mesh, PIPELINE)
    norm = total[0].sqrt().float()
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    if max_norm != float("inf"):
        for own in locals_:
            own.mul_(factor.to(own.device))
    return norm


def _reduced(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, its parts of sums added up."""
    grad = parameter.grad
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        grad = parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad


def _cut_dims(grad: torch.Tensor) -> set[str]:
    if not isinstance(grad, DTensor):
        return set()
    names = grad.device_mesh.mesh_dim_names or ()
    return {name for name, p in zip(names, grad.placements, strict=True) if not p.is_replicate()}


def _square_sum(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares in double precision: there are many values."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        total += norm.to(device, torch.float64).square()
    return total


def _sum(values: torch.Tensor, mesh: DeviceMesh, dim: str) -> None:
    group = mesh.get_group(dim)
    if group.size() > 1:
        added = values.contiguous()
        dist.all_reduce(added, group=group)
        values.copy_(added)
