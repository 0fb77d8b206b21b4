"""The whole of parallelism inside a stage, in its order: tensor and sequence, recomputation, ZeRO.

Called by the rank's context and by pipelines, for the model or for each part of it that a rank has. The
model's names of parameters stay, but for packed projections under tensor parallelism (``pieces``).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel import zero
from stoker_train.sharded.parallel.mesh import DATA, TENSOR
from stoker_train.sharded.parallel.precision import policy
from stoker_train.sharded.parallel.recompute import recompute
from stoker_train.sharded.parallel.tensor import cutting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from stoker_train.planning.strategy import Strategy


_MARK = "parallelized"


@dataclass(frozen=True, slots=True)
class Parallelized:
    """Choices that were applied to a model; :func:`parallelize` leaves them as ``model.parallelized``."""

    zero: int
    wrapped: bool
    """Whether FSDP2 runs the exchange of gradients; alone on its data and tensor ranks a model needs none."""


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    *,
    tensor_plan: Mapping[str, Any] | None = None,
    precision: str | torch.dtype | MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Cut ``model`` in place as ``strategy`` says and return it; make the optimizer afterwards.

    All ranks begin with the first rank's weights. ``precision``: "bf16" computes in 16 bit with fp32
    parameters. BadRequestError for what cannot be cut, with the field and the fix.
    """
    if strategy.zero not in zero.STAGES:
        raise BadRequestError(
            f"zero {strategy.zero} is no stage of ZeRO\ngive one of 0, 1, 2, 3", field="zero"
        )
    _same_start(model, mesh)
    mixed = policy(precision)
    if strategy.tensor > 1:
        cutting.cut(model, mesh[TENSOR], sequence=strategy.sequence, plan=tensor_plan)
    elif strategy.sequence:
        raise BadRequestError(
            "sequence needs tensor parallelism\ntake a plan with tensor above 1, or sequence=False",
            field="sequence",
        )
    recompute(model, strategy.recompute)
    alone = strategy.data == 1 and strategy.tensor == 1 and mixed.param_dtype is None
    if alone:
        if not any(p.is_meta for p in model.parameters()):
            model.to(mesh.device_type)
    else:
        zero.shard(model, mesh[DATA], strategy.zero if strategy.data > 1 else 0, mixed)
    setattr(model, _MARK, Parallelized(strategy.zero, not alone))
    return model


@contextmanager
def micro_batch(model: nn.Module | Iterable[nn.Module], *, last: bool) -> Iterator[None]:
    """Run the forward and backward pass of one micro-batch of a step inside of it.

    After the ``last`` one the gradients are the mean over the data-parallel ranks, whatever the stage of
    ZeRO. A pipeline, whose passes interleave, enters it for each backward pass.
    """
    for part in [model] if isinstance(model, nn.Module) else model:
        applied: Parallelized = getattr(part, _MARK)
        if applied.wrapped:
            zero.set_micro_batch(part, applied.zero, last=last)
    yield


def release(model: nn.Module | Iterable[nn.Module]) -> None:
    """Let go of parameters that an evaluation has gathered: others are trained before the next pass."""
    for part in [model] if isinstance(model, nn.Module) else model:
        zero.release(part)


@torch.no_grad()
def _same_start(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks of a stage the weights and buffers of its first."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        return
    for dim in (TENSOR, DATA):
        group = mesh.get_group(dim)
        if group.size() == 1:
            continue
        for tensor in tensors:
            there = tensor.to(mesh.device_type)
            dist.broadcast(there, group=group, group_src=0)
            if there is not tensor:
                tensor.copy_(there)
