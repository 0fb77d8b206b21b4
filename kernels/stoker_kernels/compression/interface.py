"""The interface of gradient compressors: their messages, how they combine, memory and state.

A compressor belongs to one worker and sees one tensor at a time, by name. ``exchange`` is the whole
protocol as a generator: it yields what this worker sends, is sent what the workers' messages combine
to, and returns the gradient that all workers then share. Whoever drives it owns the network:
:mod:`stoker_kernels.compression.exchange` over torch.distributed, or between simulated workers.

    message combines by   what is sent back                       network
    MEAN                  one message, the mean of every tensor   all-reduce: size does not grow with workers
    GATHER                all messages, in order of rank          all-gather: received bytes grow with workers

Rules for all: messages of a tensor have one size on all workers; results are the same bits on all
workers; nothing modifies the gradient; arithmetic and memory are fp32 (fp64 for fp64 gradients).
Non-finite gradients: every worker's result has a non-finite value, so each skips that step, and
the memory stays finite: it keeps its old value or forgets the place, as each class says.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch

from stoker_kernels.runtime.backend import compute_dtype


class Combine(StrEnum):
    """The way in which the messages of all workers become one."""

    MEAN = "mean"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Message:
    """One worker's message for one tensor; ``shape`` and ``dtype`` are the gradient's."""

    tensors: tuple[torch.Tensor, ...]
    combine: Combine
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def holding(self, tensors: Sequence[torch.Tensor]) -> Message:
        """Return this message with other tensors."""
        return Message(tuple(tensors), self.combine, self.shape, self.dtype)


Exchange = Generator[Message, Sequence[Message], torch.Tensor]
"""Yields messages, is sent what they combine to (one for MEAN, all for GATHER), returns the result."""


class Compressor(ABC):
    """One worker's side of one method of gradient exchange.

    ``residual`` says which entry of :meth:`memory` holds what was not sent yet; None: nothing is kept
    back, what does not reach the other workers is lost.
    """

    name: ClassVar[str]
    residual: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._memory: dict[str, dict[str, torch.Tensor]] = {}
        self._steps: dict[str, int] = {}

    @abstractmethod
    def exchange(self, gradient: torch.Tensor, name: str) -> Exchange:
        """Run the rounds of a step for the tensor ``name``, not empty; the result is like ``gradient``."""

    @abstractmethod
    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the gradient that ``messages`` stand for; of several, what all senders would receive."""

    def compress(self, gradient: torch.Tensor, name: str) -> Message:
        """Return everything this worker sends in this step if it is alone; updates the memory."""
        rounds = self.exchange(gradient, name)
        message = next(rounds)
        sent = list(message.tensors)
        try:
            while True:
                message = rounds.send([message])
                sent += message.tensors
        except StopIteration:
            return message.holding(sent)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the options it was made with, as plain values."""

    def memory(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors kept for ``name`` from step to step, themselves and not copies."""
        return self._memory.setdefault(name, {})

    def names(self) -> tuple[str, ...]:
        """Return the names for which something is kept."""
        return tuple(self._memory)

    def step_of(self, name: str) -> int:
        """Return how many exchanges of ``name`` were begun."""
        return self._steps.get(name, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next messages depend on: tensors and plain values. Each worker has its own."""
        memory = {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in self._memory.items()
        }
        return {
            "compressor": self.name,
            "config": copy.deepcopy(self.config()),
            "memory": memory,
            "steps": dict(self._steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ``ValueError`` for another compressor's or other options'."""
        own = {"compressor": self.name, "config": self.config()}
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(f"the state is of {key} {state[key]!r}, this one has {value!r}")
        self._memory = {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in state["memory"].items()
        }
        self._steps = dict(state["steps"])

    def _begin(self, name: str) -> int:
        """Count a step of ``name``; returns how many there were before."""
        step = self.step_of(name)
        self._steps[name] = step + 1
        return step

    def _memory_tensor(
        self, name: str, key: str, gradient: torch.Tensor, size: int | None = None
    ) -> Any:
        """Return flat memory ``key`` on gradient's device, zeros at first; ``ValueError`` if resized."""
        tensors = self.memory(name)
        size = gradient.numel() if size is None else size
        if key not in tensors:
            tensors[key] = torch.zeros(
                size, dtype=compute_dtype(gradient.dtype), device=gradient.device
            )
        elif tensors[key].device != gradient.device:
            tensors[key] = tensors[key].to(gradient.device)
        if tensors[key].numel() != size:
            raise ValueError(
                f"{name!r} has {size} values now and had {tensors[key].numel()}: "
                "a tensor keeps its name and its size"
            )
        return tensors[key]


class OneRound(Compressor):
    """A compressor whose step is one message: :meth:`pack` it, :meth:`decompress` what comes back."""

    @abstractmethod
    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the message for ``gradient``; updates the memory."""

    def exchange(self, gradient: torch.Tensor, name: str) -> Exchange:
        """Do as :meth:`Compressor.exchange`."""
        return self.decompress((yield self.pack(gradient.detach(), name)))


def message_of(gradient: torch.Tensor, combine: Combine, *tensors: torch.Tensor) -> Message:
    """Return a message for ``gradient`` that holds ``tensors``."""
    return Message(tensors, combine, gradient.shape, gradient.dtype)
