"""Grouped products: every backend against fp64, whatever the numbers of tokens."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import grouped_gemm
from tests.kernels._numerics import assert_close, leaves, poison_empty

ROWS, COLUMNS, INNER = 53, 41, 37
ENDS = {
    "even": [13, 26, 39, 53],
    "an empty one first": [0, 20, 20, 53],
    "all to one": [0, 53, 53, 53],
    "one token": [52, 52, 52, 53],
    "none": [0, 0, 0, 0],
    "rows left over": [3, 17, 30, 41],
}


def plain(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    starts = [0, *ends[:-1]]
    parts = [x[a:b] @ w.t() for a, b, w in zip(starts, ends, weight, strict=True)]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weight.shape[1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ENDS)
def test_matches_fp64(
    backend: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    x, dout = torch.randn(ROWS, INNER).to(dtype), torch.randn(ROWS, COLUMNS).to(dtype)
    weight = (torch.randn(4, COLUMNS, INNER) / INNER**0.5).to(dtype)
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        xs, ws = leaves(x, weight, dtype=to)
        if ours:
            out = grouped_gemm(xs, ws, torch.tensor(ENDS[case], dtype=torch.int32))
        else:
            out = plain(xs, ws, ENDS[case])
        out.backward(dout.to(to))
        results.append((out, xs.grad, ws.grad))
    for name, kernel, witness, oracle in zip(("out", "dx", "dw"), *results, strict=True):
        if not oracle.any():
            assert not kernel.any(), f"{name}: no token, so 0"
            continue
        assert_close(kernel, witness, oracle, name, terms=8.0)


def test_bounds_that_fall_or_leave_the_rows_lead_nowhere(backend: str) -> None:
    """Garbage gives garbage, but reads and writes nothing outside."""
    x, weight = torch.randn(ROWS, INNER), torch.randn(4, COLUMNS, INNER)
    wrong = torch.tensor([90, 20, -5, 2**31 - 1], dtype=torch.int32)
    meant = torch.tensor([ROWS, ROWS, ROWS, ROWS], dtype=torch.int32)
    torch.testing.assert_close(grouped_gemm(x, weight, wrong), grouped_gemm(x, weight, meant))


def test_a_skewed_expert_is_shared_and_the_bits_repeat(interpreter: None) -> None:
    x, dout = torch.randn(ROWS, INNER), torch.randn(ROWS, COLUMNS)
    weight = torch.randn(4, COLUMNS, INNER)
    ends = torch.tensor([1, 50, 50, 53], dtype=torch.int32)
    grads = []
    for _ in range(2):
        xs, ws = leaves(x, weight)
        grouped_gemm(xs, ws, ends).backward(dout)
        grads.append((xs.grad, ws.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_strided_tokens_and_no_tokens(backend: str) -> None:
    weight = torch.randn(2, COLUMNS, INNER)
    ends = torch.tensor([5, 9], dtype=torch.int32)
    x = torch.randn(INNER, 9).t()
    expected = plain(x, weight, [5, 9])
    torch.testing.assert_close(grouped_gemm(x, weight, ends), expected)
    ws = weight.requires_grad_()
    out = grouped_gemm(torch.zeros(0, INNER), ws, torch.zeros(2, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, COLUMNS)
    assert torch.equal(ws.grad, torch.zeros_like(ws))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    x, weight = leaves(torch.randn(7, 4), torch.randn(3, 2, 4), dtype=torch.float64)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *given: grouped_gemm(*given, ends), (x, weight))


def test_errors() -> None:
    x, weight, ends = torch.randn(5, 3), torch.randn(2, 4, 3), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight must be \(E, N, K\).* \(2, 4, 3\) for \(5, 2\)"):
        grouped_gemm(x[:, 1:], weight, ends)
    with pytest.raises(ValueError, match=r"ends must be \(2,\) int32, got \(2,\) torch.int64"):
        grouped_gemm(x, weight, ends.long())
    with pytest.raises(ValueError, match="weight must have x's dtype"):
        grouped_gemm(x, weight.bfloat16(), ends)
    with pytest.raises(TypeError, match="floating point"):
        grouped_gemm(x.long(), weight.long(), ends)
