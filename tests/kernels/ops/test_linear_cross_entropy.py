"""Fused linear cross-entropy: every backend against fp64 torch, whatever the chunks; and its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import LinearCrossEntropy, linear_cross_entropy
from stoker_kernels.ops.linear_cross_entropy import chunked, reference
from tests.kernels._numerics import assert_close, leaves, poison_empty
from tests.kernels.ops._memory import eager, peak_of

IGNORED = -100
NATIVE = hasattr(F, "linear_cross_entropy")  # torch 2.13


def torch_loss(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    *, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """The same in plain torch: logits in the inputs' dtype, their loss in at least fp32."""
    logits = F.linear(x, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide, target.long(), label_smoothing=label_smoothing, reduction="none")
    loss = loss + (target != IGNORED) * z_loss * wide.logsumexp(-1).square()
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != IGNORED).sum()


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    upstream: torch.Tensor | None = None,
    chunk: int | None = None,
    **options: Any,
) -> None:
    """Loss and gradients against fp64, plain torch in x's dtype as witness."""
    given = [x, weight] if bias is None else [x, weight, bias]
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        xs, ws, *rest = inputs = leaves(*given, dtype=dtype)
        b = rest[0] if rest else None
        if ours:
            loss = linear_cross_entropy(xs, ws, target, bias=b, chunk=chunk, **options)
        else:
            loss = torch_loss(xs, ws, target, b, **options)
        grad = torch.ones(()) if upstream is None else upstream
        loss.backward(grad.to(loss.dtype).expand(loss.shape))
        results.append((loss, *(leaf.grad for leaf in inputs)))
    for name, kernel, witness, oracle in zip(
        ("loss", "dx", "dweight", "dbias"), *results, strict=False
    ):
        assert_close(kernel, witness, oracle, name)


def sample(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, vocab, (rows,))
    if rows > 2:
        target[1] = IGNORED
    return torch.randn(rows, hidden).to(dtype), torch.randn(vocab, hidden).to(dtype), target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 83), (7, 1, 20), (11, 16, 70)])
