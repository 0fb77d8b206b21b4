"""Gradient exchange in one bit per value, with error feedback: EF-signSGD, after Seide et al. 2014."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker_kernels.compression.interface import Combine, Message, OneRound, message_of
from stoker_kernels.ops.onebit import onebit_compress, onebit_decompress


class OneBit(OneRound):
    """Signs and one scale per 1024 values: 32 times fewer bytes, less 3 %; the error stays in the memory.

    All workers receive all messages. A block with a non-finite value is received as non-finite and
    keeps its old error. Parameters that never get a gradient should not share a tensor with others:
    signs have no zero, so they would take small alternating steps.
    """

    name = "onebit"
    residual = "error"

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return signs and scales of gradient plus error."""
        self._begin(name)
        words, scales = onebit_compress(gradient, self._memory_tensor(name, "error", gradient))
        return message_of(gradient, Combine.GATHER, words, scales)

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the mean of the messages."""
        return unpack(messages)

    def config(self) -> dict[str, Any]:
        """Return no options."""
        return {}


def unpack(messages: Sequence[Message]) -> torch.Tensor:
    """Return the mean of 1-bit messages, in the gradient's shape and dtype."""
    shape, dtype = messages[0].shape, messages[0].dtype
    words = torch.stack([message.tensors[0] for message in messages])
    scales = torch.stack([message.tensors[1] for message in messages])
    return onebit_decompress(words, scales, shape.numel(), dtype).view(shape)
