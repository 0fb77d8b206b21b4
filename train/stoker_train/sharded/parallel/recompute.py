"""Recomputation of activations, layer by layer, of any model.

Called by ``apply`` between tensor parallelism and ZeRO: what is computed again runs inside of a layer whose
parameters are gathered. Exchanges of a tensor group are made again under full recomputation alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stoker.exceptions import BadRequestError
from stoker_train.planning.strategy import Recompute
from stoker_train.sharded.parallel.extending import extend
from stoker_train.sharded.parallel.layers import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable


def recompute(model: nn.Module, kind: Recompute) -> None:
    """Let each layer of ``model`` keep its inputs alone ("full"), or costly results ("selective").

    A model of ours whose config has ``checkpoint`` does so already, and stays as it is. BadRequestError
    where no list of layers is found.
    """
    if kind is Recompute.NONE or any(_does_already(module) for module in model.modules()):
        return
    layers = layers_of(model)
    if not layers:
        raise BadRequestError(
            f"recompute {kind}: {type(model).__name__} has no list of layers\n"
            "put its layers into an nn.ModuleList or nn.Sequential, or take a plan with recompute=none",
            field="recompute",
        )
    for layer in layers:
        extend(layer, {"forward": _recomputed(type(layer), kind)})


def _recomputed(layer_type: type[nn.Module], kind: Recompute) -> Callable[..., Any]:
    chosen: dict[str, Any] = {}
    if kind is Recompute.SELECTIVE:
        from stoker_kernels.models.recompute import keep_costly  # the kernels' names, without them

        chosen["context_fn"] = partial(
            create_selective_checkpoint_contexts, partial(_keep, keep_costly)
        )

    def forward(self: nn.Module, *args: Any, **more: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer_type.forward(self, *args, **more)
        return checkpoint(
            partial(layer_type.forward, self), *args, use_reentrant=False, **chosen, **more
        )

    return forward


def _keep(
    keep_costly: Callable[..., CheckpointPolicy], context: Any, op: Any, *args: Any, **more: Any
) -> CheckpointPolicy:
    """Keep products, and what was exchanged: planned steps exchange it once."""
    if getattr(op, "namespace", "") == "_c10d_functional":
        return CheckpointPolicy.MUST_SAVE
    return keep_costly(context, op, *args, **more)


def _does_already(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "checkpoint", False))
