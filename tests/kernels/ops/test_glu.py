"""SwiGLU and GeGLU: every backend against fp64 torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import GeGLU, SwiGLU, geglu, swiglu
from tests.kernels._numerics import assert_close, leaves, poison_empty
from tests.kernels.ops._far_apart import far_apart

if TYPE_CHECKING:
    from pathlib import Path

# The interpreter computes in NumPy, which warns of what the kernels allow for.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

OURS = {
    "silu": swiglu,
    "tanh": geglu,
    "none": lambda *tensors: geglu(*tensors, approximate="none"),
}


def plain(packed: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = packed.chunk(2, -1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)) * up


def check(kind: str, packed: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward against fp64, with torch in packed's dtype as witness."""
    results = []
    for dtype, ours in ((packed.dtype, True), (packed.dtype, False), (torch.float64, False)):
        leaf = packed.detach().requires_grad_() if ours else leaves(packed, dtype=dtype)[0]
        y = OURS[kind](leaf) if ours else plain(leaf, kind)
        y.backward(dy.to(dtype) if not ours else dy)
        results.append((y, leaf.grad))
    for name, kernel, witness, oracle in zip(("y", "dpacked"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


@pytest.fixture(params=list(OURS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (5, 2), (1, 14), (37, 96), (3, 5, 258), (2, 4400)])
def test_matches_fp64(
    backend: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    dy = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    check(kind, torch.randn(shape).to(dtype), dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 129), (0, 4)])
def test_two_tensors_are_the_packed_one(
    backend: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit in a kernel, whatever their strides; PyTorch's own loops differ by layout."""
    poison_empty(monkeypatch)
    wide = torch.randn(*shape[:-1], 2 * shape[-1] + 3).to(dtype)
    gate, up = wide[..., : shape[-1]], wide[..., shape[-1] + 3 :]
    dy = torch.randn(shape).to(dtype)
    (packed,) = leaves(torch.cat([gate, up], -1))
    wanted = OURS[kind](packed)
    wanted.backward(dy)
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = OURS[kind](gate, up)
    y.backward(dy)
    exact = {"rtol": 0, "atol": 0} if backend == "triton" else {}
    torch.testing.assert_close(y, wanted, **exact)
    torch.testing.assert_close(torch.cat([gate.grad, up.grad], -1), packed.grad, **exact)


def test_a_tensor_that_gates_itself(backend: str) -> None:
    x, twin = leaves(torch.randn(3, 8), torch.randn(3, 8))
    twin.data.copy_(x.data)
    swiglu(x, x).sum().backward()
    swiglu(torch.cat([twin, twin], -1)).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, kind: str, magnitude: float) -> None:
    check(kind, torch.randn(9, 66) * magnitude, torch.randn(9, 33))


def test_the_gate_s_whole_range(backend: str, kind: str) -> None:
    """Where the activation bends, point by point; the other half is 1, so nothing hides an error."""
    gate = torch.linspace(-15, 15, 1501)
    check(kind, torch.cat([gate, torch.ones(1501)])[None], torch.ones(1, 1501))


def test_magnitudes_whose_powers_overflow(interpreter: None, kind: str) -> None:
    """The limits hold where x^2 and x^3 are inf: no NaN from inf * 0."""
    gate = torch.tensor([[1e12, 1e20, 3e38, -1e12, -1e20, -3e38]])
    packed = torch.cat([gate, torch.ones(1, 6)], -1).requires_grad_()
    y = OURS[kind](packed)
    y.sum().backward()
    value = gate.clamp(min=0)
    assert torch.equal(y, value)
    assert torch.equal(packed.grad, torch.cat([gate.sign().clamp(min=0), value], -1))


def test_infinities_and_nan_stay_in_their_place(backend: str, kind: str) -> None:
    packed = torch.randn(4, 16)
    packed[1, 2], packed[2, 3] = float("inf"), float("nan")
    packed[1, 10] = 2.0
    packed.requires_grad_()
    y = OURS[kind](packed)
    y.sum().backward()
    assert not y[1, 2].isfinite()
    assert y[2, 3].isnan()
    assert y.isfinite().sum() == 30
    assert packed.grad[2, 3].isnan()
    assert packed.grad[2, 11].isnan()
    assert packed.grad[[0, 3]].isfinite().all()
    assert packed.grad[1:3].isfinite().sum() >= 28


def test_strided_input_and_stride_0_gradient(backend: str, kind: str) -> None:
    check(kind, torch.randn(16, 6).t(), torch.ones(()).expand(6, 8))
    check(kind, torch.randn(6, 32)[:, 3:19], torch.randn(8, 6).t())
    check(kind, torch.randn(4, 3, 10).transpose(0, 1), torch.randn(3, 4, 5))
    check(kind, torch.randn(1, 3, 10).expand(4, 3, 10), torch.randn(4, 3, 5))


def test_offsets_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    values, dy = torch.randn(3, 16).half(), torch.randn(3, 8).half()
    far = far_apart(values, 0, tmp_path).requires_grad_()
    near = values.clone().requires_grad_()
    for x in (far, near):
        swiglu(x).backward(dy)
    assert torch.equal(swiglu(far), swiglu(near))
    assert torch.equal(far.grad, near.grad)


def test_offsets_of_the_gradient_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    packed, dy = torch.randn(3, 16).half(), torch.randn(3, 8).half()
    grads = []
    for upstream in (far_apart(dy, 0, tmp_path), dy):
        x = packed.clone().requires_grad_()
        swiglu(x).backward(upstream)
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 4, 6)])
def test_empty(backend: str, kind: str, shape: tuple[int, ...]) -> None:
    packed = torch.zeros(shape, requires_grad=True)
    y = OURS[kind](packed)
    y.sum().backward()
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert packed.grad.shape == shape


