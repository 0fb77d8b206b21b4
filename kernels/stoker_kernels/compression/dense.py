"""Gradient exchange of every value: as it is, in half precision, or combined by Adasum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from stoker_kernels.compression.interface import Combine, Message, OneRound, message_of
from stoker_kernels.ops.adasum import adasum


class NoCompression(OneRound):
    """The gradients' mean, in their own dtype. Keeps nothing, loses nothing."""

    name = "none"

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the gradient itself."""
        self._begin(name)
        return message_of(gradient, Combine.MEAN, gradient.reshape(-1))

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Do as :meth:`Compressor.decompress`."""
        mean = messages[0].tensors[0]
        for other in messages[1:]:
            mean = mean + other.tensors[0]
        message = messages[0]
        return (mean / len(messages)).view(message.shape).to(message.dtype)

    def config(self) -> dict[str, Any]:
        """Return no options."""
        return {}


class Half(NoCompression):
    """The mean in half precision, 2 bytes per value. No memory: what rounding takes is lost.

    A value beyond half's range becomes infinite on every worker. For gradients in half precision already,
    the same as none.
    """

    wire: ClassVar[torch.dtype]

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the gradient, rounded."""
        self._begin(name)
        return message_of(gradient, Combine.MEAN, gradient.reshape(-1).to(self.wire))

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Do as :meth:`Compressor.decompress`; several are averaged in fp32."""
        mean = torch.stack([message.tensors[0].float() for message in messages]).mean(0)
        return mean.view(messages[0].shape).to(messages[0].dtype)


class Float16(Half):
    """11 bits of fraction, up to 65504: for gradients that loss scaling keeps in range."""

    name = "fp16"
    wire = torch.float16


class BFloat16(Half):
    """8 bits of fraction, fp32's range."""

    name = "bf16"
    wire = torch.bfloat16


class Adasum(OneRound):
    """Gradients combined by their agreement instead of averaged (see ``ops/adasum``).

    Each worker receives every gradient, so it saves no bytes: it changes what large batches learn.
    A tensor counts as a layer. Keeps nothing.
    """

    name = "adasum"

    def pack(self, gradient: torch.Tensor, name: str) -> Message:
        """Return the gradient itself."""
        self._begin(name)
        return message_of(gradient, Combine.GATHER, gradient.reshape(-1))

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the tree over all messages; of one, its gradient."""
        combined = adasum([message.tensors[0] for message in messages])
        return combined.view(messages[0].shape)

    def config(self) -> dict[str, Any]:
        """Return no options."""
        return {}
