"""The mixture of experts: its sorted, grouped path against a loop over all experts."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import nn


@pytest.mark.parametrize("top_k", [1, 2])
def test_grouped_experts_are_the_loop_s(backend: str, top_k: int) -> None:
    ours, plain = nn.MoE(16, 24, 5, top_k), nn.MoE(16, 24, 5, top_k, ops="torch")
    with torch.no_grad():
        ours.router.weight[3] = -100.0 * torch.ones(16)  # for positive tokens, never chosen
    plain.load_state_dict(ours.state_dict())
    x = torch.rand(3, 7, 16)
    results = []
    for model in (ours, plain):
        xs = x.clone().requires_grad_()
        y, logits = model(xs)
        loss = y.square().sum() + nn.load_balancing_loss(logits, top_k)
        loss.backward()
        results.append([y, xs.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.up.grad[3], torch.zeros_like(ours.up[3]))


def test_balance_is_top_k_for_even_experts_and_experts_for_one() -> None:
    even = torch.eye(4).repeat(3, 1) * 1e-3
    torch.testing.assert_close(
        nn.load_balancing_loss(even, 1), torch.tensor(1.0), rtol=1e-3, atol=0
    )
    one = torch.tensor([[100.0, 0.0, 0.0, 0.0]]).repeat(5, 1)
    torch.testing.assert_close(nn.load_balancing_loss(one, 1), torch.tensor(4.0))


def test_top_k_is_checked() -> None:
    with pytest.raises(ValueError, match=r"MoE: top_k must lie in 1 \.\. 4"):
        nn.MoE(8, 8, 4, top_k=5)
