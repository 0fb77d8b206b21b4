"""Fused dense layers, grouped products and fp8 on a real GPU: numerics at training sizes, equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from torch.nn import functional as F  # noqa: E402

from stoker_kernels import fp8_linear, fused_dense, fused_glu_dense, grouped_gemm  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows, columns, inner length: whole tiles, tiles that stick out, lengths that 16 does not divide.
SHAPES = [(2048, 3072, 768), (300, 1000, 208), (37, 70, 41)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    pytest.importorskip("triton", reason="the CUDA path needs triton")
    torch.manual_seed(0)


def gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def check(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: torch.Tensor) -> None:
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
        assert_close(first, witness, oracle, terms=max(inputs[0].shape) ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_fused_dense(approximate: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, inner = shape
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    check(
        lambda x, w, b, r: fused_dense(x, w, b, activation=name, residual=r),
        lambda x, w, b, r: F.gelu(F.linear(x, w, b), approximate=approximate) + r,
        gpu(rows, inner, dtype=dtype), gpu(columns, inner, dtype=dtype) / inner**0.5,
        gpu(columns, dtype=dtype), gpu(rows, columns, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_glu_dense(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, inner = shape

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return F.silu(gate) * up

    check(
        lambda x, w, b: fused_glu_dense(x, w, bias=b), plain,
        gpu(rows, inner, dtype=dtype), gpu(2 * columns, inner, dtype=dtype) / inner**0.5,
        gpu(2 * columns, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [[0, 700, 700, 2000], [0, 0, 2048, 2048], [512, 1024, 1536, 2048]])
def test_grouped_gemm(ends: list[int], dtype: torch.dtype) -> None:
    numbers = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        starts = [0, *ends[:-1]]
        parts = [x[a:b] @ one.t() for a, b, one in zip(starts, ends, w, strict=True)]
        return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], w.shape[1])])

    check(
        lambda x, w: grouped_gemm(x, w, numbers), plain,
        gpu(2048, 768, dtype=dtype), gpu(4, 1000, 768, dtype=dtype) / 768**0.5,
    )  # fmt: skip


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU cannot multiply fp8",
)
@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (300, 1000, 208)])
def test_fp8_errors_stay_within_the_bounds(scaling: str, shape: tuple[int, int, int]) -> None:
    """Those of ``fp8.reference``; and an fp8 sum of 4096 products keeps fp32's precision."""
    rows, columns, inner = shape
    x, w, dy = (
        gpu(*s, dtype=torch.bfloat16) for s in ((rows, inner), (columns, inner), (rows, columns))
    )
    xs, ws = leaves(x, w)
    y = fp8_linear(xs, ws, scaling=scaling)
    y.backward(dy)
    wide = [t.double() for t in (x, w, dy)]
    for ours, exact, most, usual in (
        (
            y,
            F.linear(wide[0], wide[1]),
            F.linear(wide[0].abs(), wide[1].abs()) * (2**-3 + 2**-8),
            0.05,
        ),
        (xs.grad, wide[2] @ wide[1], wide[2].abs() @ wide[1].abs() * (2**-3 + 2**-4 + 2**-7), 0.08),
    ):
        error = (ours.double() - exact).abs()
        assert (error <= most + 2**-7 * exact.abs() + 1e-2).all()
        assert error.norm() <= usual * exact.norm()
    from stoker_kernels.ops.gemm.fp8 import reference

    wanted = reference.fp8_linear_fwd(x.float(), w.float(), None, scaling)
    torch.testing.assert_close(y.float(), wanted, rtol=2**-7, atol=2**-7 * inner**0.5)
