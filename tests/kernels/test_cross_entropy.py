"""Cross-entropy: every backend against fp64 torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import cross_entropy
from tests.kernels._numerics import assert_close, leaves, poison_empty


def check(
    logits: torch.Tensor, target: torch.Tensor, reduction: str, upstream: torch.Tensor | None = None
) -> None:
    """Loss and gradient against fp64; the witness computes in fp32 and rounds the gradient."""
    results = []
    for dtype, ours in ((logits.dtype, True), (logits.dtype, False), (torch.float64, False)):
        (xs,) = leaves(logits, dtype=dtype)
        if ours:
            loss = cross_entropy(xs, target, reduction=reduction)  # type: ignore[arg-type]
        else:
            wide = xs if dtype == torch.float64 else xs.float()
            loss = F.cross_entropy(wide, target.long(), reduction=reduction)
        grad = torch.ones(()) if upstream is None else upstream
        loss.backward(grad.to(loss.dtype).expand(loss.shape))
        results.append((loss, xs.grad))
    for name, kernel, witness, oracle in zip(("loss", "dlogits"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 2), (13, 257), (4, 128)])
def test_matches_fp64(
    backend: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    reduction: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    target = torch.randint(0, shape[1], shape[:1])
    if shape[0] > 2:
        target[1] = -100
    check(torch.randn(shape).to(dtype), target, reduction)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    check(torch.randn(6, 150) * magnitude, torch.randint(0, 150, (6,)), "mean")


def test_none_with_a_different_gradient_per_row(backend: str) -> None:
    check(torch.randn(6, 40), torch.randint(0, 40, (6,)), "none", torch.randn(6))


def test_strided_logits_and_targets(backend: str) -> None:
    target = torch.randint(0, 20, (16,))
    check(torch.randn(5, 40)[:, ::2], target[1:6], "sum")  # not 16-byte aligned
    check(torch.randn(5, 40)[:, :20], target[::3][:5], "sum")
    check(torch.randn(20, 5).t(), target[:5].int(), "sum")


def test_masked_vocabulary(backend: str) -> None:
    logits = torch.randn(3, 300)
    logits[:, :200] = float("-inf")  # whole tiles of -inf
    target = torch.tensor([200, 250, 299])
    xs, expected = leaves(logits)[0], leaves(logits.double())[0]
    cross_entropy(xs, target).backward()
    F.cross_entropy(expected, target).backward()
    assert_close(xs.grad, xs.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_ignored_rows_have_no_gradient_even_when_infinite(backend: str) -> None:
    logits = torch.randn(3, 8)
    logits[1] = float("inf")
    (xs,) = leaves(logits)
    cross_entropy(xs, torch.tensor([1, 7, 2]), ignore_index=7).backward()
    assert xs.grad[[0, 2]].isfinite().all()
    if backend == "cpu":  # PyTorch's kernel, which multiplies the infinity by zero
        assert xs.grad[1].isnan().any()
    else:
        assert torch.equal(xs.grad[1], torch.zeros(8))


def test_all_ignored_is_nan_as_in_torch(backend: str) -> None:
    target = torch.full((3,), -100)
    assert cross_entropy(torch.randn(3, 8), target).isnan()
    assert cross_entropy(torch.randn(3, 8), target, reduction="sum") == 0


def test_logits_are_not_overwritten(backend: str) -> None:
    (logits,) = leaves(torch.randn(4, 9))
    before = logits.detach().clone()
    cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    assert torch.equal(logits, before)


def test_leading_dimensions(backend: str) -> None:
    logits, target = torch.randn(2, 3, 11), torch.randint(0, 11, (2, 3))
    loss = cross_entropy(logits, target, reduction="none")
    assert loss.shape == (2, 3)
    torch.testing.assert_close(loss, F.cross_entropy(logits.mT, target, reduction="none"))


def test_class_out_of_range(interpreter: None) -> None:
    (xs,) = leaves(torch.randn(3, 8))
    loss = cross_entropy(xs, torch.tensor([0, 8, -1]), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True]
    assert xs.grad.isnan().all(1).tolist() == [False, True, True]


def test_class_out_of_range_raises_on_the_cpu() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(torch.randn(3, 8), torch.tensor([0, 8, 1]))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    (x,) = leaves(torch.randn(4, 5), dtype=torch.float64)
    target = torch.tensor([0, -100, 4, 2])
    assert torch.autograd.gradcheck(lambda a: cross_entropy(a, target), (x,))
    assert torch.autograd.gradcheck(lambda a: cross_entropy(a, target, reduction="none"), (x,))


def test_errors() -> None:
    with pytest.raises(ValueError, match="target must have"):
        cross_entropy(torch.randn(2, 8), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="int64"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2))
    with pytest.raises(ValueError, match="expected mean"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2).long(), reduction="avg")  # type: ignore[arg-type]
