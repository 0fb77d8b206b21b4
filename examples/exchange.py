"""The training example's gradient exchange: one flat all-reduce, or a compressor.

Imports no torch at module level: the driver, which only names the method, needs none.
"""

from __future__ import annotations

from typing import Any

METHODS = ("none", "fp16", "bf16", "topk", "sidco", "onebit", "powersgd", "csc", "adasum")
"""Those whose result is a gradient; DGC and 1-bit Adam give a momentum, for optimizers of their own."""


class Exchange:
    """Sums gradients over the workers, in place in one flat buffer that ends with the loss.

    ``parameters`` are (name, parameter) pairs whose ``grad`` are views of ``sums``. A worker's gradient is
    its share of the mean over the global batch.
    """

    def __init__(self, method: str, parameters: list[tuple[str, Any]], sums: Any) -> None:
        self.parameters, self.sums = parameters, sums
        self.compressor: Any = None
        if method != "none":
            from stoker_kernels.compression import make

            self.compressor = make(method)

    def run(self, *, gradients: bool) -> None:
        """Exchange the loss, and with ``gradients`` those too."""
        import torch.distributed as dist

        if self.compressor is None:
            dist.all_reduce(self.sums)
            return
        dist.all_reduce(self.sums[-1:])
        if not gradients:
            return
        from stoker_kernels.compression import GradientExchange, TorchGroup

        workers = dist.get_world_size()
        # Compressors average whole gradients (Adasum is no sum), so a share is made whole first.
        whole = {name: parameter.grad * workers for name, parameter in self.parameters}
        results = GradientExchange(self.compressor, TorchGroup()).average(whole)
        for name, parameter in self.parameters:
            parameter.grad.copy_(results[name])

    def gather_state(self) -> list[Any] | None:
        """What every worker's compressor remembers, in order of rank; all call it. None: nothing."""
        import torch.distributed as dist

        if self.compressor is None:
            return None
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.compressor.state_dict())
        return states

    def load_state(self, states: list[Any] | None, rank: int, workers: int) -> None:
        """Go on from gathered states; from nothing where the number of workers is another."""
        if self.compressor is not None and states is not None and len(states) == workers:
            self.compressor.load_state_dict(states[rank])
