"""Activation recomputation: what a layer keeps for its backward pass, and what it computes again.

Called by the models for each layer. ``selective`` follows Korthikanti et al. (arXiv 2205.05198): what costs
few operations for the memory it fills is computed again (norms, activations, rotary positions, dropout, and
the scores of attention that holds them), what costs many is kept: matrix products and flash attention's
output. Flash attention's kernels compute the scores again by themselves, in every mode. PyTorch's attention
is computed again where it drops: it draws its mask from the random state, which the dropouts after it must
find as it was.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Recompute = bool | Literal["selective"]

# The names of ops whose outputs selective recomputation keeps, as torch dispatches them below autograd.
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "stoker::attention_fwd",
    }
)


def keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for one op, as torch's selective checkpointing asks: keep it if in ``KEPT`` and not random."""
    if (
        isinstance(op, torch._ops.OpOverload)
        and op.name().partition(".")[0] in KEPT
        and not _drops(op, args, kwargs)
    ):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op draws a dropout mask from the random state; ours are given a seed."""
    if op.namespace == "stoker":
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            by_name = kwargs.get(argument.name, argument.default_value)
            return bool(args[place] if place < len(args) else by_name)
    return False


def run_layer(layer: nn.Module, *inputs: Any, recompute: Recompute, random: bool) -> Any:
    """Run ``layer``, keeping for its backward all, its inputs alone (True), or costly results ("selective").

    ``random`` says whether it draws numbers: then the random state is saved, which no CUDA graph can do.
    """
    if not recompute or not torch.is_grad_enabled():
        return layer(*inputs)
    chosen: dict[str, Any] = {}
    if recompute == "selective":
        chosen["context_fn"] = partial(create_selective_checkpoint_contexts, keep_costly)
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=random, **chosen)
