"""Optimizer in backward: each gradient is applied and freed while the backward pass still runs.

A model's gradients never exist together: memory for one bucket of them instead of all. Users attach it to
any optimizer of ours and leave out ``step()`` and ``zero_grad()``. It must not do what needs all gradients
first, such as clipping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stoker_kernels.optim.optimizer import FusedOptimizer

BUCKET_NBYTES = 32 << 20


class InBackward:
    """Takes an optimizer's step during ``loss.backward()``, in buckets of gradients, as they are ready.

    The bits are those of ``optimizer.step()`` after the whole backward pass: a step of a tensor depends
    on no other tensor. A bucket is one launch per dtype signature and is taken when its gradients have
    ``bucket_nbytes`` (whole tensors, where they are sharded: all processes cut alike); what is left is
    taken before ``backward()`` returns. Then ``optimizer.grad_square_sums`` are those of the whole pass.

    Each backward pass is a step, so gradients cannot be accumulated over several, and reentrant
    checkpointing of a part with shared parameters would step twice. No ``torch.amp.GradScaler``.
    Learning rate schedulers work as ever. Raises ``ValueError`` for an optimizer that clips, and for a
    bucket of no bytes.
    """

    def __init__(self, optimizer: FusedOptimizer, bucket_nbytes: int = BUCKET_NBYTES) -> None:
        if bucket_nbytes < 1:
            raise ValueError(f"InBackward: bucket_nbytes must be positive, got {bucket_nbytes}")
        self._check(optimizer)
        self.optimizer, self.bucket_nbytes = optimizer, bucket_nbytes
        self._ready: list[torch.Tensor] = []
        self._ready_nbytes = 0
        self._sums: torch.Tensor | None = None
        self._within, self._task = False, -1
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._handles = [
            p.register_post_accumulate_grad_hook(self._on_gradient)
            for p in params
            if p.requires_grad
        ]

    def remove(self) -> None:
        """Detach from the parameters: ``optimizer.step()`` is the user's again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check(self, optimizer: FusedOptimizer) -> None:
        if optimizer.max_grad_norm is not None:
            raise ValueError(
                "InBackward: clipping needs all gradients before the first step: set the optimizer's "
                "max_grad_norm to None, or call step() after the backward pass"
            )

    def _on_gradient(self, p: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if (
            not self._within or task != self._task
        ):  # a pass that raised has ended without its callback
            self._task, self._ready, self._ready_nbytes = task, [], 0
            self._within, self._sums = True, None
            # The engine runs it when the pass has ended, before backward() returns.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._ready.append(p)
        self._ready_nbytes += p.numel() * p.element_size()
        if self._ready_nbytes >= self.bucket_nbytes:
            self._take()

    def _finish(self) -> None:
        self._within = False
        self._take()
        if self._sums is not None:
            self.optimizer.grad_square_sums = self._sums
        self._sums = None
        vars(self.optimizer)["_opt_called"] = True  # what torch's schedulers ask

    def _take(self) -> None:
        """Step what is ready, free its gradients."""
        ready, self._ready, self._ready_nbytes = self._ready, [], 0
        if not ready:
            return
        self._check(self.optimizer)
        sums = self.optimizer.step_of(ready)
        self._sums = sums if self._sums is None else self._sums + sums
        for p in ready:
            p.grad = None
