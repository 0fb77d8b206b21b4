"""ZeRO over the data-parallel ranks, by PyTorch's FSDP2 (Rajbhandari et al. 2020; Zhao et al. 2023).

Each layer is a unit: its parameters travel together. What a rank sends in a step, of P bytes of parameters
over n ranks, at one micro-batch, is (n - 1) / n times

    stage 0    2 P    gradients are all-reduced
    stage 1    2 P    gradients reduce-scattered, parameters gathered once
    stage 2    2 P    the same; at more micro-batches gradients P for each
    stage 3    3 P    parameters gathered for the forward pass and again for the backward pass

Called by ``apply`` alone. Tensor parallelism comes before it: its parameters are DTensors then.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from stoker_train.sharded.parallel.layers import layers_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

STAGES = (0, 1, 2, 3)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the layers of ``model`` whose parameters travel together; the rest goes with the whole.

    So do a layer without parameters, and one that shares a parameter with something outside of it.
    """
    owners = Counter(id(p) for module in model.modules() for p in _own(module))
    kept = []
    for unit in layers_of(model):
        inside = Counter(id(p) for module in unit.modules() for p in _own(module))
        if inside and all(owners[key] == count for key, count in inside.items()):
            kept.append(unit)
    return kept


def shard(model: nn.Module, mesh: DeviceMesh, stage: int, precision: MixedPrecisionPolicy) -> None:
    """Cut ``model`` in place over the 1-d ``mesh`` as a stage of ZeRO has it; 0 keeps copies.

    Its parameters become DTensors; those of tensor parallelism are cut once more.
    """
    for module in (*units(model), model):
        if stage == 0:
            _replicate(module, mesh, precision)
        else:
            fully_shard(
                module, mesh=mesh, mp_policy=precision, reshard_after_forward=stage == 3
            )  # the whole, too: by default it would keep what is gathered
    _reduce_unused(model)


def release(model: nn.Module) -> None:
    """Let go of what a pass forward alone has gathered; the next one gathers what is new.

    Until then the modules have the gathered parameters, which no optimizer updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_micro_batch(model: nn.Module, stage: int, *, last: bool) -> None:
    """Say what the next backward pass does with gradients and gathered parameters."""
    whole = cast("FSDPModule", model)
    whole.set_is_last_backward(last)
    whole.set_requires_gradient_sync(last or stage >= 2)
    whole.set_reshard_after_backward(last or stage == 3)


def is_sharded(model: nn.Module) -> bool:
    """Return whether :func:`shard` was applied to ``model``."""
    return isinstance(model, FSDPModule)


def _replicate(module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise RuntimeError(
            f"ZeRO stage 0 needs a newer torch than {torch.__version__}\n"
            "install torch>=2.10, or take a plan with zero=1"
        ) from error
    replicate(module, mesh=mesh, mp_policy=precision)


def _reduce_unused(model: nn.Module) -> None:
    """Let a parameter that no batch of this rank has used be reduced with those of other ranks, as zeros.

    Ranks whose batches take other ways through the model would reduce tensors of other sizes, and wait for
    each other for ever or add up what does not belong together.
    """
    allow = getattr(model, "set_reduce_scatter_unused_params", None)  # torch 2.12
    if allow is not None:
        allow(True)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]
