"""Prompt tuning and P-tuning: trained vectors before the embedded tokens of a frozen model.

Prompt tuning (Lester et al., arXiv 2104.08691) trains the vectors themselves. P-tuning (Liu et al., arXiv
2103.10385) trains vectors and a small network over them, which makes the prompt; :func:`fold` keeps its
result alone. A decoder's prompt is a beginning that every row has and no logits are given for; T5's is the
encoder's.

    y = model([prompt | embed(tokens)])[P:]
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from stoker_kernels.models.adapter_state import take_over
from stoker_kernels.models.t5 import T5
from stoker_kernels.models.transformer import Transformer

Network = Literal["none", "mlp", "lstm"]


class Prompt(nn.Module):
    """The vectors (P, C) that are put before the tokens, made by the ``network`` that P-tuning trains."""

    def __init__(self, start: torch.Tensor, network: Network, hidden: int) -> None:
        super().__init__()
        width = start.shape[1]
        self.vectors = nn.Parameter(start.detach().clone())
        self.lstm = self.mlp = None
        inputs = width
        if network == "lstm":
            self.lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=True)
            inputs = 2 * hidden
        if network != "none":
            self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.to(start.device, start.dtype)

    def forward(self) -> torch.Tensor:
        """Return the prompt (P, C)."""
        vectors: torch.Tensor = self.vectors
        if self.lstm is not None:
            vectors = self.lstm(vectors)[0]
        return vectors if self.mlp is None else self.mlp(vectors)


def inject(
    model: nn.Module,
    length: int,
    *,
    network: Network = "none",
    hidden: int | None = None,
    tokens: torch.Tensor | None = None,
) -> None:
    """Freeze ``model`` and put ``length`` trained vectors before its tokens.

    ``network`` "none" is prompt tuning, "mlp" and "lstm" are P-tuning with ``hidden`` units (as many as the
    model's width by default). The vectors start as the embeddings of ``tokens`` (length,), or of tokens drawn
    at random. Make the optimizer afterwards: it takes the parameters that train. A sequence and the prompt
    together must fit into ``block_size``. Raises ``ValueError`` for a model without embeddings of ours or
    with a prompt already, and for numbers that do not fit.
    """
    if length < 1 or (tokens is not None and tokens.shape != (length,)):
        raise ValueError(
            f"prompt.inject: length must be at least 1 and the number of tokens, got {length}"
        )
    if network not in get_args(Network):
        raise ValueError(f"prompt.inject: network {network!r}: expected none, mlp or lstm")
    body = _body(model, "prompt.inject")
    if body.prompt is not None:
        raise ValueError("prompt.inject: the model has a prompt already")
    weight = body.embed.weight
    if tokens is None:
        tokens = torch.randint(0, weight.shape[0], (length,))
    model.requires_grad_(False)
    start = weight.detach()[tokens.to(weight.device)]
    body.prompt = Prompt(start, network, weight.shape[1] if hidden is None else hidden)


def fold(model: nn.Module) -> None:
    """Keep the vectors that the network makes, and drop it: the same outputs for less."""
    body = _body(model, "prompt.fold")
    if body.prompt is None:
        raise ValueError("prompt.fold: the model has no prompt\ncall prompt.inject(model) first")
    with torch.no_grad():
        body.prompt = Prompt(body.prompt(), "none", 0)


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the prompt's tensors alone, by name: what a fine-tuning run has to store."""
    prompt = _body(model, "prompt.state_dict").prompt
    if prompt is None:
        raise ValueError(
            "prompt.state_dict: the model has no prompt\ncall prompt.inject(model) first"
        )
    return {name: parameter.detach() for name, parameter in prompt.named_parameters()}


def load_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Take over what :func:`state_dict` returned. Raises ``ValueError`` where names or shapes differ."""
    take_over(state_dict(model), state, "prompt.load_state_dict")


def _body(model: nn.Module, name: str) -> Transformer | T5:
    """Return the part of the model that embeds tokens."""
    for module in model.modules():
        if isinstance(module, Transformer | T5):
            return module
    raise ValueError(f"{name}: {type(model).__name__} holds no model of stoker_kernels.models")
