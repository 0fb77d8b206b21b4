"""Buckets: which gradients travel together, in an order that every rank derives alike.

Used by the gradient exchange, and by averages of parameters. It knows tensors, not process groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

MIB = 1 << 20
FIRST_NBYTES = MIB
"""The first bucket is small, so that the network begins early in the backward pass (as DDP's)."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device whose gradients travel in one flat tensor.

    The flat tensor ends in one flag for each parameter: how many ranks had a gradient for it.
    """

    names: tuple[str, ...]
    params: tuple[torch.nn.Parameter, ...]
    waiting: set[int] = field(default_factory=set)
    """The places whose gradient the running backward pass has not given yet."""
    _flat: torch.Tensor | None = None
    _views: tuple[torch.Tensor, ...] = ()

    @property
    def numel(self) -> int:
        """The number of values, without flags."""
        return sum(p.numel() for p in self.params)

    def pack(self) -> torch.Tensor:
        """Return the flat tensor, filled with the gradients; zeros where there is none."""
        if self._flat is None:
            first = self.params[0]
            size = self.numel + len(self.params)
            self._flat = torch.empty(size, dtype=first.dtype, device=first.device)
            sizes = [p.numel() for p in self.params]
            parts = torch.split(self._flat[: self.numel], sizes)
            self._views = tuple(
                part.view(p.shape) for part, p in zip(parts, self.params, strict=True)
            )
        views, grads, flags = [], [], []
        for view, param in zip(self._views, self.params, strict=True):
            flags.append(0.0 if param.grad is None else 1.0)
            if param.grad is None:
                view.zero_()
                continue
            views.append(view)
            grads.append(param.grad.to_dense() if param.grad.is_sparse else param.grad)
        if views:
            torch._foreach_copy_(views, grads)
        if all(flags):
            self._flat[self.numel :].fill_(1.0)
        else:
            self._flat[self.numel :].copy_(torch.tensor(flags))
        return self._flat

    def unpack(self) -> None:
        """Write the sums to the gradients. A parameter without one on every rank keeps None."""
        assert self._flat is not None
        used: list[float] | None = None
        views, grads = [], []
        for place, (view, param) in enumerate(zip(self._views, self.params, strict=True)):
            if param.grad is None or param.grad.is_sparse:
                if used is None:  # a GPU is waited for here only
                    used = self._flat[self.numel :].tolist()
                if used[place]:
                    param.grad = view.clone()
                continue
            views.append(view)
            grads.append(param.grad)
        if views:
            torch._foreach_copy_(grads, views)


def buckets_of(
    named: Sequence[tuple[str, torch.nn.Parameter]], bucket_nbytes: int
) -> tuple[Bucket, ...]:
    """Return the buckets, in the order in which a backward pass fills them: from the last parameter on.

    It depends on names, shapes and dtypes alone, so that it is the same on every rank.
    """
    found: list[Bucket] = []
    for same in _by_kind(reversed(named)):
        rows: list[tuple[str, torch.nn.Parameter]] = []
        limit, nbytes = min(FIRST_NBYTES, bucket_nbytes), 0
        for name, param in same:
            size = param.numel() * param.element_size()
            if rows and nbytes + size > limit:
                found.append(_bucket(rows))
                rows, nbytes, limit = [], 0, bucket_nbytes
            rows.append((name, param))
            nbytes += size
        found.append(_bucket(rows))
    return tuple(found)


def _by_kind(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> list[list[tuple[str, torch.nn.Parameter]]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in named:
        kinds.setdefault((param.dtype, param.device), []).append((name, param))
    return list(kinds.values())


def _bucket(rows: list[tuple[str, torch.nn.Parameter]]) -> Bucket:
    names, params = zip(*rows, strict=True)
    return Bucket(names, params)
