"""The opaque ops of the optimizers, one per rule, and the choice of their backend.

They mutate lists of tensors and have no autograd Function: a step runs under ``no_grad``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stoker_kernels.optim import cpu, reference
from stoker_kernels.runtime.backend import Backend, backend_for, compute_dtype, register_op

Tensors = list[torch.Tensor]
CPU_DTYPES = ({torch.float32}, {torch.float64})
CPU = {"adam": cpu.adam, "sgd": cpu.sgd, "adagrad": cpu.adagrad}


def _update(
    rule: str,
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    second: Tensors,
    steps: Tensors,
    hyper: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    seed: int | None,
    places: list[int] | None,
    squares: torch.Tensor | None,
) -> torch.Tensor:
    states = [state for state in (first, second) if state]
    backend = backend_for(params[0])
    rest = (grad_scale, found_inf, seed, places, squares)
    if backend is Backend.TRITON:
        from stoker_kernels.optim import triton

        return triton.update(rule, params, grads, states, steps, hyper, *rest)
    wide = {column[0].dtype for column in (params, grads, *states)} in CPU_DTYPES
    plain = grad_scale is None and found_inf is None
    if backend is Backend.CPU and wide and plain and rule in CPU:
        CPU[rule](params, grads, states, steps, hyper)
        return reference.square_sums(grads)
    return reference.update(rule, params, grads, states, steps, hyper, *rest)


def _update_fake(rule: str, params: Tensors, *_: Any) -> torch.Tensor:
    return params[0].new_empty(len(params), dtype=compute_dtype(params[0].dtype))


def _square_sums(params: Tensors, grads: Tensors) -> torch.Tensor:
    if backend_for(grads[0]) is Backend.TRITON:
        from stoker_kernels.optim import triton

        return triton.square_sums(params, grads)
    return reference.square_sums(grads)


def _square_sums_fake(params: Tensors, grads: Tensors) -> torch.Tensor:
    return grads[0].new_empty(len(grads), dtype=compute_dtype(grads[0].dtype))


def _trust_squares(
    rule: str,
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    second: Tensors,
    steps: Tensors,
    hyper: torch.Tensor,
    grad_scale: torch.Tensor | None,
) -> torch.Tensor:
    states = [state for state in (first, second) if state]
    if backend_for(params[0]) is Backend.TRITON:
        from stoker_kernels.optim import triton

        return triton.trust_squares(rule, params, grads, states, steps, hyper, grad_scale)
    return reference.trust_squares(rule, params, grads, states, steps, hyper, grad_scale)


def _trust_squares_fake(rule: str, params: Tensors, *_: Any) -> torch.Tensor:
    shape = (reference.TRUST[rule], len(params))
    return params[0].new_empty(shape, dtype=compute_dtype(params[0].dtype))


UPDATES = {
    rule: register_op(
        f"{rule}_",
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second,"
        " Tensor(d!)[] steps, Tensor hyper, Tensor? grad_scale, Tensor? found_inf, int? seed,"
        " int[]? places, Tensor? squares)"
        " -> Tensor",
        partial(_update, rule),
        partial(_update_fake, rule),
    )
    for rule in reference.RULES
}
SQUARE_SUMS = register_op(
    "grad_square_sums",
    "(Tensor[] params, Tensor[] grads) -> Tensor",
    _square_sums,
    _square_sums_fake,
)
TRUST_SQUARES = register_op(
    "trust_square_sums",
    "(str rule, Tensor[] params, Tensor[] grads, Tensor[] first, Tensor[] second, Tensor[] steps,"
    " Tensor hyper, Tensor? grad_scale) -> Tensor",
    _trust_squares,
    _trust_squares_fake,
)
