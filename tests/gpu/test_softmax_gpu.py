"""Scaled, masked and causal softmax on a real GPU: both kernels at size, and repeats."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels import softmax  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 5, 33), (2, 4, 300, 1000), (1, 2, 300, 2048), (1, 2, 40, 4096), (1, 2, 40, 8192),
        (1, 1, 9, 50001),
    ],
)  # fmt: skip
def test_matches_fp64(
    shape: tuple[int, ...], masked: bool, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, dy = gpu(*shape, dtype=dtype), gpu(*shape, dtype=dtype)
    mask = torch.rand(shape[0], 1, 1, shape[-1], device="cuda") < 0.7 if masked else None
    query, key = (torch.arange(n, device="cuda") for n in shape[-2:])
    keep = torch.ones(shape[-2:], dtype=torch.bool, device="cuda")
    if causal:
        keep = key <= query[:, None] + shape[-1] - shape[-2]
    keep = keep if mask is None else keep & mask
    results = []
    for ours, to in ((True, dtype), (False, dtype), (False, torch.float64)):
        (xs,) = leaves(x, dtype=to)
        if ours:
            y = softmax(xs, mask, scale=0.5, causal=causal)
        else:
            y = (xs * 0.5).masked_fill(~keep, float("-inf")).softmax(-1)
            y = y.masked_fill(~keep.any(-1, keepdim=True), 0.0)
        y.backward(dy.to(to))
        # A row without a key is NaN's gradient in torch, and 0 here.
        dx = xs.grad.nan_to_num(0.0) if not ours else xs.grad
        results.append((y, dx))
    for name, kernel, witness, oracle in zip(("y", "dx"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=4.0 if name == "dx" else 1.0)


@pytest.mark.parametrize("keys", [2048, 20000])
def test_repeats_bit_for_bit(keys: int) -> None:
    x, dy = (gpu(16, 512, keys, dtype=torch.bfloat16) for _ in range(2))
    grads = []
    for _ in range(3):
        (xs,) = leaves(x)
        softmax(xs, causal=True).backward(dy)
        grads.append(xs.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_past_2_to_the_31_elements() -> None:
    rows, keys = 2**20 + 8, 2048
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(rows, keys, device="cuda", dtype=torch.bfloat16)
    x[-3:] = gpu(3, keys, dtype=torch.bfloat16)
    tail = x[-3:].clone().requires_grad_()
    x.requires_grad_()
    y, expected = softmax(x), softmax(tail)
    assert torch.equal(y[-3:], expected)
    y.backward(x.detach())
    expected.backward(tail.detach())
    assert torch.equal(x.grad[-3:], tail.grad)
