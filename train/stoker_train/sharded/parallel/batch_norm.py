"""Batch norms whose statistics are of the whole batch, on all data-parallel ranks.

torch's ``SyncBatchNorm`` runs on CUDA alone; this one runs wherever a process group does, and ranks may have
batches of other sizes, or none. Called by users, before ``parallelize``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.extending import extend
from stoker_train.sharded.parallel.mesh import DATA

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def synchronize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let the batch norms of ``model`` see the batches of all data-parallel ranks; return it.

    In place: parameters, buffers and names stay. On CUDA they become torch's ``SyncBatchNorm``.
    """
    group = mesh.get_group(DATA)
    if mesh.device_type == "cuda":
        found = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
        return cast("nn.Module", found)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            _extend(module, group)
    return model


def _extend(module: _BatchNorm, group: dist.ProcessGroup) -> None:
    kind = type(module)

    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.running_mean is None):
            return kind.forward(self, x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        y, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, group
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            _track(self, mean, variance, count)
        return y  # type: ignore[no-any-return]

    extend(module, {"forward": forward})


@torch.no_grad()
def _track(
    module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
) -> None:
    """Update the running statistics as torch does: by momentum, or the mean of all batches so far."""
    assert module.running_mean is not None and module.running_var is not None
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    factor = module.momentum
    if factor is None:
        assert module.num_batches_tracked is not None
        factor = 1.0 / float(module.num_batches_tracked)
    unbiased = variance * (count / (count - 1.0))
    module.running_mean.lerp_(mean.to(module.running_mean), factor)
    module.running_var.lerp_(unbiased.to(module.running_var), factor)


class _Normalize(torch.autograd.Function):
    """The whole batch's norm of a rank's part: x (N, C, ...) -> y, and mean (C,), variance (C,), count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        mean, variance, count = _statistics(x, group)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        inverse = (variance + eps).rsqrt()
        scaled = (x.float() - mean.float().view(shape)) * inverse.float().view(shape)
        ctx.save_for_backward(scaled, inverse.float(), count, weight)
        ctx.group, ctx.shape, ctx.dtype = group, shape, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        y = scaled if weight is None else scaled * weight.float().view(shape)
        y = y if bias is None else y + bias.float().view(shape)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        scaled, inverse, count, weight = ctx.saved_tensors
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        grad = grad.float()
        own = torch.stack([grad.sum(dims), (grad * scaled).sum(dims)]).double()
        whole = own.clone()
        dist.all_reduce(whole, group=ctx.group)
        mean, slope = (whole / count).float().view(2, *ctx.shape)
        factor = inverse if weight is None else inverse * weight.float()
        dx = (grad - mean - scaled * slope) * factor.view(ctx.shape)
        if weight is None:
            return dx.to(ctx.dtype), None, None, None, None
        return dx.to(ctx.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def _statistics(
    x: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean (C,), variance (C,) and count of all ranks' values, in double precision.

    The ranks' sums, squares about their own means and counts, put together (Chan et al. 1983): squares of
    the values themselves would lose a small variance beside a large mean.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // x.shape[1]
    wide = x.float()
    mean = wide.sum(dims).double() / max(count, 1)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    squares = (wide - mean.float().view(shape)).square().sum(dims).double()
    own = torch.cat([mean, squares, mean.new_tensor([float(count)])])
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    means, squares_of, counts = torch.split(torch.stack(every), [len(mean), len(mean), 1], 1)
    total = counts.sum()
    if float(total) <= 1.0:  # alike on all ranks; running statistics would never be numbers again
        raise BadRequestError(
            f"a batch norm sees {float(total):.0f} values per channel on all ranks together\n"
            "train on 2 or more, or call model.eval()",
            field="batch",
        )
    whole = (means * counts).sum(0) / total
    spread = squares_of.sum(0) + (counts * (means - whole).square()).sum(0)
    return whole, spread / total, total
