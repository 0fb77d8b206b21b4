"""Exchanges between the ranks of a tensor group: plain tensors in, plain tensors out, with gradients.

The pairs of Korthikanti et al. 2022, figures 4 and 5. With ``sequence`` the activations between blocks are
cut along the sequence (dimension 1 of 3), and an all-reduce becomes a reduce-scatter and an all-gather: as
many bytes. Called by the blocks of ``our_models`` and ``vocabulary``; waits for each exchange, since our
kernels read memory, not the future of a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    import torch.distributed as dist

# Their names changed in torch 2.13.
_SUFFIX = "single" if hasattr(collectives, "all_gather_single") else "tensor"
_all_gather: Callable[..., torch.Tensor] = getattr(collectives, f"all_gather_{_SUFFIX}")
_reduce_scatter: Callable[..., torch.Tensor] = getattr(collectives, f"reduce_scatter_{_SUFFIX}")
_wait: Callable[[torch.Tensor], torch.Tensor] = collectives.wait_tensor

_SEQUENCE = 1
"""The dimension that is cut: of (sequences, tokens, width)."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that hold one model together, and whether they cut sequences between its blocks."""

    mesh: DeviceMesh
    sequence: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The place of this one among them."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group."""
        return self.mesh.get_group()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Give a block its whole input (B, S, C), of which each rank will use all for its part.

        Gradients are summed. With sequences cut x is (B, S / ranks, C).
        """
        gathers = self.sequence and x.dim() > _SEQUENCE
        return _Enter.apply(x, self.group, gathers)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts of a block's output; with sequences cut each rank gets its tokens."""
        scatters = self.sequence and y.dim() > _SEQUENCE
        return _Leave.apply(y, self.group, scatters)  # type: ignore[no-any-return,no-untyped-call]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values of all ranks for results that all of them compute alike."""
        return _Leave.apply(values, self.group, False)  # type: ignore[no-any-return,no-untyped-call]

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the greatest of the ranks' values, without a gradient."""
        return _wait(collectives.all_reduce(values.detach(), "max", self.group))

    def join(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the ranks' parts along ``dim`` for results that all of them compute alike."""
        return _Join.apply(x, self.group, dim % x.dim(), self.rank)  # type: ignore[no-any-return,no-untyped-call]

    def check(self, tokens: int) -> None:
        """Raise BadRequestError for a length that the ranks do not divide."""
        if tokens % self.size:
            raise BadRequestError(
                f"sequence: tensor {self.size} does not divide {tokens} tokens\n"
                f"pad to a multiple of {self.size}, or take a plan with sequence=False",
                field="sequence",
            )


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    return _wait(collectives.all_reduce(x.contiguous(), "sum", group))


def _gathered(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    return _wait(_all_gather(x.contiguous(), dim, group))


def _scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return _wait(_reduce_scatter(x.contiguous(), "sum", _SEQUENCE, group))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, gathers: bool) -> torch.Tensor:
        ctx.group, ctx.gathers = group, gathers
        return _gathered(x, group, _SEQUENCE) if gathers else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _scattered if ctx.gathers else _summed
        return back(grad, ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Any, scatters: bool) -> torch.Tensor:
        ctx.group, ctx.scatters = group, scatters
        return _scattered(y, group) if scatters else _summed(y, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.group, _SEQUENCE) if ctx.scatters else grad, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int, rank: int) -> torch.Tensor:
        ctx.dim, ctx.rank, ctx.length = dim, rank, x.shape[dim]
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.rank * ctx.length, ctx.length), None, None, None
