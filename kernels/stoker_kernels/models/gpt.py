"""The byte-level GPT of the examples: :class:`CausalLM` over bytes, with sampling."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import TransformerConfig


class GPTConfig(TransformerConfig):
    """A model's shape whose defaults make the 0.8M-parameter demo over bytes."""


class GPT(CausalLM):
    """A language model of bytes. Its vocabulary is so small that it returns the logits with the loss."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__(config or GPTConfig())

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes | Iterable[int],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Continue ``prompt`` by ``max_new_tokens`` sampled bytes; returns prompt and continuation.

        ``temperature=0`` takes the likeliest byte. An empty prompt starts from a newline, which is part
        of the result. Nothing is dropped, also in training mode, which is left as it was.
        """
        if temperature < 0.0 or (top_k is not None and top_k < 1):
            raise ValueError("GPT.generate: temperature must be at least 0, and top_k at least 1")
        if self.config.vocab_size > 256:
            raise ValueError("GPT.generate returns bytes: vocab_size must be at most 256")
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            return bytes(self._continued(prompt, max_new_tokens, temperature, top_k, generator))
        finally:
            for module in training:
                module.training = True

    def _continued(
        self,
        prompt: bytes | Iterable[int],
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        generator: torch.Generator | None,
    ) -> list[int]:
        device = self.embed.weight.device
        tokens = torch.tensor([list(prompt) or [ord("\n")]], device=device)  # (1, S)
        for _ in range(max_new_tokens):
            logits, _ = self(tokens[:, -self.config.block_size :])
            last = logits[:, -1].float()  # (1, V)
            if temperature == 0.0:
                chosen = last.argmax(-1, keepdim=True)
            else:
                last = last / temperature
                if top_k is not None:
                    threshold = last.topk(min(top_k, last.shape[-1])).values[:, -1:]
                    last = last.masked_fill(last < threshold, float("-inf"))
                chosen = torch.multinomial(last.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], 1)
        result: list[int] = tokens[0].tolist()
        return result
