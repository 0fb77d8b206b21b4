"""Small models, how they are trained by one process and by ranks, and a cut model's whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from stoker_kernels.models.bert import Bert
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import TransformerConfig
from stoker_train.sharded.checkpoints.pieces import pieces_of
from stoker_train.sharded.parallel import traffic
from stoker_train.sharded.parallel.apply import micro_batch, parallelize
from stoker_train.sharded.parallel.mesh import DATA
from stoker_train.sharded.parallel.tensor.our_models import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from stoker_train.planning.strategy import Strategy

VOCAB, TOKENS, BATCH = 64, 16, 8
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"norm": "layer", "bias": True, "dim": 128, "ops": "stoker"},
    "llama": {"mlp": "swiglu", "position": "rotary", "tied": False},
    "grouped": {
        "kv_heads": 2, "mlp": "swiglu", "position": "rotary", "bias": True, "full_logits": True,
    },
    "falcon": {"position": "alibi", "parallel_norms": 2},
    "bert": {
        "post_norm": True, "causal": False, "mlp": "gelu", "bias": True, "token_types": 2,
        "norm": "layer",
    },
}  # fmt: skip


def make_model(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "layers": 2, "heads": 4, "dim": 32, "block_size": 32, "vocab_size": VOCAB, "ops": "torch",
        "full_logits": False,
    }  # fmt: skip
    config = TransformerConfig(**{**shape, **KINDS[kind], **changes})
    model = Bert(config) if kind == "bert" else CausalLM(config)
    for name, p in model.named_parameters():  # biases and norms that are like others hide errors
        if p.dim() == 1:
            nn.init.normal_(p, mean=float("norm" in name and "weight" in name), std=0.1)
    return model


def batches(steps: int, seed: int = 7) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=drawn)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Bert):
        return model(x, y, token_types=x % 2, next_targets=x[:, 0] % 2).loss
    return model(x, y)[1]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One whose updates are as large as gradients: what is wrong with these shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(model: nn.Module, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = optimizer_of(model)
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(
    kind: str, strategy: Strategy, steps: int, mesh: DeviceMesh
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses of whole batches, whole weights, and the counted bytes of the last step."""
    model = parallelize(make_model(kind, seed=mesh.get_rank()), strategy, mesh)
    optimizer = optimizer_of(model)
    losses, last = [], traffic.Traffic()
    for batch in batches(steps):
        own = (rows.chunk(strategy.data)[mesh.get_local_rank(DATA)] for rows in batch)
        parts = [rows.chunk(strategy.micro_batches) for rows in own]
        total = torch.zeros(())
        with traffic.count(mesh) as counted:
            for number, (x, y) in enumerate(zip(*parts, strict=True), 1):
                with micro_batch(model, last=number == strategy.micro_batches):
                    loss = loss_of(model, x, y) / strategy.micro_batches
                    loss.backward()
                total += loss.detach()
        last = counted
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / strategy.gpus)
    return losses, whole_of(model), last


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, put together from the pieces of all ranks under the whole model's names."""
    blocks = blocks_of(model)
    own = []
    for name, parameter in model.named_parameters():
        block = blocks.get(name)
        for piece in pieces_of(name, parameter):
            first = 0 if block is None else block.first
            offsets = (piece.offsets[0] + first, *piece.offsets[1:])
            key, shape = (name, piece.shape) if block is None else (block.name, block.shape)
            own.append((key, shape, offsets, piece.data.clone()))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found: dict[str, torch.Tensor] = {}
    for key, shape, offsets, data in (piece for pieces in every for piece in pieces):
        whole = found.setdefault(key, torch.full(shape, float("nan")))
        for dim, offset in enumerate(offsets):
            whole = whole.narrow(dim, offset, data.shape[dim])
        whole.copy_(data)
    return found
