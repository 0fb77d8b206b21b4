"""The training example's gradient exchange: DistributedDataParallel with Stoker's hook.

Imports no torch at module level: the driver, which only names the method, needs none.
"""

from __future__ import annotations

from typing import Any

METHODS = ("none", "fp16", "bf16", "topk", "sidco", "onebit", "powersgd", "csc", "adasum")
"""Those whose result is a gradient; DGC and 1-bit Adam give a momentum, for optimizers of their own."""


class Exchange:
    """A model whose backward averages gradients over the workers by ``method``.

    Made while the process is in its group, and dropped before it leaves: :attr:`ddp` holds the group. All
    workers start with the parameters of rank 0.
    """

    def __init__(self, method: str, model: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from stoker_kernels.compression import HookState, compression_hook, make_compressor

        self.ddp = DistributedDataParallel(model)
        self.state = HookState(make_compressor(method), model.named_parameters())
        self.ddp.register_comm_hook(self.state, compression_hook)

    def gather_state(self) -> list[Any]:
        """What every worker's compressor remembers, in order of rank; all call it."""
        import torch.distributed as dist

        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.state.state_dict())
        return states

    def load_state(self, states: list[Any], rank: int) -> None:
        """Go on from gathered states; from nothing where the number of workers is another."""
        import torch.distributed as dist

        if len(states) == dist.get_world_size():
            self.state.load_state_dict(states[rank])
