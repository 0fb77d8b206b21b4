"""Cross-entropy: every backend against fp64 torch."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import cross_entropy
from stoker_kernels.ops.cross_entropy import reference
from tests.kernels._numerics import assert_close, leaves, poison_empty


def expected_loss(
    logits: torch.Tensor, target: torch.Tensor, reduction: str, smoothing: float, z_loss: float
) -> torch.Tensor:
    """Plain torch's, with the z-loss added."""
    if not z_loss:
        return F.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    loss = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
    loss = loss + (target != -100) * z_loss * logits.logsumexp(-1).square()
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != -100).sum()


def check(
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    upstream: torch.Tensor | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    terms: float = 1.0,
) -> None:
    """Loss and gradient against fp64; the witness computes in fp32 and rounds the gradient."""
    results = []
    for dtype, ours in ((logits.dtype, True), (logits.dtype, False), (torch.float64, False)):
        (xs,) = leaves(logits, dtype=dtype)
        if ours:
            loss = cross_entropy(
                xs, target, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss  # type: ignore[call-overload]
            )  # fmt: skip
        else:
            wide = xs if dtype == torch.float64 else xs.float()
            loss = expected_loss(wide, target.long(), reduction, smoothing, z_loss)
        grad = torch.ones(()) if upstream is None else upstream
        loss.backward(grad.to(loss.dtype).expand(loss.shape))
        results.append((loss, xs.grad))
    for name, kernel, witness, oracle in zip(("loss", "dlogits"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms)


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


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (13, 257)])
def test_smoothing_and_z_loss(
    backend: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    smoothing: float,
    z_loss: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row is split into parts that are joined, 13 are not; 257 columns leave most of a tile empty."""
    poison_empty(monkeypatch)
    target = torch.randint(0, shape[1], shape[:1])
    if shape[0] > 2:
        target[1] = -100
    logits = torch.randn(shape).to(dtype)
    check(logits, target, "mean", None, smoothing, z_loss)
    check(logits + 30, target, "none", torch.randn(shape[0]), smoothing, z_loss, terms=30.0)


def test_padding_of_the_rows_is_not_read(backend: str) -> None:
    padded = torch.full((4, 96), float("nan"))
    padded[:, :83] = torch.randn(4, 83)
    check(padded[:, :83], torch.randint(0, 83, (4,)), "mean", None, 0.2, 1e-2)


def test_z_loss_is_also_returned_alone(backend: str) -> None:
    (xs,) = leaves(torch.randn(5, 40))
    target = torch.tensor([1, -100, 3, 4, 39])
    for reduction in ("mean", "sum", "none"):
        loss, z = cross_entropy(
            xs, target, z_loss=0.1, label_smoothing=0.1, return_z_loss=True, reduction=reduction  # type: ignore[call-overload]
        )  # fmt: skip
        plain = cross_entropy(xs, target, label_smoothing=0.1, reduction=reduction)  # type: ignore[call-overload]
        assert not z.requires_grad
        torch.testing.assert_close(loss, plain + z)
        torch.testing.assert_close(loss, expected_loss(xs, target, reduction, 0.1, 0.1))


def fused(
    logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, module: Any, **options: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of one call that writes over the logits, which it is given padded."""
    width = logits.shape[1]
    padded = torch.full((logits.shape[0], width + 13), 7.5)
    inside = padded[:, :width]
    inside.copy_(logits)
    loss = module.cross_entropy_fused_(
        dloss, inside, target, -100, options["smoothing"], options["z_loss"]
    )
    assert (padded[:, width:] == 7.5).all(), "wrote past a row"
    return loss, inside.contiguous()


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize("vocab", [1, 64, 83, 300])
def test_loss_and_gradient_in_one_call(
    interpreter: None, vocab: int, smoothing: float, z_loss: float
) -> None:
    from stoker_kernels.ops.cross_entropy import triton

    target = torch.randint(0, vocab, (6,))
    target[2] = -100
    logits, dloss = torch.randn(6, vocab) * 3, torch.randn(6)
    logits[2] = float("nan")  # nothing of an ignored row is read
    expected = []
    for dtype in (torch.float32, torch.float64):
        (xs,) = leaves(logits.nan_to_num(), dtype=dtype)
        loss = expected_loss(xs, target, "none", smoothing, z_loss)
        loss.backward(dloss.to(dtype))
        expected.append((loss, xs.grad))
    for module, given in ((triton, logits), (reference, logits.nan_to_num())):
        ours = fused(given, target, dloss, module, smoothing=smoothing, z_loss=z_loss)
        for name, kernel, witness, oracle in zip(("loss", "dx"), ours, *expected, strict=True):
            assert_close(kernel, witness, oracle, name, terms=10.0)


def test_rows_beyond_2_to_the_31_values(interpreter: None) -> None:
    """Rows 2^30 values apart, of which only a few pages are ever touched.

    An offset that wrapped to -2^31 would find the zeros at the start.
    """
    from stoker_kernels.ops.cross_entropy import triton

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE on Linux
    storage = torch.frombuffer(mmap.mmap(-1, 2**33 + 4096, flags=flags), dtype=torch.bfloat16)
    logits = storage.as_strided((3, 40), (2**30, 1), 2**31)
    logits.copy_(torch.randn(3, 40))
    target = torch.tensor([3, 20, 39])
    (xs,) = leaves(logits.contiguous())
    expected = cross_entropy(xs, target, reduction="none")
    expected.sum().backward()
    loss, statistics = triton.cross_entropy_fwd(logits, target, -100, 0.0, 0.0)
    assert torch.equal(loss, expected)
    ones = torch.ones(3)
    back = triton.cross_entropy_bwd(ones, logits, target, statistics, -100, 0.0, 0.0)
    assert torch.equal(back, xs.grad)
    assert torch.equal(triton.cross_entropy_fused_(ones, logits, target, -100, 0.0, 0.0), expected)
    torch.testing.assert_close(logits, xs.grad)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    check(torch.randn(6, 150) * magnitude, torch.randint(0, 150, (6,)), "mean")


@pytest.mark.parametrize("z_loss", [0.0, 1e-9])
def test_a_large_common_offset_costs_no_precision(backend: str, z_loss: float) -> None:
    """Logits around a million: probabilities come from x - max(x), which is exact."""
    logits = (torch.randn(6, 150) * 16).round() / 16 + 2.0**20  # exact in fp32
    target = torch.randint(0, 150, (6,))
    (xs,), (plain,) = leaves(logits), leaves((logits - 2.0**20).double())
    cross_entropy(xs, target, z_loss=z_loss, reduction="sum").backward()
    F.cross_entropy(plain, target, reduction="sum").backward()
    lse = plain.logsumexp(-1, keepdim=True) + 2.0**20
    expected = plain.grad + 2 * z_loss * lse * plain.softmax(-1)
    torch.testing.assert_close(xs.grad, expected.float(), rtol=1e-5, atol=1e-6)


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
    (xs,), (witness,), (oracle,) = leaves(logits), leaves(logits), leaves(logits.double())
    cross_entropy(xs, target).backward()
    F.cross_entropy(witness, target).backward()
    F.cross_entropy(oracle, target).backward()
    assert_close(xs.grad, witness.grad, oracle.grad)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_ignored_rows_have_no_gradient_even_when_infinite(backend: str) -> None:
    """Nor of NaN; PyTorch's own loss, which multiplies them by zero, makes NaN of both."""
    logits = torch.randn(4, 8)
    logits[1], logits[3] = float("inf"), float("nan")
    (xs,) = leaves(logits)
    cross_entropy(xs, torch.tensor([1, 7, 2, 7]), ignore_index=7).backward()
    assert xs.grad[[0, 2]].isfinite().all()
    assert torch.equal(xs.grad[[1, 3]], torch.zeros(2, 8))


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
    smoothed = partial(cross_entropy, target=target, label_smoothing=0.2, z_loss=0.1)
    assert torch.autograd.gradcheck(smoothed, (x,))


def test_each_row_is_split_into_whole_steps() -> None:
    from stoker_kernels.ops.cross_entropy.triton import parts_of

    for rows in (1, 7, 300, 528, 100_000):
        for vocab in (1, 8192, 50257, 262144):
            parts, span = parts_of(rows, vocab, 4096, 132)
            assert span % 4096 == 0
            assert (parts - 1) * span < vocab <= parts * span
            assert parts == 1 or rows < 528


def test_errors() -> None:
    with pytest.raises(ValueError, match="target must have"):
        cross_entropy(torch.randn(2, 8), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="int64"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2))
    with pytest.raises(ValueError, match="expected mean"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2).long(), reduction="avg")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="label_smoothing must be in"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2).long(), label_smoothing=1.5)
    with pytest.raises(ValueError, match="z_loss must not be negative"):
        cross_entropy(torch.randn(2, 8), torch.zeros(2).long(), z_loss=-1.0)
    with pytest.raises(ValueError, match="at least one class"):
        cross_entropy(torch.randn(2, 0), torch.zeros(2).long())
