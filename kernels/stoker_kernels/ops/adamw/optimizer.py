"""The AdamW optimizer and the opaque op it calls.

The op mutates lists of tensors, so it has no autograd Function: it runs under ``no_grad``, as every
optimizer step does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stoker_kernels._runtime import Backend, backend_for, compute_dtype, register_op
from stoker_kernels.ops.adamw import reference


def _adamw(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    scalars = reference.step_scalars(step, lr, beta1, beta2, eps, weight_decay)
    backend = backend_for(params[0])
    if backend is Backend.TRITON and all(
        t.is_contiguous() for t in (*params, *exp_avgs, *exp_avg_sqs)
    ):
        from stoker_kernels.ops.adamw import triton

        return triton.adamw(params, grads, exp_avgs, exp_avg_sqs, scalars)
    if backend is Backend.CPU and params[0].dtype == grads[0].dtype == exp_avgs[0].dtype:
        reference.adamw_foreach(params, grads, exp_avgs, exp_avg_sqs, scalars)
    else:
        for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            reference.adamw_one(p, g, m, v, scalars)
    return reference.square_sum(grads)


def _adamw_fake(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    return grads[0].new_empty((), dtype=compute_dtype(grads[0].dtype))


_STEP = register_op(
    "adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, int step,"
    " float lr, float beta1, float beta2, float eps, float weight_decay) -> Tensor",
    _adamw,
    _adamw_fake,
)


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, the numerics of ``torch.optim.AdamW``.

    On CUDA one kernel launch updates all tensors that share a device, dtypes and step number; on the
    CPU ``torch._foreach_*`` does. Moments are kept in at least fp32 also for bf16 and fp16 parameters.
    The state has torch's names (``step``, ``exp_avg``, ``exp_avg_sq``), so checkpoints move both ways.

    After each ``step()``, :attr:`grad_square_sum` holds the sum of squares of all gradients (its root is
    the global norm), computed in the same pass; it is a scalar tensor, and reading it is what
    synchronises.

    Not supported, by design of one pass: amsgrad, maximize, sparse or complex gradients.
    Raises ``ValueError`` for a hyperparameter out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"AdamW: {name} must be at least 0, got {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"AdamW: betas must lie in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.grad_square_sum: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return ``closure()``'s loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sums: list[torch.Tensor] = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for step, (params, grads, exp_avgs, exp_avg_sqs) in self._launches(group["params"]):
                total = _STEP(
                    params, grads, exp_avgs, exp_avg_sqs, step,
                    float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"],
                )  # fmt: skip
                sums.append(total)
        self.grad_square_sum = sum((s.to(sums[0]) for s in sums[1:]), sums[0]) if sums else None
        return loss

    def _launches(self, params: list[torch.Tensor]) -> list[tuple[int, tuple[list[Any], ...]]]:
        """Advance each parameter's step count; group what one launch can update together."""
        batches: dict[Any, tuple[list[Any], ...]] = defaultdict(lambda: ([], [], [], []))
        for p in params:
            if p.grad is None:
                continue
            if p.grad.is_sparse or p.is_complex():
                raise TypeError("AdamW: sparse gradients and complex parameters are not supported")
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p, dtype=compute_dtype(p.dtype))
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=compute_dtype(p.dtype))
            state["step"] += 1
            step = int(state["step"])
            m, v = state["exp_avg"], state["exp_avg_sq"]
            batch = batches[(step, p.device, p.dtype, p.grad.dtype, m.dtype, p.is_contiguous())]
            for column, tensor in zip(batch, (p, p.grad, m, v), strict=True):
                column.append(tensor)
        return [(key[0], batch) for key, batch in batches.items()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep fp32 where torch would round them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(ids, params, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state_dict["state"].get(key, {}):
                    saved = state_dict["state"][key][name]
                    self.state[p][name] = saved.to(p.device, compute_dtype(p.dtype), copy=True)
