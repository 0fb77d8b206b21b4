"""Fused dense layers: every backend against fp64 torch, and what the kernels move."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_kernels import fused_dense, fused_glu_dense, nn
from tests.kernels._numerics import assert_close, leaves, poison_empty
from tests.kernels.gemm._traffic import watch
from tests.kernels.ops._far_apart import far_apart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
ROWS, COLUMNS, INNER = 37, 70, 41
NAMES = ("y", "dx", "dweight", "dbias", "dresidual")


def tensors(dtype: torch.dtype, columns: int = COLUMNS) -> tuple[torch.Tensor, ...]:
    """x, packed weight, packed bias, residual, dy; what a plain layer needs is the first half."""
    made = (
        torch.randn(ROWS, INNER),
        torch.randn(2 * columns, INNER) / INNER**0.5,
        torch.randn(2 * columns),
        torch.randn(ROWS, columns),
        torch.randn(ROWS, columns),
    )
    return tuple(t.to(dtype) for t in made)


def plain(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor, activation: str, gated: bool
) -> torch.Tensor:
    z = F.linear(x, w, b)
    if not gated:
        return ACTIVATIONS[activation](z) + r
    gate, up = z.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up + r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "gated"),
    [("none", False), ("gelu", False), ("gelu_tanh", False), ("silu", True), ("gelu_tanh", True)],
)
def test_matches_fp64(
    backend: str,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    x, w, b, r, dy = tensors(dtype)
    if not gated:
        w, b = w[:COLUMNS], b[:COLUMNS]
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        xs, ws, bs, rs = leaves(x, w, b, r, dtype=to)
        if not ours:
            y = plain(xs, ws, bs, rs, activation, gated)
        elif gated:
            y = fused_glu_dense(xs, ws, bias=bs, activation=activation, residual=rs)
        else:
            y = fused_dense(xs, ws, bs, activation=activation, residual=rs)
        y.backward(dy.to(to))
        results.append((y, *(t.grad for t in (xs, ws, bs, rs))))
    for name, kernel, witness, oracle in zip(NAMES, *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=8.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_weights_are_the_packed_one(backend: str, recompute: bool) -> None:
    x, w, b, _, dy = tensors(torch.float32)
    packed = leaves(x, w, b)
    fused_glu_dense(packed[0], packed[1], bias=packed[2]).backward(dy)
    pair = leaves(x, w[:COLUMNS], w[COLUMNS:], b[:COLUMNS], b[COLUMNS:])
    fused_glu_dense(*pair, recompute=recompute).backward(dy)
    torch.testing.assert_close(pair[0].grad, packed[0].grad)
    torch.testing.assert_close(torch.cat([pair[1].grad, pair[2].grad]), packed[1].grad)
    torch.testing.assert_close(torch.cat([pair[3].grad, pair[4].grad]), packed[2].grad)


def test_a_wider_residual_gives_the_result_its_dtype(backend: str) -> None:
    x, w, _, r, _ = tensors(torch.bfloat16)
    stream = r.float().requires_grad_()
    y = fused_dense(x, w[:COLUMNS], residual=stream)
    assert y.dtype == torch.float32
    expected = F.linear(x.double(), w[:COLUMNS].double()) + stream
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    y.sum().backward()
    assert torch.equal(stream.grad, torch.ones(ROWS, COLUMNS))


def tiles(length: int, block: int) -> int:
    return -(-length // block)


def moved(*, save: bool, gated: bool) -> tuple[int, int]:
    """Values that one pass over the operands, tile by tile, has to load and to store."""
    config = import_module("stoker_kernels.ops.gemm.configs").config
    device = import_module("stoker_kernels.runtime.device").Device(90, 2, interpreted=True)
    sizes = config(4, device)
    down, across = tiles(ROWS, sizes["BLOCK_M"]), tiles(COLUMNS, sizes["BLOCK_N"])
    weights = 2 if gated else 1
    # Rows past the end are the last one again, from the cache.
    x = across * down * sizes["BLOCK_M"] * INNER
    w = weights * down * across * sizes["BLOCK_N"] * INNER
    loaded = x + w + weights * down * COLUMNS + ROWS * COLUMNS  # and biases, and the residual once
    return loaded, ROWS * COLUMNS * (1 + (weights if save else 0))


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_one_launch_and_no_other_pass_over_memory(
    interpreter: None, gated: bool, save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides its operands, tile by tile: the residual once, the result once, what is kept once."""
    x, w, b, r, dy = tensors(torch.float32)
    x.requires_grad_(save)
    triton = import_module("stoker_kernels.ops.gemm.fused_dense.triton")
    traffic = watch(monkeypatch, triton)
    if gated:
        y = fused_glu_dense(x, w, bias=b, residual=r)
    else:
        y = fused_dense(x, w[:COLUMNS], b[:COLUMNS], activation="gelu", residual=r)
    assert traffic.launches == 1
    assert (traffic.loaded, traffic.stored) == moved(save=save, gated=gated)
    if save:
        # Backward: dy and the pre-activation in, its gradient out, in one launch.
        before = traffic.loaded, traffic.stored
        y.backward(dy)
        kept = ROWS * COLUMNS * (2 if gated else 1)
        assert traffic.launches == 2
        partials = traffic.stored - before[1] - kept
        assert 0 < partials < kept / 2
        assert (
            kept + ROWS * COLUMNS <= traffic.loaded - before[0] <= kept + ROWS * COLUMNS + partials
        )


