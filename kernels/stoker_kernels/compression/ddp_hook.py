"""Compression inside DistributedDataParallel: a communication hook and its state.

    state = HookState(make_compressor("topk", ratio=0.01), model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)

A bucket's first messages travel while the backward pass goes on; the last bucket's hook waits for all,
and runs what further rounds a method has, bucket by bucket. The hook works on parameters, not on buckets:
memory is kept by a parameter's name, so it survives DDP's rebuilding of buckets after the first step, and a
checkpoint. A bucket's messages travel together.
gloo with CPU tensors and NCCL with CUDA tensors both work; collectives start in the order in which
DDP fills buckets, the same on all workers.

``ddp`` holds the process group: drop it before ``destroy_process_group``. gloo's threads end with the
group, and one that outlives it can abort the process at exit. ``torch.distributed.nn.functional``, which
DDP imports, keeps the group that exists when it is imported: ``stoker.train.init_process_group`` imports
it first; without that function, do the same.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stoker_kernels.compression.exchange import GradientExchange, StartedExchange, TorchGroup
from stoker_kernels.compression.interface import Compressor


class _Bucket(NamedTuple):
    """A bucket whose messages are under way."""

    started: StartedExchange
    gradients: dict[str, torch.Tensor]
    buffer: torch.Tensor
    done: torch.futures.Future[torch.Tensor]


class HookState:
    """One worker's compressor, the names of the parameters, and the bytes sent so far.

    ``named_parameters`` are those of the model that DDP wraps. ``overlap=False`` waits for each bucket before
    the backward pass goes on; the results are the same bits. Each worker's ``state_dict`` is its own:
    save all of them, for the memory holds gradients that only its worker has seen.
    """

    def __init__(
        self,
        compressor: Compressor,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        process_group: dist.ProcessGroup | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.compressor, self.overlap = compressor, overlap
        self._under_way: list[_Bucket] = []
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

    def begin(self) -> None:
        """Forget what a backward pass that raised has left under way."""
        self._under_way = []

    def start(
        self, gradients: dict[str, torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket's first messages; :meth:`finish` replaces its gradients, views of ``buffer``."""
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._under_way.append(_Bucket(self.exchange.start(gradients), gradients, buffer, done))
        return done

    def finish(self) -> None:
        """Wait for all buckets under way, in the order in which they started."""
        under_way, self._under_way = self._under_way, []
        for bucket in under_way:
            results = bucket.started.finish()
            for name, gradient in bucket.gradients.items():
                gradient.copy_(results[name])
            bucket.done.set_result(bucket.buffer)

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
    """Exchange a bucket in place; DDP waits for the result after the last one. For ``register_comm_hook``."""
    if bucket.index() == 0:
        state.begin()
    gradients = {
        state.name_of(parameter): gradient
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    }
    done = state.start(gradients, bucket.buffer())
    if bucket.is_last() or not state.overlap:
        state.finish()
    return done
