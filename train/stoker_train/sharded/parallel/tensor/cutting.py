"""The choice of a plan of tensor parallelism: by a model's types, or by names of its modules.

Called by ``apply``, before recomputation and ZeRO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.tensor import named_plans
from stoker_train.sharded.parallel.tensor.exchange import TensorGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def cut(
    model: nn.Module, mesh: DeviceMesh, *, sequence: bool, plan: Mapping[str, Any] | None
) -> None:
    """Cut ``model`` in place over the 1-d ``mesh``; its parameters become DTensors.

    BadRequestError for a model that is not ours without a plan, and for what the ranks do not divide.
    """
    from stoker_train.sharded.parallel.tensor import our_models  # its kernels load Triton

    if any(p.is_meta for p in model.parameters()):
        raise BadRequestError(
            f"tensor {mesh.size()}: the model is on the meta device\nmake it on the CPU",
            field="model",
        )
    group = TensorGroup(mesh, sequence)
    if plan is not None:
        named_plans.cut(model, group, plan)
    elif our_models.is_ours(model):
        our_models.cut(model, group)
    else:
        raise BadRequestError(
            f"tensor {mesh.size()}: nothing says how {type(model).__name__} is cut\n"
            'give tensor_plan={"name of a module": "colwise" or "rowwise", ...}, or take tensor=1',
            field="tensor_plan",
        )
