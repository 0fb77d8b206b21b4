"""Compression inside DistributedDataParallel: a communication hook and its state.

    state = HookState(make_compressor("topk", ratio=0.01), model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)

The hook works on parameters, not on buckets: memory is kept by a parameter's name, so it survives DDP's
rebuilding of buckets after the first step, and a checkpoint. A bucket's messages travel together.
gloo with CPU tensors and NCCL with CUDA tensors both work; collectives run in the order in which
DDP fills buckets, the same on all workers.

``ddp`` holds the process group: drop it before ``destroy_process_group``. gloo's threads end with the
group, and one that outlives it can abort the process at exit. ``torch.distributed.nn.functional``, which
DDP imports, keeps the group that exists when it is imported: ``stoker.train.init_process_group`` imports
it first; without that function, do the same.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stoker_kernels.compression.exchange import GradientExchange, TorchGroup
from stoker_kernels.compression.interface import Compressor


class HookState:
    """One worker's compressor, the names of the parameters, and the bytes sent so far.

    ``named_parameters`` are those of the model that DDP wraps. Each worker's ``state_dict`` is its own:
    save all of them, for the memory holds gradients that only its worker has seen.
    """

    def __init__(
        self,
        compressor: Compressor,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.compressor = compressor
        self.exchange = GradientExchange(compressor, TorchGroup(process_group))
        self._parameters = {
            id(parameter): (parameter, name) for name, parameter in named_parameters
        }

    @property
    def sent_nbytes(self) -> int:
        """The size of all messages of this worker."""
        return self.exchange.sent_nbytes

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of ``parameter``. Raises ``KeyError`` for one it was not told of."""
        try:
            return self._parameters[id(parameter)][1]
        except KeyError:
            raise KeyError(
                f"a parameter of shape {tuple(parameter.shape)} is none of the named_parameters "
                "that HookState was made with"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state."""
        return self.compressor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the compressor's state."""
        self.compressor.load_state_dict(state)


def compression_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP compares the annotation itself
) -> torch.futures.Future[torch.Tensor]:
    """Return the hook for ``register_comm_hook``: exchanges a bucket, in place, and returns it done."""
    gradients = {
        state.name_of(parameter): gradient
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    }
    results = state.exchange.average(gradients)
    for name, gradient in gradients.items():
        gradient.copy_(results[name])
    buffer = bucket.buffer()
    devices = [buffer.device] if buffer.is_cuda else None
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(buffer)
    return done
