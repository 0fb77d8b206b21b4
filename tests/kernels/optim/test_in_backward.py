"""The step that is taken while the backward pass runs: the plain step's bits, and no gradients left."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stoker_kernels import LAMB, SGD, AdamW, InBackward, RMSprop

MAKES: dict[str, Any] = {
    "adamw": partial(AdamW, lr=0.1),
    "rounded": partial(AdamW, lr=1e-3, stochastic_rounding=True),
    "lamb": partial(LAMB, lr=0.1),
    "rmsprop": partial(RMSprop, lr=0.1, momentum=0.5),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)]
    layers[2].bias.requires_grad_(False)
    model = nn.Sequential(*layers)
    model[4].weight = nn.Parameter(model[0].weight.detach().t().clone())
    return model.to(dtype)


def loss_of(model: nn.Sequential, step: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    hidden = torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=False)
    return model[2:](hidden).float().square().mean()


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("bucket_nbytes", [1, 600, 1 << 20])
def test_the_bits_are_the_plain_step_s(backend: str, name: str, bucket_nbytes: int) -> None:
    dtype = torch.bfloat16 if name == "rounded" else torch.float32
    model, other = network(dtype), network(dtype)
    plain = MAKES[name](model.parameters())
    attached = InBackward(MAKES[name](other.parameters()), bucket_nbytes)
    for step in range(3):
        plain.zero_grad()
        loss_of(model, step).backward()
        plain.step()
        loss_of(other, step).backward()
        assert all(p.grad is None for p in other.parameters())
        assert torch.equal(plain.grad_square_sums, attached.optimizer.grad_square_sums)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradients_never_exist_together() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
    held = []

    class Counting(SGD):
        def step_of(self, params: Any) -> torch.Tensor:
            held.append(sum(p.grad is not None for p in model.parameters()))
            return super().step_of(params)

    InBackward(Counting(model.parameters()), bucket_nbytes=2 * 8 * 8 * 4)
    model(torch.randn(2, 8)).sum().backward()
    assert held == [2, 2, 2]


def test_schedulers_and_detaching() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    attached = InBackward(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    loss_of(model, 0).backward()
    scheduler.step()  # no warning that the optimizer had not stepped: they are errors here
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.step() is None  # a loop may keep its step(): there is nothing to do
    attached.remove()
    loss_of(model, 2).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_errors() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="clipping needs all gradients before the first step"):
        InBackward(SGD([p], max_grad_norm=1.0))
    with pytest.raises(ValueError, match="bucket_nbytes must be positive"):
        InBackward(SGD([p]), bucket_nbytes=0)
    optimizer = SGD([p])
    InBackward(optimizer)
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="set the optimizer's max_grad_norm to None"):
        p.sum().backward()
