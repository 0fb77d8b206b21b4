"""Rotary, gated units and bias + GELU on a real GPU: numerics at training sizes, bits, > 2^31 elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from torch.nn import functional as F  # noqa: E402

from stoker_kernels import bias_gelu, geglu, rotary, rotary_tables, swiglu  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402
from tests.kernels.ops.test_rotary import angles, rotated  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    pytest.importorskip("triton", reason="the CUDA path needs triton")
    torch.manual_seed(0)


def check(
    ours: Callable[..., Any], plain: Callable[..., Any], terms: float, *inputs: torch.Tensor
) -> None:
    """Against fp64 on the GPU, twice for equal bits."""
    dy = torch.randn_like(ours(*inputs))
    results = []
    for run, dtype in ((ours, None), (ours, None), (plain, None), (plain, torch.float64)):
        xs = leaves(*inputs, dtype=dtype)
        y = run(*xs)
        y.backward(dy.to(y.dtype))
        results.append((y, *(x.grad for x in xs)))
    for first, again, witness, oracle in zip(*results, strict=True):
        assert torch.equal(first, again)
        assert_close(first, witness, oracle, terms=terms)


def glu(packed: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = packed.chunk(2, -1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (37, 202), (2048, 22016)])
def test_gated_units(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = (2 * torch.randn(shape, device="cuda")).to(dtype)
    check(swiglu, lambda p: glu(p, "silu"), 1.0, packed)
    for kind in ("tanh", "none"):
        check(lambda p, k=kind: geglu(p, approximate=k), lambda p, k=kind: glu(p, k), 1.0, packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(1, 1), (37, 202), (4096, 16384)])
def test_bias_gelu(shape: tuple[int, int], approximate: str, dtype: torch.dtype) -> None:
    x = (2 * torch.randn(shape, device="cuda")).to(dtype)
    bias = torch.randn(shape[1], device="cuda").to(dtype)
    check(
        lambda x, b: bias_gelu(x, b, approximate=approximate),
        lambda x, b: F.gelu(x + b, approximate=approximate),
        math.sqrt(shape[0]), x, bias,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["tanh", "none"])
def test_nan_and_infinity_pass_through(kind: str) -> None:
    """min.NaN and rsqrt(inf) = 0 are the hardware's, not NumPy's."""
    special = torch.tensor([math.nan, math.inf, -1e20, 1e20, 3e38], device="cuda").repeat(8)
    x = special.requires_grad_()
    y = bias_gelu(x, torch.zeros_like(x), approximate=kind)
    y.sum().backward()
    assert y[0].isnan()
    assert x.grad[0].isnan()
    assert y[1:5].tolist() == pytest.approx([math.inf, 0.0, 1e20, 3e38])
    assert x.grad[2:5].tolist() == pytest.approx([0.0, 1.0, 1.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [128, 64, 80])
def test_rotary(rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = rotary_tables(rotary_dim, 600, device="cuda")
    x = torch.randn(2, 513, 12, 128, device="cuda").to(dtype)
    angle = angles(torch.arange(513), rotary_dim).cuda()
    check(
        lambda x: rotary(x, cos, sin, interleaved=interleaved),
        lambda x: rotated(x, angle, interleaved, x.dtype), 1.0, x,
    )  # fmt: skip
    ends = torch.tensor([0, 100, 100, 513], device="cuda")
    shift = torch.tensor([5, 6, 80], device="cuda")
    position = torch.cat([torch.arange(100) + 5, torch.arange(413) + 80])
    turned = angles(position, rotary_dim).cuda()
    check(
        lambda x: rotary(x, cos, sin, interleaved=interleaved, cu_seqlens=ends, offset=shift),
        lambda x: rotated(x, turned, interleaved, x.dtype), 1.0, x[0],
    )  # fmt: skip
    swapped = x.transpose(1, 2).contiguous()
    y = rotary(swapped.transpose(1, 2), cos, sin, interleaved=interleaved)
    assert torch.equal(y, rotary(x, cos, sin, interleaved=interleaved))


def test_past_2_to_the_31_elements() -> None:
    """Every value is read, turned and written back at its own place."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rows, columns = 2**16 + 8, 2**15
    packed = torch.ones(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)[:, : columns + 16]
    packed[-1] = 3.0
    y = swiglu(packed)
    torch.testing.assert_close(y[-1], torch.full_like(y[-1], 3 * 3 * 0.9525741))
    torch.testing.assert_close(y[-2], torch.full_like(y[-2], 0.7310586))
    del y
    x = packed.reshape(-1)[: (2**31 // 4096 + 8) * 4096].view(1, -1, 32, 128)
    cos, sin = torch.zeros(x.shape[1], 64, device="cuda"), torch.ones(x.shape[1], 64, device="cuda")
    x[0, -1] = 5.0
    turned = rotary(x, cos, sin)
    assert (turned[0, -1, :, 64:] == 5).all()
    assert (turned[0, -1, :, :64] == -5).all()
    assert (turned[0, -2, :, 64:] == x[0, -2, :, :64]).all()
