"""Mini models of three styles, and their losses over some training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from stoker_kernels.models.bert import Bert
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import TransformerConfig, bert_base, gpt2_small, llama3_8b

Losses = list[float]
MINI = {"vocab_size": 61, "layers": 2, "block_size": 24, "dropout": 0.0}
STYLES: dict[str, TransformerConfig] = {
    "gpt": gpt2_small(**MINI, heads=2, dim=64),
    "bert": bert_base(**MINI, heads=2, dim=64),
    "llama": llama3_8b(**MINI, heads=4, kv_heads=2, dim=128, hidden=88),
}
# One layer of one head (LLaMA: two queries to a key), few tokens: for the interpreter.
TINY: dict[str, TransformerConfig] = {
    name: replace(
        style,
        layers=1,
        block_size=8,
        heads=2 if name == "llama" else 1,
        kv_heads=1,
        dim=64 if name == "llama" else 32,
        hidden=40,
    )
    for name, style in STYLES.items()
}


def build(config: TransformerConfig, seed: int = 3) -> CausalLM | Bert:
    """A model from a fixed start. One thread: models this small lose by a second one."""
    torch.set_num_threads(1)  # the folder's fixture puts it back
    torch.manual_seed(seed)
    return CausalLM(config) if config.causal else Bert(config)


def batch_of(config: TransformerConfig, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Inputs of one step: repeating tokens; BERT's with padding, two sentences and masked places."""
    s = config.block_size
    start = torch.randint(0, 8, (batch, 1), generator=generator)
    tokens = (start * 3 + torch.arange(s + 1) * 7) % config.vocab_size  # (B, S + 1)
    if config.causal:
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    tokens = tokens[:, 1:]
    lengths = torch.randint(s // 2, s + 1, (batch,), generator=generator)
    masked = torch.randint(0, s // 2, (batch, 3), generator=generator)  # (B, P)
    return {
        "tokens": tokens.scatter(1, masked, 0),
        "targets": tokens.gather(1, masked),
        "masked": masked,
        "lengths": lengths,
        "token_types": (torch.arange(s) >= s // 3).long().expand(batch, s),
        "next_targets": torch.randint(0, 2, (batch,), generator=generator),
    }


def loss_of(model: CausalLM | Bert, inputs: dict[str, Any]) -> torch.Tensor:
    out = model(**inputs)
    loss = out.loss if hasattr(out, "loss") else out[1]
    assert loss is not None
    return loss


def train(
    config: TransformerConfig,
    steps: int,
    *,
    batch: int = 4,
    prepare: Callable[[Any], Any] = lambda model: model,
    autocast: bool = False,
) -> tuple[Losses, CausalLM | Bert]:
    """The losses of ``steps`` steps of AdamW from a fixed start, and the model at the end."""
    model = prepare(build(config))
    optimizer = model.optimizer(lr=2e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        inputs = batch_of(config, batch, generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model
