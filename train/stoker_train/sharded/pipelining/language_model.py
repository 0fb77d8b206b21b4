"""A part of a language model of ours: some of its layers, with what is before the first or after the last.

Made by :mod:`.splitting`. It is a ``CausalLM`` still, so that whatever is found by that type and by names of
modules (plans of tensor parallelism, layers as units of ZeRO, the optimizer's groups) is found in a part too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.transformer import Transformer, takes_seeds

if TYPE_CHECKING:
    from collections.abc import Iterable


class LayerRun(nn.ModuleList):
    """Consecutive layers under the numbers that they have in the whole model, from ``first`` on."""

    def __init__(self, layers: Iterable[nn.Module], first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)


class CausalLMPart(CausalLM):
    """Layers [first, end) of ``whole``, whose modules it takes over. What it does not have is None.

    A tied model's last part has the embedding too, as the head's weight: their names are those of the whole
    model, and ``tied`` says which stages have them.
    """

    def __init__(self, whole: CausalLM, first: int, end: int) -> None:
        nn.Module.__init__(self)  # nothing is made or drawn
        count = len(whole.layers)
        self.is_first, self.is_last = first == 0, end == count
        self.config, self.prompt = whole.config, None
        self._takes_seeds = takes_seeds(whole.config.dropout, whole.config.switches)
        is_tied = self.is_last and whole.head.weight is whole.embed.weight
        embed = whole.embed if self.is_first or is_tied else None
        self.embed = embed  # type: ignore[assignment]
        self.position = whole.position if self.is_first else None
        self.token_type = whole.token_type if self.is_first else None
        self.layers = LayerRun(list(whole.layers)[first:end], first)
        norm_is_here = self.is_first if whole.config.post_norm else self.is_last
        self.norm = whole.norm if norm_is_here else None  # type: ignore[assignment]
        self.head = whole.head if self.is_last else None  # type: ignore[assignment]
        self.training = whole.training

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLMPart:
        if self.is_last and self.embed is not None:
            super()._apply(fn, recurse)
        else:
            Transformer._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, *inputs: Any, targets: torch.Tensor | None = None) -> Any:
        """Map tokens (B, S), or the residual stream (B, S, C) of the part before -> that for the next part.

        What the last layer's MLP adds to the stream is added here, and not in the next layer's norm: one
        tensor passes between parts. The last part maps to what the whole model returns: logits, and with
        ``targets`` the loss.
        """
        stream: torch.Tensor | None = None
        if self.is_first:
            x, stream = self.enter(self.embeddings(*inputs))
        else:
            (x,) = inputs
        x, stream = self.pass_layers(x, stream, close=self.is_last)
        if self.is_last:
            return self.answer(x, targets)
        return x if stream is None else stream + F.dropout(x, self.config.dropout, self.training)
