"""Decoder language models by config: GPT-2, LLaMA and Falcon are some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_kernels.models.transformer import Transformer
from stoker_kernels.nn import LMHead, Packing

if TYPE_CHECKING:
    import torch

    from stoker_kernels.models.config import TransformerConfig


class CausalLM(Transformer):
    """A transformer that predicts the next token.

    >>> model = CausalLM(llama2_7b())  # doctest: +SKIP
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.head = LMHead(config.dim, config.vocab_size, ops=config.switches.loss)
        if config.tied:
            self.head.weight = self.embed.weight
        self.start()

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLM:
        tied = self.head.weight is self.embed.weight
        super()._apply(fn, recurse)
        if tied:  # leaving the meta device makes two parameters of the one
            self.head.weight = self.embed.weight
        return self

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Map tokens, targets (B, S) int64 -> logits (B, S, V), mean loss in nats (None without targets).

        Targets of -100 are ignored. With targets the logits are None unless ``config.full_logits``.
        Raises ``ValueError`` for a sequence longer than ``block_size``.
        """
        return self.answer(self.hidden(tokens, packing=packing), targets)

    def answer(
        self, x: torch.Tensor, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Map the last layer's output (B, S, C), normalised, to what :meth:`forward` returns."""
        if targets is None:
            return self.head(x), None
        if not self.config.full_logits:
            return None, self.head.loss(x, targets)
        logits = self.head(x)  # (B, S, V)
        return logits, self.head.loss_of(logits, targets)