def test_matches_fp64(
    backend: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    reduction: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    x, weight, target = sample(*shape, dtype=dtype)
    options: dict[str, Any] = {"reduction": reduction, "chunk": 4}  # the last chunk is not full
    if shape[0] < 11:
        check(x, weight, target, **options)
        return
    bias = torch.randn(shape[2]).to(dtype)
    check(x, weight, target, bias, label_smoothing=0.1, z_loss=1e-2, **options)


@pytest.mark.parametrize("chunk", [1, 3, 8, 12, 100, None])
def test_every_chunk_size_gives_the_same(backend: str, chunk: int | None) -> None:
    check(*sample(12, 8, 40), chunk=chunk)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    x, weight, target = sample(6, 8, 70)
    check(x * magnitude, weight, target, chunk=4, reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_upstream_gradients(backend: str, reduction: str) -> None:
    """One per row for "none": gradients made in the forward could not be right."""
    upstream = torch.randn(9) if reduction == "none" else torch.tensor(-2.5)
    before = upstream.clone()
    check(*sample(9, 8, 40), torch.randn(40), chunk=4, reduction=reduction, upstream=upstream)
    assert torch.equal(upstream, before)


@pytest.mark.skipif(not NATIVE, reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("options", [None, "chunked"])
def test_agrees_with_torch_s_own(backend: str, options: str | None) -> None:
    x, weight, target = sample(32, 16, 70)
    chosen = torch.nn.LinearCrossEntropyOptions() if options else None
    mine, theirs = leaves(x, weight), leaves(x, weight)
    smoothing = 0.0 if options else 0.1  # its chunked path has none
    loss = linear_cross_entropy(*mine, target, chunk=8, label_smoothing=smoothing)
    expected = F.linear_cross_entropy(*theirs, target, label_smoothing=smoothing, options=chosen)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_strided_inputs(backend: str) -> None:
    x, weight, target = sample(10, 8, 40)
    check(x.t().contiguous().t(), weight.t().contiguous().t(), target, chunk=4)
    check(torch.randn(20, 16)[::2, :8], torch.randn(80, 8)[::2], target.repeat(2)[::2], chunk=4)
    check(torch.randn(1, 8).expand(10, 8), weight, target.int(), chunk=4)


def test_leading_dimensions(backend: str) -> None:
    x, weight, target = sample(6, 8, 40)
    for reduction in ("mean", "none"):
        flat = linear_cross_entropy(x, weight, target, reduction=reduction)  # type: ignore[arg-type]
        deep = linear_cross_entropy(
            x.view(2, 3, 8), weight, target.view(2, 3), reduction=reduction  # type: ignore[arg-type]
        )  # fmt: skip
        assert torch.equal(deep.flatten(), flat.flatten())
        assert deep.shape == (() if reduction == "mean" else (2, 3))


def test_one_tensor_as_input_and_weight(backend: str) -> None:
    (tied,) = leaves(torch.randn(6, 8))
    (witness,), (oracle,) = leaves(tied), leaves(tied, dtype=torch.float64)
    target = torch.randint(0, 6, (6,))
    linear_cross_entropy(tied, tied, target, chunk=4).backward()
    torch_loss(witness, witness, target).backward()
    torch_loss(oracle, oracle, target).backward()
    assert_close(tied.grad, witness.grad, oracle.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_only_wanted_gradients_are_made(
    reduction: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, target = sample(6, 8, 40)
    (xs,) = leaves(x)
    monkeypatch.setattr(chunked, "add_product", lambda *_: pytest.fail("made dW"))
    linear_cross_entropy(xs, weight, target, reduction=reduction).sum().backward()  # type: ignore[arg-type]
    assert xs.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        frozen = linear_cross_entropy(xs, weight.requires_grad_(), target)
    assert not frozen.requires_grad


def test_backward_twice(backend: str) -> None:
    x, weight, target = sample(6, 8, 40)
    xs, ws = leaves(x, weight)
    loss = linear_cross_entropy(xs, ws, target, chunk=4)
    loss.backward(retain_graph=True)
    once = xs.grad.clone(), ws.grad.clone()
    loss.backward()
    assert torch.equal(xs.grad, 2 * once[0])
    assert torch.equal(ws.grad, 2 * once[1])


def test_a_chunk_of_ignored_rows(backend: str) -> None:
    x, weight, target = sample(12, 8, 40)
    target[4:8] = IGNORED  # the whole second chunk
    check(x, weight, target, chunk=4)
    check(x, weight, target, chunk=4, reduction="none", upstream=torch.randn(12))


def test_nothing_counts(backend: str) -> None:
    """The mean of nothing is NaN as in torch, but no gradient is."""
    x, weight, target = sample(6, 8, 40)
    for rows in (6, 0):
        xs, ws = leaves(x[:rows], weight)
        loss = linear_cross_entropy(xs, ws, torch.full_like(target[:rows], IGNORED), chunk=4)
        assert loss.isnan()
        loss.backward()
        assert torch.equal(xs.grad, torch.zeros(rows, 8))
        assert torch.equal(ws.grad, torch.zeros(40, 8))
    for reduction in ("sum", "none"):
        loss = linear_cross_entropy(x[:0], weight, target[:0], reduction=reduction)  # type: ignore[arg-type]
        assert loss.sum() == 0


def test_class_out_of_range(interpreter: None) -> None:
    x, weight, _ = sample(3, 8, 40)
    xs, ws = leaves(x, weight)
    loss = linear_cross_entropy(xs, ws, torch.tensor([0, 40, -1]), reduction="none")
    loss.backward(torch.ones(3))
    assert loss.isnan().tolist() == [False, True, True]
    assert xs.grad.isnan().all(1).tolist() == [False, True, True]


def test_class_out_of_range_raises_on_the_cpu() -> None:
    x, weight, _ = sample(3, 8, 40)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, torch.tensor([0, 40, 1]))


def test_autocast_keeps_the_fp32_sum_for_an_fp32_weight(backend: str) -> None:
    x, weight, target = sample(64, 8, 40)
    narrow = leaves(x.bfloat16(), weight.bfloat16())
    linear_cross_entropy(*narrow, target, chunk=8).backward()
    mixed = [narrow[0].detach().requires_grad_(), *leaves(weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(*mixed, target, chunk=8)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (mixed[0].grad.dtype, mixed[1].grad.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(mixed[0].grad, narrow[0].grad)
    assert torch.equal(mixed[1].grad.bfloat16(), narrow[1].grad)
    assert not torch.equal(mixed[1].grad, narrow[1].grad.float())  # finer than bf16
    both = leaves(x, weight)  # an fp32 input gets an fp32 gradient
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(*both, target, reduction="none").sum().backward()
    assert both[0].grad.dtype == both[1].grad.dtype == torch.float32


def weight_error(chunk: int, accumulate_in_fp32: bool) -> float:
    """Relative RMS error of a bf16 weight's gradient against fp64, before it is stored as bf16."""
    torch.manual_seed(1)
    rows, hidden, vocab = 512, 16, 32
    x = (1 + 0.5 * torch.randn(rows, hidden)).bfloat16()
    weight = (0.1 * torch.randn(vocab, hidden)).bfloat16()
    target = torch.randint(0, 4, (rows,))
    settings = reference.Settings(
        torch.bfloat16, chunk=chunk, accumulate_in_fp32=accumulate_in_fp32
    )
    wanted = reference.Wanted(weight=True)
    dw = chunked.linear_cross_entropy(x, weight, None, target, None, settings, wanted)[2]
    wide = weight.double().requires_grad_()
    torch_loss(x.double(), wide, target, reduction="sum").backward()
    error = (dw.double() - wide.grad).square().mean() / wide.grad.square().mean()
    return float(error.sqrt())


def test_weight_gradient_s_error_does_not_grow_with_the_chunks() -> None:
    one, many = weight_error(512, True), weight_error(2, True)
    assert many <= 1.1 * one
    assert weight_error(2, False) > 3 * one  # what a bf16 sum of 256 chunks does


@pytest.mark.parametrize("direct", [False, True])
def test_products_are_added_in_fp32(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slices of the fallback cover every row, with and without a GEMM of fp32 results."""
    total = torch.randn(37, 8)
    a, b = torch.randn(4, 37).bfloat16().t(), torch.randn(4, 8).bfloat16()
    expected = total.double() + a.double() @ b.double()
    if direct:
        monkeypatch.setattr(chunked, "_product_in_fp32", lambda a, b: a.float() @ b.float())
    chunked.add_product(total, a, b)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [64, 768, 4096, 8192])
@pytest.mark.parametrize("vocab", [256, 50257, 128256, 262144])
def test_logits_of_a_chunk_are_as_large_as_x(hidden: int, vocab: int) -> None:
    for rows in (1, 100, 1024, 1500, 16384, 131072):
        chunk = chunked.chunk_size(rows, hidden, vocab)
        assert 1 <= chunk <= rows
        least = 1024 if rows <= 8192 else 2048
        assert chunk * vocab <= max(rows * hidden, least * vocab) + 128 * vocab
        chunks = -(-rows // chunk)
        assert chunks * chunk - rows < chunks * 128  # near equal


def test_cpu_memory_is_a_quarter_of_eager_s() -> None:
    x, weight, target = sample(4096, 16, 4096)
    fused, ours = peak_of(linear_cross_entropy, x, weight, target)
    whole, theirs = peak_of(eager, x, weight, target)
    assert fused <= whole / 4, (fused, whole)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gpu_memory_is_a_quarter_of_eager_s() -> None:
    """32k tokens, H = 4096, V = 128k in bf16, run dry on meta tensors: all but cuBLAS's workspace."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install --no-deps 'triton==3.7.*'")
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root / "kernels")
    done = subprocess.run(
        [sys.executable, str(root / "tests/kernels/ops/_memory.py")],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    peak = json.loads(done.stdout)
    assert peak["fused"] <= peak["eager"] / 4, peak


@pytest.mark.parametrize("accumulate_in_fp32", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_gradcheck(
    implementation: str, reduction: str, accumulate_in_fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", implementation)
    x, weight, target = sample(5, 3, 6, torch.float64)
    inputs = leaves(x, weight, torch.randn(6).double())

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            x, weight, target, bias=bias, chunk=2, label_smoothing=0.2, z_loss=0.1,
            reduction=reduction, accumulate_in_fp32=accumulate_in_fp32,  # type: ignore[arg-type]
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, tuple(inputs))


def test_module() -> None:
    x, _, target = sample(6, 8, 40)
    module = LinearCrossEntropy(8, 40, bias=True, label_smoothing=0.1, chunk=4)
    loss = module(x, target)
    loss.backward()
    assert module.weight.grad.shape == (40, 8)
    expected = torch_loss(x, module.weight, target, module.bias, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    assert LinearCrossEntropy(8, 40, reduction="none")(x, target).shape == (6,)


def test_errors() -> None:
    x, weight, target = sample(6, 8, 40)
    with pytest.raises(ValueError, match="weight must have shape"):
        linear_cross_entropy(x, weight.t(), target)
    with pytest.raises(ValueError, match="at least one class"):
        linear_cross_entropy(x, weight[:0], target)
    with pytest.raises(ValueError, match="target must have x's shape"):
        linear_cross_entropy(x, weight, target[:5])
    with pytest.raises(ValueError, match="bias must have shape"):
        linear_cross_entropy(x, weight, target, bias=torch.ones(8))
    with pytest.raises(ValueError, match="one dtype outside autocast"):
        linear_cross_entropy(x.bfloat16(), weight, target)
    with pytest.raises(ValueError, match="chunk must be a positive"):
        linear_cross_entropy(x, weight, target, chunk=0)
    with pytest.raises(TypeError, match="target must be int64 or int32"):
        linear_cross_entropy(x, weight, target.float())


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        linear_cross_entropy(*sample(2, 8, 40, torch.float64))
