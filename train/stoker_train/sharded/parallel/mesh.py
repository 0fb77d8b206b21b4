"""The ranks of a job as a mesh of pipeline, data and tensor parallelism.

Called by the rank's context once, after ``torch.distributed`` has been initialised. It must agree with
``Plan.rank_of``: the planner puts tensor groups inside nodes by these numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    from stoker_train.planning.strategy import Strategy

PIPELINE, DATA, TENSOR = DIMS = ("pp", "data", "tp")
"""The names of the mesh's dimensions, in order."""


def device_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """Return the mesh (pipeline, data, tensor) of all ranks, also where a degree is 1.

    Every rank calls it: it makes process groups. BadRequestError where the job has another number of
    ranks than the plan needs, or the plan cuts experts.
    """
    if strategy.expert > 1:
        raise BadRequestError(
            f"expert {strategy.expert}: sharded training does not cut experts\n"
            "take a plan with expert=1",
            field="expert",
        )
    ranks = dist.get_world_size()
    if ranks != strategy.gpus:
        raise BadRequestError(
            f"the plan needs {strategy.gpus} ranks, the job has {ranks}\n"
            f"data {strategy.data} x tensor {strategy.tensor} x pipeline {strategy.pipeline} must be "
            "the number of ranks",
            field="plan",
        )
    return DeviceMesh(device_type, _ranks(strategy), mesh_dim_names=DIMS)


def _ranks(strategy: Strategy) -> torch.Tensor:
    """Return the ranks (pipeline, data, tensor): ``tensor + data * stride + stage * stride``."""
    stage = torch.arange(strategy.pipeline)[:, None, None] * strategy.pipeline_stride
    data = torch.arange(strategy.data)[None, :, None] * strategy.data_stride
    return stage + data + torch.arange(strategy.tensor)[None, None, :]
