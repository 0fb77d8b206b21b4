"""The gradients that compressors keep back, as ranks come and go: none of their sum is lost.

Error feedback (Seide et al., 1-bit SGD, 2014; Stich et al., Sparsified SGD with memory, NeurIPS 2018; Lin et
al., Deep gradient compression, ICLR 2018) holds because what a step does not send is sent later. So a rank
that leaves hands it on to one that stays, before the group ends; and as a compressor's result is a mean over
the ranks, what they keep back is scaled when their number changes: sum(residual) / ranks is what is owed to
the parameters, and stays the same. Steps call :func:`hand_on`, strategies :func:`rescale`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from stoker_kernels.compression import Compressor

__all__ = ("hand_on", "heirs", "rescale")


def heirs(world_size: int, staying: Collection[int]) -> dict[int, int]:
    """Return to which of the ranks that stay each other one hands on: rank r to number r mod their count.

    Empty where all stay, or none.
    """
    stay = sorted(staying)
    leave = [rank for rank in range(world_size) if rank not in staying]
    return {rank: stay[rank % len(stay)] for rank in leave} if stay else {}


@torch.no_grad()
def hand_on(compressor: Compressor, heir: Mapping[int, int]) -> None:
    """Add what the ranks that leave keep back to that of their heirs; theirs is zero then.

    ``heir`` is the same on all ranks of the default group, who all call this before they leave it. The sum
    over the ranks stays what it was.
    """
    own, key = dist.get_rank(), compressor.residual
    if key is None:
        return
    for rank, to in sorted(heir.items()):
        if own == rank:
            _send(compressor, key, to)
        elif own == to:
            _receive(compressor, key, rank)


@torch.no_grad()
def rescale(compressor: Compressor, workers: int, before: int) -> None:
    """Bring what was kept back among ``before`` ranks into the scale of a mean over ``workers`` ranks."""
    if compressor.residual is None:
        return
    for name in compressor.names():
        kept = compressor.memory(name).get(compressor.residual)
        if kept is not None:
            kept.mul_(workers).div_(before)


def _send(compressor: Compressor, key: str, to: int) -> None:
    kept = {
        name: tensor
        for name in compressor.names()
        if (tensor := compressor.memory(name).get(key)) is not None
    }
    forms = [(name, tensor.numel(), tensor.dtype) for name, tensor in kept.items()]
    dist.send_object_list([forms], to, device=torch.device("cpu"))
    for tensor in kept.values():
        dist.send(tensor.cpu().contiguous(), to)
        tensor.zero_()


def _receive(compressor: Compressor, key: str, source: int) -> None:
    said: list[list[tuple[str, int, torch.dtype]]] = [[]]
    dist.recv_object_list(said, source, device=torch.device("cpu"))
    for name, size, dtype in said[0]:
        came = torch.empty(size, dtype=dtype)
        dist.recv(came, source)
        memory = compressor.memory(name)
        kept = memory.get(key)
        memory[key] = came if kept is None else kept.add_(came.to(kept.device))
