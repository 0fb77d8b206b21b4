"""One step of each optimizer over the tensors of a small transformer: matrices and vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stoker_kernels.optim import LAMB, LARS, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop
from stoker_kernels.optim.optimizer import FusedOptimizer
from stoker_kernels.workloads import Cost, Workload

Make = Callable[[list[torch.Tensor]], FusedOptimizer]


def _inputs(
    make: Make,
    device: torch.device | str,
    dtype: torch.dtype,
    tensors: int,
    rows: int,
    columns: int,
) -> dict[str, Any]:
    shapes = [shape for _ in range(tensors) for shape in ((rows, columns), (columns,))]
    params = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    grads = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    return {"params": params, "grads": grads, "optimizer": make(params)}


def _run(
    params: list[torch.Tensor], grads: list[torch.Tensor], optimizer: FusedOptimizer
) -> tuple[torch.Tensor, ...]:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    assert optimizer.grad_square_sums is not None
    return (optimizer.grad_square_sums, *(p.detach() for p in params))


def _cost(
    of_params: int, states: int, dtype: torch.dtype, tensors: int, rows: int, columns: int
) -> Cost:
    """Count accesses of values in the parameters' dtype, and of fp32 states, per parameter."""
    numel = tensors * (rows * columns + columns)
    return Cost(forward_nbytes=numel * (of_params * dtype.itemsize + states * 4))


def _work(name: str, make: Make, of_params: int, states: int, **options: Any) -> Workload:
    return Workload(
        name, partial(_inputs, make), _run, partial(_cost, of_params, states),
        {"tensors": 48, "rows": 4096, "columns": 1024}, {"tensors": 2, "rows": 5, "columns": 24},
        differentiable=False, **options,
    )  # fmt: skip


_BF16 = {"dtypes": (torch.bfloat16,)}
_FP32 = {"dtypes": (torch.float32,)}  # the other dtype's code is another entry's
WORKLOADS = (
    _work("adamw", AdamW, 3, 4),
    _work("adamw_stochastic", partial(AdamW, stochastic_rounding=True), 3, 4, **_BF16),
    _work("adam", partial(Adam, weight_decay=0.1), 3, 4, **_FP32),
    _work("sgd", partial(SGD, lr=0.1, momentum=0.9, nesterov=True), 3, 2),
    _work("lamb", LAMB, 4, 6),
    _work("lars", LARS, 5, 2, **_FP32),
    _work("adagrad", Adagrad, 3, 2, **_FP32),
    _work("adadelta", Adadelta, 3, 4, **_FP32),
    _work("rmsprop", partial(RMSprop, momentum=0.9), 3, 4),
)
