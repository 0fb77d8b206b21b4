"""AdamW: every backend against torch.optim.AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from stoker_kernels import AdamW
from stoker_kernels.ops.adamw import reference
from tests.kernels._numerics import assert_close

SHAPES = [(1,), (7, 5), (2049,), (3, 1, 4)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train(
    kind: type[torch.optim.Optimizer],
    starts: list[torch.Tensor],
    dtype: torch.dtype,
    steps: int,
    state_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Parameters after ``steps`` steps on gradients that depend only on the step number."""
    params = [s.to(dtype, copy=True).requires_grad_() for s in starts]
    optimizer = kind(params, **HYPER)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(state_dtype or dtype).to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


def test_matches_torch_over_100_steps(backend: str) -> None:
    starts = [torch.randn(shape) for shape in SHAPES]
    ours = train(AdamW, starts, torch.float32, 100)
    witness = train(torch.optim.AdamW, starts, torch.float32, 100)
    oracle = train(torch.optim.AdamW, starts, torch.float64, 100, torch.float32)
    for shape, a, b, c in zip(SHAPES, ours, witness, oracle, strict=True):
        assert_close(a, b, c, str(shape))


def test_low_precision_parameters_keep_fp32_moments(backend: str) -> None:
    starts = [torch.randn(33).bfloat16()]
    ours = train(AdamW, starts, torch.bfloat16, 1)
    witness = train(torch.optim.AdamW, starts, torch.bfloat16, 1)
    oracle = train(torch.optim.AdamW, starts, torch.float64, 1, torch.bfloat16)
    assert_close(ours[0], witness[0], oracle[0])


def test_grad_square_sum(backend: str) -> None:
    params = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}])
    assert optimizer.grad_square_sum is None
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    expected = sum(p.grad.double().square().sum() for p in params)
    torch.testing.assert_close(optimizer.grad_square_sum.double(), expected, rtol=1e-6, atol=0.0)


def test_unaligned_strided_and_missing_tensors(backend: str) -> None:
    """A view 4 bytes into a buffer, a transposed parameter and gradient, one without gradient."""
    buffer = torch.randn(101)
    views = [buffer[1:90], torch.randn(6, 9).t(), torch.randn(5, 4), torch.randn(3)]
    expected = [v.clone() for v in views]
    results = []
    for kind, tensors in ((AdamW, views), (torch.optim.AdamW, expected)):
        params = [torch.nn.Parameter(t) for t in tensors]
        optimizer = kind(params, **HYPER)
        for step in range(3):
            for i, p in enumerate(params[:3]):
                grad = torch.sin(torch.arange(p.numel()) + float(step + i))
                p.grad = grad.view(p.shape[::-1]).t() if i == 2 else grad.view(p.shape)
            if step == 1:
                params[0].grad = None  # its step count now lags
            optimizer.step()
        results.append([p.detach() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][3], views[3])


def test_the_elements_around_a_view_stay(backend: str) -> None:
    buffer = torch.ones(50)
    p = torch.nn.Parameter(buffer[3:40])
    p.grad = torch.ones(37)
    AdamW([p], lr=1.0).step()
    assert torch.equal(buffer[:3], torch.ones(3))
    assert torch.equal(buffer[40:], torch.ones(10))
    assert (buffer[3:40] != 1).all()


def test_specification_is_the_textbook_step() -> None:
    p, g = torch.tensor([2.0]).double(), torch.tensor([0.5]).double()
    m, v = torch.zeros(1).double(), torch.zeros(1).double()
    reference.adamw_one(p, g, m, v, reference.step_scalars(1, 0.1, 0.9, 0.99, 0.0, 0.5))
    # First step: m_hat = g, v_hat = g^2, so p = p (1 - lr wd) - lr sign(g).
    torch.testing.assert_close(p, torch.tensor([2.0 * 0.95 - 0.1]).double())


def test_state_moves_to_and_from_torch() -> None:
    start = torch.randn(6)
    finals = []
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        p = torch.nn.Parameter(start.clone())
        for kind in (first, second):
            optimizer = kind([p], **HYPER)
            if kind is second:
                hyper = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": state, "param_groups": hyper})  # noqa: F821
            for i in range(3):
                p.grad = torch.full((6,), 0.1 * (i + 1))
                optimizer.step()
            state = copy.deepcopy(optimizer.state_dict()["state"])  # noqa: F841
        finals.append(p.detach())
    torch.testing.assert_close(*finals)


def test_loading_keeps_fp32_moments_of_bf16_parameters() -> None:
    p = torch.nn.Parameter(torch.randn(4).bfloat16())
    optimizer = AdamW([p])
    p.grad = torch.randn(4).bfloat16()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = AdamW([p])
    fresh.load_state_dict(saved)
    for name in ("exp_avg", "exp_avg_sq"):
        assert fresh.state[p][name].dtype == torch.float32
        assert torch.equal(fresh.state[p][name], optimizer.state[p][name])


def test_closure_and_no_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([p], lr=0.1)
    assert optimizer.step() is None

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (p < 1).all()


def test_errors() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="lr"):
        AdamW([p], lr=-1.0)
    with pytest.raises(ValueError, match="betas"):
        AdamW([p], betas=(0.9, 1.0))
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    with pytest.raises(TypeError, match="sparse"):
        AdamW([p]).step()
