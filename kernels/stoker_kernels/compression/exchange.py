"""The exchange through compressors: over torch.distributed, or between workers simulated in one process.

All tensors of one call go through their rounds in step, and what they send in a round is fused: one
all-reduce per dtype, one all-gather. Callers give the same names in the same order on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from stoker_kernels.compression.interface import Combine, Compressor, Exchange, Message


class Group(Protocol):
    """The collectives that an exchange needs, for flat buffers."""

    def mean_(self, buffer: torch.Tensor) -> None:
        """Replace ``buffer`` by its mean over the workers, the same bits on all of them."""

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return every worker's ``buffer``, of one size, in order of rank."""


Wait = Callable[[], None]
"""Blocks the stream, on gloo the caller, until a collective that was started has ended."""


@runtime_checkable
class StartingGroup(Group, Protocol):
    """A group whose collectives can run beside what the caller does next."""

    def start_mean(self, buffer: torch.Tensor) -> Wait:
        """Start :meth:`Group.mean_`; ``buffer`` is the mean after the wait."""

    def start_gather(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], Wait]:
        """Start :meth:`Group.gather`; the buffers are there after the wait."""


class TorchGroup:
    """A process group of torch.distributed; the default one if None.

    All workers must start their collectives in one order.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.workers = dist.get_world_size(process_group)

    def mean_(self, buffer: torch.Tensor) -> None:
        """Do as :meth:`Group.mean_`."""
        self.start_mean(buffer)()

    def gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Do as :meth:`Group.gather`."""
        received, wait = self.start_gather(buffer)
        wait()
        return received

    def start_mean(self, buffer: torch.Tensor) -> Wait:
        """Start :meth:`mean_`; divides first: half precision overflows no sooner than a worker."""
        buffer.div_(self.workers)
        work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
        return lambda: _ended(work)

    def start_gather(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], Wait]:
        """Start :meth:`gather`."""
        received = [torch.empty_like(buffer) for _ in range(self.workers)]
        work = dist.all_gather(received, buffer, group=self.process_group, async_op=True)
        return received, lambda: _ended(work)


def _ended(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class StartedExchange:
    """An exchange whose first messages are under way; :meth:`finish` runs the rest of it."""

    def __init__(self, exchange: GradientExchange, gradients: Mapping[str, torch.Tensor]) -> None:
        self._exchange, self._names = exchange, list(gradients)
        self._results = {name: g.clone() for name, g in gradients.items() if not g.numel()}
        self._running: dict[str, Exchange] = {}
        messages: dict[str, Message] = {}
        for name, gradient in gradients.items():
            if gradient.numel():
                self._running[name] = exchange.compressor.exchange(gradient, name)
                messages[name] = next(self._running[name])
        self._combined = self._send(messages)

    def _send(self, messages: dict[str, Message]) -> Callable[[], dict[str, Sequence[Message]]]:
        self._exchange.sent_nbytes += sum(message.nbytes for message in messages.values())
        return _start(messages, self._exchange.group)

    def finish(self) -> dict[str, torch.Tensor]:
        """Return what :meth:`GradientExchange.average` does. Its collectives follow all started before."""
        while combined := self._combined():
            messages: dict[str, Message] = {}
            for name, answer in combined.items():
                try:
                    messages[name] = self._running[name].send(answer)
                except StopIteration as done:
                    self._results[name] = done.value
            self._combined = self._send(messages)
        return {name: self._results[name] for name in self._names}


class GradientExchange:
    """One worker's exchange of many tensors through one compressor.

    ``sent_nbytes`` counts the messages of this worker so far.
    """

    def __init__(self, compressor: Compressor, group: Group) -> None:
        self.compressor, self.group = compressor, group
        self.sent_nbytes = 0

    def average(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Combine the workers' gradients, by name; new tensors, the same bits on all workers."""
        return self.start(gradients).finish()

    def start(self, gradients: Mapping[str, torch.Tensor]) -> StartedExchange:
        """Send the first messages, and return without waiting where the group can.

        The gradients must stay as they are until :meth:`StartedExchange.finish`. All workers start and
        finish their exchanges in one order.
        """
        return StartedExchange(self, gradients)


def _start(
    messages: dict[str, Message], group: Group
) -> Callable[[], dict[str, Sequence[Message]]]:
    """Start one round; the result waits for it and returns what every tensor's message combines to."""
    means = {name: m for name, m in messages.items() if m.combine is Combine.MEAN}
    parts = [tensor for message in means.values() for tensor in message.tensors]
    averaged_of = _start_fused_mean(parts, group)
    gathers = {name: m for name, m in messages.items() if m.combine is Combine.GATHER}
    sent = [tensor for message in gathers.values() for tensor in message.tensors]
    everyone_of = _start_fused_gather(sent, group) if gathers else None

    def combined() -> dict[str, Sequence[Message]]:
        answers: dict[str, Sequence[Message]] = {}
        averaged = iter(averaged_of())
        for name, message in means.items():
            answers[name] = [message.holding([next(averaged) for _ in message.tensors])]
        if everyone_of is not None:
            everyone = [iter(worker) for worker in everyone_of()]
            for name, message in gathers.items():
                answers[name] = [
                    message.holding([next(worker) for _ in message.tensors]) for worker in everyone
                ]
        return {name: answers[name] for name in messages}

    return combined


def _start_fused_mean(parts: list[torch.Tensor], group: Group) -> Callable[[], list[torch.Tensor]]:
    """Start the means of ``parts``, one collective per dtype."""
    started: list[tuple[list[int], torch.Tensor, Wait | None]] = []
    for dtype in dict.fromkeys(part.dtype for part in parts):
        places = [place for place, part in enumerate(parts) if part.dtype == dtype]
        buffer = torch.cat([parts[place].reshape(-1) for place in places])
        wait = None
        if isinstance(group, StartingGroup):
            wait = group.start_mean(buffer)
        else:
            group.mean_(buffer)
        started.append((places, buffer, wait))

    def means() -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.empty(0)] * len(parts)
        for places, buffer, wait in started:
            if wait is not None:
                wait()
            sizes = [parts[place].numel() for place in places]
            for place, mean in zip(places, buffer.split(sizes), strict=True):
                found[place] = mean.view(parts[place].shape)
        return found

    return means


def _start_fused_gather(
    parts: list[torch.Tensor], group: Group
) -> Callable[[], list[list[torch.Tensor]]]:
    """Start the gathering of every worker's ``parts``, in one collective over their bytes."""
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    buffer, wait = torch.cat(flat), None
    if isinstance(group, StartingGroup):
        received, wait = group.start_gather(buffer)
    else:
        received = group.gather(buffer)

    def workers() -> list[list[torch.Tensor]]:
        if wait is not None:
            wait()
        found = []
        for own in received:
            pieces = own.split([piece.numel() for piece in flat])
            found.append([_typed(piece, part) for piece, part in zip(pieces, parts, strict=True)])
        return found

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
