"""The exchange through compressors: over torch.distributed, or between workers simulated in one process.

All tensors of one call go through their rounds in step, and what they send in a round is fused: one
all-reduce per dtype, one all-gather. Callers give the same names in the same order on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from stoker_kernels.compression.interface import Combine, Compressor, Exchange, Message


class Group(Protocol):
    """The collectives that an exchange needs, for flat buffers."""

    def mean_(self, buffer: torch.Tensor) -> None:
        """Replace ``buffer`` by its mean over the workers, the same bits on all of them."""

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return every worker's ``buffer``, of one size, in order of rank."""


class TorchGroup:
    """A process group of torch.distributed; the default one if None. Collectives block the stream, on
    gloo the caller, so that all workers issue them in the same order."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.workers = dist.get_world_size(process_group)

    def mean_(self, buffer: torch.Tensor) -> None:
        """Do as :meth:`Group.mean_`; divides first: half precision overflows no sooner than a worker."""
        buffer.div_(self.workers)
        dist.all_reduce(buffer, group=self.process_group)

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Do as :meth:`Group.gather`."""
        received = [torch.empty_like(buffer) for _ in range(self.workers)]
        dist.all_gather(received, buffer, group=self.process_group)
        return received


class GradientExchange:
    """One worker's exchange of many tensors through one compressor.

    ``sent_nbytes`` counts the messages of this worker so far.
    """

    def __init__(self, compressor: Compressor, group: Group) -> None:
        self.compressor, self.group = compressor, group
        self.sent_nbytes = 0

    def average(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Combine the workers' gradients, by name; new tensors, the same bits on all workers."""
        results = {name: g.clone() for name, g in gradients.items() if not g.numel()}
        running: dict[str, Exchange] = {}
        messages: dict[str, Message] = {}
        for name, gradient in gradients.items():
            if gradient.numel():
                running[name] = self.compressor.exchange(gradient, name)
                messages[name] = next(running[name])
        while messages:
            self.sent_nbytes += sum(message.nbytes for message in messages.values())
            combined = _combine(messages, self.group)
            messages = {}
            for name, answer in combined.items():
                try:
                    messages[name] = running[name].send(answer)
                except StopIteration as done:
                    results[name] = done.value
        return {name: results[name] for name in gradients}


def _combine(messages: dict[str, Message], group: Group) -> dict[str, Sequence[Message]]:
    """Run one round, and return what every tensor's message combines to."""
    answers: dict[str, Sequence[Message]] = {}
    means = {name: m for name, m in messages.items() if m.combine is Combine.MEAN}
    parts = [tensor for message in means.values() for tensor in message.tensors]
    averaged = iter(_fused_mean(parts, group))
    for name, message in means.items():
        answers[name] = [message.holding([next(averaged) for _ in message.tensors])]
    gathers = {name: m for name, m in messages.items() if m.combine is Combine.GATHER}
    if gathers:
        parts = [tensor for message in gathers.values() for tensor in message.tensors]
        everyone = [iter(worker) for worker in _fused_gather(parts, group)]
        for name, message in gathers.items():
            answers[name] = [
                message.holding([next(worker) for _ in message.tensors]) for worker in everyone
            ]
    return {name: answers[name] for name in messages}


def _fused_mean(parts: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the means of ``parts``, one collective per dtype."""
    means: list[torch.Tensor] = [torch.empty(0)] * len(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        places = [place for place, part in enumerate(parts) if part.dtype == dtype]
        buffer = torch.cat([parts[place].reshape(-1) for place in places])
        group.mean_(buffer)
        sizes = [parts[place].numel() for place in places]
        for place, mean in zip(places, buffer.split(sizes), strict=True):
            means[place] = mean.view(parts[place].shape)
    return means


def _fused_gather(parts: list[torch.Tensor], group: Group) -> list[list[torch.Tensor]]:
    """Return every worker's ``parts``, in one collective over their bytes."""
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    workers = []
    for buffer in group.gather(torch.cat(flat)):
        pieces = buffer.split([piece.numel() for piece in flat])
        workers.append([_typed(piece, part) for piece, part in zip(pieces, parts, strict=True)])
    return workers


def _typed(piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View bytes as a tensor like ``like``; copied where they are not aligned for its dtype."""
    if piece.storage_offset() % like.element_size():
        piece = piece.clone()
    return piece.view(like.dtype).view(like.shape)


def simulate(
    compressors: Sequence[Compressor], gradients: Sequence[torch.Tensor], name: str
) -> list[torch.Tensor]:
    """Run one step of as many workers as there are compressors, without a network; return each one's."""
    rounds = [
        compressor.exchange(gradient, name)
        for compressor, gradient in zip(compressors, gradients, strict=True)
    ]
    messages = [next(worker) for worker in rounds]
    while True:
        answer: Sequence[Message] = messages
        if messages[0].combine is Combine.MEAN:
            columns = zip(*(message.tensors for message in messages), strict=True)
            answer = [messages[0].holding([_mean(column) for column in columns])]
        results, following = [], []
        for worker in rounds:
            try:
                following.append(worker.send(answer))
            except StopIteration as done:
                results.append(done.value)
        if results:
            return results
        messages = following


def _mean(column: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = column[0] / len(column)
    for other in column[1:]:
        total = total + other / len(column)
    return total
