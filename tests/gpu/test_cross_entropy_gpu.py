"""Cross-entropy and its fusion with the linear layer on a real GPU: numerics, bits, 2^31 values, memory.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from torch.nn import functional as F  # noqa: E402

from stoker_kernels import cross_entropy, linear_cross_entropy  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]


@pytest.fixture(autouse=True)
def _compiled_and_seeded() -> None:
    triton = pytest.importorskip("triton", reason="the CUDA path needs triton")
    from stoker_kernels.ops.cross_entropy.triton import cross_entropy_fwd_kernel
    from stoker_kernels.runtime.launch import is_interpreted

    if is_interpreted(cross_entropy_fwd_kernel):
        pytest.skip(
            f"triton {triton.__version__} is interpreted in this process: run tests/gpu alone"
        )
    torch.manual_seed(0)


def targets(rows: int, vocab: int) -> torch.Tensor:
    target = torch.randint(0, vocab, (rows,), device="cuda")
    return target.masked_fill_(torch.rand(rows, device="cuda") < 0.1, -100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 262144), (512, 50257), (2048, 32000), (4096, 256)])
def test_cross_entropy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Three rows are split into parts; 50257 columns are not aligned."""
    logits = torch.randn(shape, device="cuda").to(dtype) * 3
    target, upstream = targets(*shape), torch.randn(shape[0], device="cuda")
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        (xs,) = leaves(logits, dtype=to)
        if ours:
            loss = cross_entropy(xs, target, reduction="none", label_smoothing=0.1)
        else:
            wide = xs if to == torch.float64 else xs.float()
            loss = F.cross_entropy(wide, target, reduction="none", label_smoothing=0.1)
        loss.backward(upstream.to(loss.dtype))
        results.append((loss, xs.grad))
    for name, kernel, witness, oracle in zip(("loss", "dlogits"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=10.0)


def test_cross_entropy_beyond_2_to_the_31_values() -> None:
    rows, vocab = 2**31 // 128256 + 8, 128256
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = targets(rows, vocab)
    target[-1] = 5
    loss = cross_entropy(logits, target, reduction="none", z_loss=1e-4)
    loss.sum().backward()
    (tail,) = leaves(logits[-8:])
    expected = cross_entropy(tail, target[-8:], reduction="none", z_loss=1e-4)
    expected.sum().backward()
    torch.testing.assert_close(loss[-8:], expected)  # eight rows are split, the others were not
    torch.testing.assert_close(logits.grad[-8:], tail.grad)


def head(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(3000, 512, device="cuda").to(dtype)
    weight = (torch.randn(vocab, 512, device="cuda") / 16).to(dtype)
    return x, weight, targets(3000, vocab)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [32000, 50257])
def test_linear_cross_entropy(vocab: int, dtype: torch.dtype, reduction: str) -> None:
    x, weight, target = head(vocab, dtype)
    upstream = torch.randn((3000,) if reduction == "none" else (), device="cuda")
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        xs, ws = leaves(x, weight, dtype=to)
        if ours:
            loss = linear_cross_entropy(xs, ws, target, reduction=reduction)
        else:
            logits = F.linear(xs, ws)
            wide = logits if to == torch.float64 else logits.float()
            loss = F.cross_entropy(wide, target, reduction=reduction)
        loss.backward(upstream.to(loss.dtype))
        results.append((loss, xs.grad, ws.grad))
    for name, kernel, witness, oracle in zip(("loss", "dx", "dweight"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=10.0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_repeats_bit_for_bit(reduction: str) -> None:
    x, weight, target = head(50257, torch.bfloat16)
    grads = []
    for _ in range(3):
        xs, ws = leaves(x, weight)
        linear_cross_entropy(xs, ws, target, reduction=reduction).sum().backward()
        grads.append((xs.grad, ws.grad))
    for again in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], again, strict=True))


def test_weight_gradient_is_summed_in_fp32_by_one_gemm() -> None:
    """torch 2.8 and later; else the slower fallback runs, and this names it."""
    from stoker_kernels.ops.linear_cross_entropy import chunked

    device = torch.device("cuda", 0)
    assert chunked._adds_in_fp32(device, torch.bfloat16)
    total = torch.randn(1000, 64, device=device)
    a, b = (torch.randn(128, n, device=device).bfloat16() for n in (1000, 64))
    expected = total.double() + a.double().t() @ b.double()
    chunked.add_product(total, a.t(), b)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_memory_is_a_quarter_of_eager_s_and_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(128256, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target, peaks = targets(8192, 128256), []
    linear_cross_entropy(x, weight, target).backward()  # compiled, and the GEMM tried out
    for run in (linear_cross_entropy, lambda x, w, t: F.cross_entropy(F.linear(x, w), t)):
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error" if run is linear_cross_entropy else "default")
        try:
            run(x, weight, target).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] <= peaks[1] / 4, peaks
