"""Measures what a model's passes take on this process's device: the profile of a planner.

Called by users, and by ``benchmarks.sharded`` in every rank at once, as training would load the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stoker_train.planning.profiles.profile import Pass, Profile

_UPDATED = 3


class _Seconds(NamedTuple):
    forward: float
    backward: float


def profile_model(
    model: nn.Module,
    batch: Callable[[int], tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    layers: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    sizes: tuple[int, int] = (1, 4),
    rounds: int = 5,
) -> Profile:
    """Return the measured passes of ``model``, whose equal ``layers`` are called one after the other.

    ``batch(n)`` returns inputs and targets of n sequences, on the model's device: inputs are a tensor, or a
    tuple or dict of arguments. ``loss_fn(outputs, targets)`` returns a scalar. Each of two micro-batch
    ``sizes`` is timed ``rounds`` times after one that is not counted; medians are taken. With an
    ``optimizer`` its update is timed too: give a new one, as its state is dropped, as gradients are.

    ValueError where no layer is called, or ``sizes`` are not two growing numbers from 1.
    """
    small, large = sizes
    if not 1 <= small < large:
        raise ValueError(
            f"profile_model(): sizes must be two growing numbers from 1, got {sizes}\n"
            "give micro-batches between which yours lies, as (1, 4)"
        )
    measured = {
        size: _measure(model, batch(size), loss_fn, layers, rounds) for size in (small, large)
    }

    def line(part: Callable[[tuple[_Seconds, _Seconds, float]], float]) -> Pass:
        low, high = part(measured[small]), part(measured[large])
        slope = max(0.0, (high - low) / (large - small))
        return Pass(max(0.0, low - slope * small), slope)

    found = Profile(
        layer_forward=line(lambda one: one[1].forward),
        layer_backward=line(lambda one: one[1].backward),
        ends_forward=line(lambda one: max(0.0, one[0].forward - len(layers) * one[1].forward)),
        ends_backward=line(lambda one: max(0.0, one[0].backward - len(layers) * one[1].backward)),
        whole_share=min(1.0, measured[large][2]),
        update_s=0.0 if optimizer is None else _update_s(model, optimizer),
    )
    model.zero_grad(set_to_none=True)
    return found


def _measure(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    layers: Sequence[nn.Module],
    rounds: int,
) -> tuple[_Seconds, _Seconds, float]:
    """Return the seconds of the whole model, of a layer, and the share of its norms."""
    inputs, targets = batch
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    layer = layers[len(layers) // 2] if layers else None
    if layer is None:
        raise ValueError("profile_model(): layers is empty\ngive the model's equal layers")
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: called.append((args, kwargs)), with_kwargs=True
    )
    whole = []
    try:
        for _ in range(rounds + 1):
            called.clear()
            model.zero_grad(set_to_none=True)
            began = _now()
            loss = loss_fn(_call(model, inputs), targets)
            middle = _now()
            torch.autograd.backward(loss)
            whole.append(_Seconds(middle - began, _now() - middle))
    finally:
        hook.remove()
    if not called:
        raise ValueError(
            "profile_model(): no layer was called\ngive the modules that the model calls for each layer"
        )
    args, kwargs = called[0]
    alone = [_layer_pass(layer, args, kwargs) for _ in range(rounds + 1)]
    return _median(whole[1:]), _median(alone[1:]), _norm_share(layer, args, kwargs, rounds)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _layer_pass(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seconds:
    layer.zero_grad(set_to_none=True)
    args = tuple(
        one.detach().requires_grad_(one.is_floating_point())
        if isinstance(one, torch.Tensor)
        else one
        for one in args
    )
    began = _now()
    found = layer(*args, **kwargs)
    middle = _now()
    outputs = [
        one
        for one in (found if isinstance(found, tuple) else (found,))
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    gradients = [torch.ones_like(one) for one in outputs]
    third = _now()
    torch.autograd.backward(outputs, gradients)
    return _Seconds(middle - began, _now() - third)


def _norm_share(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: int
) -> float:
    """Return the share of a layer's forward pass that its norms take, with the sums and dropout in them."""
    spent, began = [0.0], [0.0]

    def before(*_: Any) -> None:
        began[0] = _now()

    def after(*_: Any) -> None:
        spent[0] += _now() - began[0]

    norms = [one for one in layer.modules() if "norm" in type(one).__name__.lower()]
    hooks = [one.register_forward_pre_hook(before) for one in norms]
    hooks += [one.register_forward_hook(after) for one in norms]
    shares = []
    try:
        for _ in range(rounds):
            spent[0] = 0.0
            whole = _layer_pass(layer, args, kwargs).forward
            shares.append(spent[0] / whole)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.median(shares)


def _update_s(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds that the optimizer takes for one parameter; values stay as they are."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    kept = [one.detach().clone() for one in parameters]
    took = []
    for _ in range(_UPDATED + 1):
        for one in parameters:
            one.grad = torch.zeros_like(one)
        began = _now()
        optimizer.step()
        took.append(_now() - began)
    with torch.no_grad():
        for one, value in zip(parameters, kept, strict=True):
            one.copy_(value)
    optimizer.state.clear()
    return statistics.median(took[1:]) / sum(one.numel() for one in parameters)


def _median(found: Sequence[_Seconds]) -> _Seconds:
    return _Seconds(
        statistics.median(one.forward for one in found),
        statistics.median(one.backward for one in found),
    )


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