def test_strided_operands_and_stride_0_gradient(backend: str) -> None:
    wide, w, b, _, _ = tensors(torch.float32)
    for x in (torch.randn(ROWS, INNER + 7)[:, 3:-4], torch.randn(INNER, ROWS).t(), wide[None]):
        results = []
        for weight in (w[:COLUMNS], w[:COLUMNS].t().contiguous().t()):
            (xs,) = leaves(x)
            y = fused_dense(xs, weight, b[:COLUMNS], activation="silu")
            y.sum().backward()
            results.append((y, xs.grad))
        expected = F.silu(F.linear(x, w[:COLUMNS], b[:COLUMNS]))
        for y, grad in results:
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(grad, results[0][1])


def test_rows_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    """Tiles that start there; and rows too far apart for one tile's offsets, which are copied."""
    weight, values = torch.randn(8, 16).half(), torch.randn(520, 16).half()
    extent = 2**31 + 520 * 2**22
    storage = torch.from_file(str(tmp_path / "far"), shared=True, size=extent, dtype=torch.half)
    far = storage.as_strided((520, 16), (2**22, 1), 2**31)  # int32 would wrap to zeros in front
    far.copy_(values)
    assert torch.equal(fused_dense(far, weight), fused_dense(values, weight))
    (tmp_path / "apart").mkdir()
    apart = far_apart(values[:3], 0, tmp_path / "apart")
    assert torch.equal(fused_dense(apart, weight), fused_dense(values[:3], weight))


def test_empty_batch(backend: str) -> None:
    _, w, b, _, _ = tensors(torch.float32)
    x, w, b = leaves(torch.zeros(0, 3, INNER), w, b)
    y = fused_glu_dense(x, w, bias=b)
    y.sum().backward()
    assert y.shape == (0, 3, COLUMNS)
    assert torch.equal(w.grad, torch.zeros_like(w))
    assert torch.equal(b.grad, torch.zeros_like(b))
    x, w = leaves(torch.randn(3, INNER), torch.zeros(0, INNER))
    fused_dense(x, w).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, INNER))


class Products(TorchDispatchMode):
    """Counts PyTorch's matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gated", [False, True])
def test_frozen_tensors_cost_no_product(gated: bool) -> None:
    """As those of a model that is adapted: each product of the backward is a third of the layer."""
    products = []
    for frozen in (None, "x", "w"):
        given = {"x": torch.randn(8, INNER), "w": torch.randn(COLUMNS, INNER)}
        given |= {"up": torch.randn(COLUMNS, INNER)} if gated else {}
        for name, tensor in given.items():
            tensor.requires_grad_(frozen is None or (name == "x") != (frozen == "x"))
        y = fused_glu_dense(*given.values()) if gated else fused_dense(*given.values())
        with Products() as counter:
            y.sum().backward()
        assert all((t.grad is not None) == t.requires_grad for t in given.values())
        products.append(counter.count)
    assert products == ([4, 2, 2] if gated else [2, 1, 1])


@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    made = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4), torch.randn(3, 2 if gated else 4)
    inputs = leaves(*made, dtype=torch.float64)

    def run(x: Any, w: Any, b: Any, r: Any) -> Any:
        if gated:
            return fused_glu_dense(x, w, bias=b, residual=r, activation="gelu")
        return fused_dense(x, w, b, activation="gelu_tanh", residual=r)

    assert torch.autograd.gradcheck(run, inputs)


def test_autocast_casts_as_a_linear_layer(backend: str) -> None:
    x, w, b, _, _ = tensors(torch.float32)
    x, w, b = leaves(x, w, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fused_glu_dense(x, w, bias=b)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (torch.float32,) * 3


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_modules_are_the_unfused_ones(backend: str, kind: str, recompute: bool) -> None:
    x, residual = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    if kind == "swiglu":
        fused: Any = nn.FusedSwiGLU(16, 40, bias=True, recompute=recompute)
        unfused: Any = nn.SwiGLUMLP(16, 40, bias=True, ops="torch")
    else:
        approximate: Any = "tanh" if kind == "gelu_tanh" else "none"
        fused = nn.FusedMLP(16, approximate=approximate, recompute=recompute)
        unfused = nn.GELUMLP(16, approximate=approximate, ops="torch")
    unfused.load_state_dict(fused.state_dict())
    y, expected = fused(x, residual), residual + unfused(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(fused(x), unfused(x))
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(fused.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_errors() -> None:
    x, w, b, r, _ = tensors(torch.float32)
    with pytest.raises(ValueError, match=r"fused_dense: weight must be \(N, K\).* \(140, 41\)"):
        fused_dense(x[:, 1:], w)
    with pytest.raises(ValueError, match=r"bias must have shape \(140,\), got \(7,\)"):
        fused_dense(x, w, b[:7])
    with pytest.raises(ValueError, match=r"residual must have shape \(37, 140\)"):
        fused_dense(x, w, b, residual=r)
    with pytest.raises(ValueError, match="activation must be one of none, silu, gelu, gelu_tanh"):
        fused_dense(x, w, activation="relu")
    with pytest.raises(ValueError, match="weight must have x's dtype"):
        fused_dense(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"weight must be packed \(2F, K\)"):
        fused_glu_dense(x, w[1:])
    with pytest.raises(ValueError, match="give bias and up_bias, or neither"):
        fused_glu_dense(x, w, w, b)
    with pytest.raises(TypeError, match="floating point"):
        fused_dense(torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64))
