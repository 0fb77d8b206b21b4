"""Weighted means of replicas' tensors: parameters after local steps, and optimizer state.

Strategies use it. Weights of all ranks sum to 1: a rank's part of the samples since the last mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stoker_kernels.compression import Compressor
    from stoker_train.elastic.sync.exchange import GradientExchange, Handle

_HALVES = (torch.float16, torch.bfloat16)


class PendingMean:
    """A weighted mean on its way. :meth:`wait` for it on every rank, in the order of the launches."""

    def __init__(
        self, flats: list[tuple[torch.Tensor, list[int]]], handles: list[Handle], like: list[Any]
    ) -> None:
        self._flats, self._handles, self._like = flats, handles, like

    def wait(self) -> list[torch.Tensor]:
        """Return the means, like what was given. All handles are waited for, then an error is raised."""
        failure: BaseException | None = None
        for handle in self._handles:
            try:
                handle.wait()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        means: list[torch.Tensor] = [torch.empty(0)] * len(self._like)
        for flat, places in self._flats:
            sizes = [self._like[place].numel() for place in places]
            for place, part in zip(places, torch.split(flat, sizes), strict=True):
                like = self._like[place]
                means[place] = part.view(like.shape).to(like.dtype)
        return means


@torch.no_grad()
def start_mean(
    exchange: GradientExchange, tensors: Sequence[torch.Tensor], weight: float
) -> PendingMean:
    """Launch the weighted mean of ``tensors``, one collective for each dtype and device.

    The tensors are copied: they may change at once. Halves are added up in float32.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        dtype = torch.float32 if tensor.dtype in _HALVES else tensor.dtype
        kinds.setdefault((dtype, tensor.device), []).append(place)
    flats, handles = [], []
    for (dtype, _), places in kinds.items():
        flat = torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places])
        flat.mul_(weight)
        flats.append((flat, places))
        if exchange.workers > 1:
            handles.append(exchange.launch(flat))
    return PendingMean(flats, handles, [tensor.detach() for tensor in tensors])


@torch.no_grad()
def average_(exchange: GradientExchange, tensors: Sequence[torch.Tensor], weight: float) -> None:
    """Replace ``tensors`` by their weighted mean over all ranks; the same bits on all of them."""
    if exchange.workers == 1 or not tensors:
        return
    torch._foreach_copy_(
        [tensor.detach() for tensor in tensors], start_mean(exchange, tensors, weight).wait()
    )


@torch.no_grad()
def mean_of_changes(
    exchange: GradientExchange,
    changes: Sequence[torch.Tensor],
    weight: float,
    compressor: Compressor | None,
) -> list[torch.Tensor]:
    """Return the weighted mean of the ranks' ``changes`` since they were equal, compressed if asked for.

    Compressed local steps are Qsparse-local-SGD (Basu et al., NeurIPS 2019): what travels is the change,
    and what is not sent stays in the compressor's memory.
    """
    if compressor is None or exchange.workers == 1:
        return start_mean(exchange, changes, weight).wait()
    from stoker_kernels.compression import GradientExchange as CompressedExchange
    from stoker_kernels.compression import TorchGroup

    network = CompressedExchange(compressor, TorchGroup(exchange.group))
    scaled = {
        str(number): change * (weight * exchange.workers) for number, change in enumerate(changes)
    }
    results = network.average(scaled)
    exchange.sent_nbytes += network.sent_nbytes
    exchange.collectives += 1
    return [results[str(number)] for number in range(len(changes))]


@torch.no_grad()
def average_state_(
    exchange: GradientExchange,
    params: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    weight: float,
) -> None:
    """Replace the optimizer's state (momenta) by the weighted mean over all ranks.

    State that a rank has not got, of a parameter that had no gradient there, stays as it is on each.
    """
    if exchange.workers == 1:
        return
    has = torch.tensor([float(bool(optimizer.state.get(param))) for param in params])
    if params:
        has = has.to(params[0].device)
        exchange.start_sum(has).wait()
    everywhere = [count >= exchange.workers for count in has.tolist()]
    tensors = [
        value
        for param, all_have in zip(params, everywhere, strict=True)
        if all_have
        for _, value in sorted(optimizer.state[param].items())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    average_(exchange, tensors, weight)