def test_backward_leaves_the_upstream_gradient_alone(backend: str, kind: str) -> None:
    (packed,) = leaves(torch.randn(4, 8))
    dy = torch.randn(4, 4)
    before = dy.clone()
    OURS[kind](packed).backward(dy)
    assert torch.equal(dy, before)


def test_repeats_bit_for_bit(backend: str, kind: str) -> None:
    packed, dy = torch.randn(70, 300), torch.randn(70, 150)
    grads = []
    for _ in range(2):
        (leaf,) = leaves(packed)
        OURS[kind](leaf).backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_gradcheck(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    (packed,) = leaves(torch.randn(3, 10), dtype=torch.float64)
    assert torch.autograd.gradcheck(OURS[kind], (packed,))
    assert_close(OURS[kind](packed), plain(packed, kind), plain(packed, kind))


def test_modules() -> None:
    packed = torch.randn(2, 8)
    assert torch.equal(SwiGLU()(packed), swiglu(packed))
    assert torch.equal(GeGLU()(packed), geglu(packed))
    assert torch.equal(GeGLU("none")(packed), geglu(packed, approximate="none"))
    assert not torch.equal(GeGLU("none")(packed), geglu(packed))
    assert repr(GeGLU("none")) == "GeGLU(approximate='none')"


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"swiglu: packed must be \[gate \| up\].* \(2, 7\)"):
        swiglu(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"swiglu: up must match gate .* \(2, 4\) .* \(2, 8\)"):
        swiglu(torch.randn(2, 8), torch.randn(2, 4))
    with pytest.raises(ValueError, match="geglu: packed"):
        geglu(torch.tensor(1.0))
    with pytest.raises(TypeError, match="floating point, got"):
        swiglu(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="geglu: approximate must be 'tanh' or 'none', got 'erf'"):
        geglu(torch.randn(2, 8), approximate="erf")
    with pytest.raises(ValueError, match="GeGLU: approximate"):
        GeGLU("erf")


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        swiglu(torch.randn(2, 8).double())
