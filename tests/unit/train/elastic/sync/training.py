"""A small training in float64 whose batches depend on the step alone, for ranks with any shares of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker_train.elastic.sync import make_strategy
from stoker_train.elastic.sync.exchange import GradientExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 24


class Net(nn.Module):
    """Layers that some samples do not use, and one that none does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(5, 16)
        self.even = nn.Linear(16, 1)
        self.odd = nn.Linear(16, 1)
        self.never = nn.Linear(3, 3)
        self.double()
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(rows))
        out = torch.zeros(len(rows), 1, dtype=torch.float64)
        for layer, places in ((self.even, numbers % 2 == 0), (self.odd, numbers % 2 == 1)):
            if places.any():
                out = out.index_put((places.nonzero()[:, 0],), layer(hidden[places]))
        return out[:, 0]


def data(step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    rows = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(BATCH, generator=generator, dtype=torch.float64)
    numbers = torch.arange(BATCH) // 6  # so that a small share is of one kind only
    return rows, numbers, rows.sum(1).sin() + 0.3 * noise


def backward(
    model: Net,
    exchange: GradientExchange,
    step: int,
    offset: int,
    size: int,
    seed: int,
    passes: int = 1,
) -> float:
    """Run a step's passes up to its optimizer; returns this rank's part of the loss."""
    rows, numbers, targets = data(step, seed)
    pieces = torch.arange(offset, offset + size).tensor_split(passes) if size else ()
    pieces = [piece for piece in pieces if len(piece)]
    total = 0.0
    if not pieces:
        exchange.arm()
    for index, piece in enumerate(pieces):
        if index == len(pieces) - 1:
            exchange.arm()
        error = (model(rows[piece], numbers[piece]) - targets[piece]).square().mean()
        loss = error * (len(piece) / BATCH)
        loss.backward()
        total += float(loss)
    return total


def train(
    rank: int,
    world: int,
    spec: Any,
    steps: int,
    sizes: Sequence[int],
    seed: int,
    *,
    optimizer: str = "sgd",
    passes: int = 1,
    nodes: Sequence[str] | None = None,
    bucket_nbytes: int = 256,
    lr: float = 0.05,
) -> dict[str, Any]:
    """Train; returns the parameters after each step, and counts."""
    assert sum(sizes) == BATCH and len(sizes) == world
    model = Net(seed)
    params = list(model.parameters())
    exchange = GradientExchange(model.named_parameters(), bucket_nbytes=bucket_nbytes, nodes=nodes)
    strategy = make_strategy(spec)
    strategy.reset(exchange)
    opt: torch.optim.Optimizer
    if optimizer == "sgd":
        opt = torch.optim.SGD(params, lr=lr, momentum=0.9)
    else:
        opt = torch.optim.AdamW(params, lr=lr)
    offset, size = sum(sizes[:rank]), sizes[rank]
    history, touched = [], []
    for step in range(steps):
        exchange.begin(size / BATCH, strategy.exchanges_gradients(step))
        touched.append(strategy.communicates(step))
        backward(model, exchange, step, offset, size, seed, passes)
        strategy.before_optimizer(exchange, params)
        opt.step()
        strategy.after_optimizer(exchange, params, opt, step)
        opt.zero_grad()
        history.append(flat(params))
    before = exchange.collectives
    strategy.settle(exchange, params, opt)
    settled = flat(params)
    exchange.close()
    return {
        "history": history,
        "touched": touched,
        "settled": settled,
        "collectives": before,
        "unused": [name for name, param in model.named_parameters() if param not in opt.state],
    }


class Momentum:
    """``torch.optim.SGD(lr=0.05, momentum=0.9)``, which a process that must not import triton cannot make."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.buffers: dict[int, torch.Tensor] = {}

    def step(self) -> None:
        for place, param in enumerate(self.params):
            if param.grad is not None:
                buffer = self.buffers.setdefault(place, torch.zeros_like(param))
                buffer.mul_(0.9).add_(param.grad)
                param.data.sub_(0.05 * buffer)
                param.grad = None


def flat(params: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in params]).clone()
