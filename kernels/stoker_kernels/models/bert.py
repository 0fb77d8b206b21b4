"""BERT (Devlin et al. 2019): the encoder with its pooler, and the two heads of its pre-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.models.transformer import Transformer, make_adamw, make_norm
from stoker_kernels.nn import LMHead
from stoker_kernels.nn.head import IGNORE_INDEX

if TYPE_CHECKING:
    from stoker_kernels.models.config import TransformerConfig


class BertEncoder(Transformer):
    """Bidirectional encoder: a vector for each token, and the first token's, pooled, for each sequence."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.pooler = nn.Linear(config.dim, config.dim)
        self.start()

    @staticmethod
    def count(config: TransformerConfig) -> int:
        """Count the parameters in closed form: the body's and the pooler's C^2 + C."""
        return config.parameter_count + config.dim * (config.dim + 1)

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map tokens, token_types (B, S) int64, lengths (B,) -> outputs (B, S, C), pooled (B, C).

        Tokens beyond a row's length are padding: no real token sees them. Attention then runs over the
        lengths alone, and nothing waits for the device to know them.
        """
        x = self.hidden(tokens, token_types, lengths=lengths)  # (B, S, C)
        return x, torch.tanh(self.pooler(x[:, 0]))


class BertOutput(NamedTuple):
    """The result of :class:`Bert`; a loss is None without its targets."""

    logits: torch.Tensor | None  # (B, P, V); None with targets, unless config.full_logits
    next_logits: torch.Tensor  # (B, 2)
    loss: torch.Tensor | None  # sum of the losses whose targets were given


class Bert(nn.Module):
    """The encoder with the masked-token head (decoder tied to the embedding) and next-sentence head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = BertEncoder(config)
        self.transform = nn.Linear(config.dim, config.dim)
        self.norm = make_norm(config)
        self.head = LMHead(config.dim, config.vocab_size, bias=True, ops=config.switches.loss)
        self.head.weight = self.encoder.embed.weight
        self.next_sentence = nn.Linear(config.dim, 2)
        for linear in (self.transform, self.next_sentence):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        nn.init.zeros_(self.head.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Bert:
        tied = self.head.weight is self.encoder.embed.weight
        super()._apply(fn, recurse)
        if tied:  # leaving the meta device makes two parameters of the one
            self.head.weight = self.encoder.embed.weight
        return self

    @staticmethod
    def count(config: TransformerConfig) -> int:
        """Count in closed form: encoder, transform and its norm, the decoder's bias, the 2-class head."""
        c = config.dim
        heads = c * (c + 1) + config.norm_count + config.vocab_size + 2 * (c + 1)
        return BertEncoder.count(config) + heads

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        token_types: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        masked: torch.Tensor | None = None,
        next_targets: torch.Tensor | None = None,
    ) -> BertOutput:
        """Take tokens (B, S); ``masked`` (B, P) are the places to predict, all S by default.

        ``targets`` (B, P) with -100 for places that do not count, ``next_targets`` (B,) 0 or 1.
        """
        x, pooled = self.encoder(tokens, token_types, lengths)  # (B, S, C), (B, C)
        if masked is not None:  # about 15 % of the places: the head is most of the work otherwise
            x = x.gather(1, masked[..., None].expand(-1, -1, x.shape[-1]))  # (B, P, C)
        x = self.norm(F.gelu(self.transform(x)))
        next_logits = self.next_sentence(pooled)  # (B, 2)
        logits, losses = None, []
        if targets is None:
            logits = self.head(x)  # (B, P, V)
        elif self.config.full_logits:
            logits = self.head(x)
            losses.append(self.head.loss_of(logits, targets))
        else:
            losses.append(self.head.loss(x, targets))
        if next_targets is not None:
            losses.append(
                F.cross_entropy(next_logits.float(), next_targets, ignore_index=IGNORE_INDEX)
            )
        return BertOutput(logits, next_logits, sum(losses[1:], losses[0]) if losses else None)

    def optimizer(
        self,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> torch.optim.Optimizer:
        """Return :func:`make_adamw` of this model, with BERT's numbers."""
        return make_adamw(self, self.config.switches.optimizer, lr, weight_decay, betas)
