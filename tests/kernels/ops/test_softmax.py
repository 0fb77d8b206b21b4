"""Scaled, masked and causal softmax: every backend against fp64 torch, in one pass and online.

In the interpreter rows of more than 64 values are long: they go through the online kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from stoker_kernels import softmax
from tests.kernels._numerics import assert_close, leaves, poison_empty

if TYPE_CHECKING:
    from pathlib import Path

INF = float("inf")


def torch_softmax(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """torch's own softmax over -inf; rows with nothing to attend are 0 instead of NaN."""
    keep = torch.ones(x.shape, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask
    if causal:
        query, key = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])
        keep = keep & (key <= query + x.shape[-1] - x.shape[-2])
    scores = (x * scale).masked_fill(~keep, -INF)
    empty = ~keep.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def check(
    x: torch.Tensor,
    dy: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
) -> None:
    """Forward and backward of softmax against fp64, with torch in x's dtype as witness."""
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        (xs,) = leaves(x, dtype=dtype)
        run = softmax if ours else torch_softmax
        y = run(xs, mask, scale=scale, causal=causal)
        y.backward(dy.to(dtype))
        results.append((y, xs.grad))
    # In dx, dy cancels against its mean under y.
    terms = abs(scale) * dy.abs().max().item()
    for name, kernel, witness, oracle in zip(("y", "dx"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=terms if name == "dx" else 1.0)
    (y, dx), (expected, _) = results[0], results[2]
    assert (y[expected == 0] == 0).all()
    assert (dx[expected == 0] == 0).all()


SHAPES = [(1,), (7,), (1, 1), (5, 1), (37, 48), (2, 3, 5, 33), (2, 131), (3, 2, 4, 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_matches_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    check(2 * torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), scale=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 5, 33), (2, 9, 9), (8, 65), (40, 9), (72, 67)])
def test_causal_matches_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More keys than queries, as many, and fewer: then the first rows see nothing."""
    poison_empty(monkeypatch)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    check(x, dy, causal=True, scale=1.5)


@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 5, 33), (2, 1, 1, 33), (1, 3, 1, 33), (5, 33), (33,), (5, 1), (1,), ()]
)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_broadcast(
    backend: str, mask_shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    mask = torch.rand(mask_shape) < 0.6
    x, dy = torch.randn(2, 3, 5, 33), torch.randn(2, 3, 5, 33)
    check(x, dy, mask, causal=causal, scale=-0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_long_rows_and_of_many_dimensions(backend: str, causal: bool) -> None:
    x, dy = torch.randn(2, 1, 2, 3, 90), torch.randn(2, 1, 2, 3, 90)
    check(x, dy, torch.rand(2, 1, 1, 3, 90) < 0.5, causal=causal)
    strided = (torch.rand(90, 3) < 0.5).t()
    check(x, dy, strided, causal=causal)
    late = torch.arange(90) > 64  # whole blocks without a key before the first
    check(x, dy, late, causal=causal)


@pytest.mark.parametrize("keys", [20, 100])
def test_rows_with_nothing_to_attend_are_0_with_gradient_0(backend: str, keys: int) -> None:
    x = torch.randn(4, keys, requires_grad=True)
    mask = torch.ones(4, keys, dtype=torch.bool)
    mask[1] = False
    y = softmax(x, mask)
    y.backward(torch.randn(4, keys))
    assert (y[1] == 0).all()
    assert (x.grad[1] == 0).all()
    torch.testing.assert_close(y.sum(-1), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    minus = torch.full((2, keys), -INF)
    minus[0, 3] = 1.0
    y = softmax(minus)
    assert (y[1] == 0).all()
    assert y[0, 3] == 1


@pytest.mark.parametrize("keys", [33, 150])
@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float, keys: int) -> None:
    check(torch.randn(9, keys) * magnitude, torch.randn(9, keys))
    check(torch.randn(9, keys), torch.randn(9, keys) * magnitude, causal=True)


def test_increasing_and_decreasing_long_rows(backend: str) -> None:
    """The running maximum changes at every block, and never."""
    ramp = torch.linspace(-50, 50, 200).expand(2, 200)
    check(ramp, torch.randn(2, 200))
    check(ramp.flip(-1), torch.randn(2, 200))


@pytest.mark.parametrize("keys", [16, 96])
def test_strided_inputs_and_gradients(backend: str, keys: int) -> None:
    check(torch.randn(keys, 6).t(), torch.ones(()).expand(6, keys))
    check(torch.randn(6, 2 * keys)[:, :keys], torch.randn(keys, 6).t(), causal=True)
    check(torch.randn(keys).expand(6, keys), torch.randn(6, keys))
    check(torch.randn(6 * keys + 1)[1:].view(6, keys), torch.randn(6, keys))
    heads_last = torch.randn(2, 5, 3, keys).transpose(1, 2)
    check(heads_last, torch.randn(2, 3, 5, keys), torch.rand(2, 1, 5, keys) < 0.7)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4, 4)])
def test_empty(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    y = softmax(x, torch.ones(shape, dtype=torch.bool), causal=True)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's inf - inf
@pytest.mark.parametrize("keys", [8, 100])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_non_finite_values_stay_in_their_row(backend: str, value: float, keys: int) -> None:
    x = torch.randn(4, keys)
    x[2, 3] = value
    (xs,) = leaves(x)
    y = softmax(xs)
    assert y[2].isnan().all()
    y.sum().backward()
    for tensor in (y, xs.grad):
        assert tensor[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("keys", [8, 70])
def test_what_takes_no_part_is_not_looked_at(backend: str, keys: int) -> None:
    """NaN behind the mask or past the diagonal, in x and, past the diagonal, in dy."""
    x, dy = torch.randn(keys, keys), torch.randn(keys, keys)
    future = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    expected = softmax(x, causal=True)
    hidden = x.masked_fill(future, float("nan")).requires_grad_()
    y = softmax(hidden, causal=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(softmax(hidden, ~future), expected)
    y.backward(dy.masked_fill(future, float("nan")))
    assert hidden.grad.isfinite().all()
    assert (hidden.grad[future] == 0).all()


def test_agrees_with_attention_s_conventions(backend: str) -> None:
    """softmax @ v is SDPA with the same boolean mask, and with is_causal for S_q = S_k."""
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    mask = torch.rand(2, 1, 1, 6) < 0.7
    mask[..., 0] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention
    scores = q @ k.mT
    ours = softmax(scores, mask, scale=8**-0.5) @ v
    torch.testing.assert_close(ours, sdpa(q, k, v, attn_mask=mask))
    ours = softmax(scores, causal=True, scale=8**-0.5) @ v
    torch.testing.assert_close(ours, sdpa(q, k, v, is_causal=True))


def test_backward_leaves_the_upstream_gradient_alone(backend: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    dy = torch.randn(4, 8)
    before = dy.clone()
    softmax(x, causal=True).backward(dy)
    assert torch.equal(dy, before)


def test_row_offsets_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    """Rows 2^30 elements apart: with int32 the third would wrap to 2^31 before the first.

    The storage is a sparse file; its hole below the first row is what a wrapped offset would read.
    """
    stride = 2**30
    storage = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=2**32 + 128, dtype=torch.bfloat16
    )
    for keys in (32, 96):
        x = storage.as_strided((3, keys), (stride, 1), 2 * stride)
        x.copy_(torch.randn(3, keys))
        dense = x.clone()
        mask = (x > -1).expand(1, 1, 3, keys)
        far = storage.view(torch.bool).as_strided((3, keys), (stride, 1), 2 * stride + 2048)
        far.copy_(mask[0, 0])
        assert torch.equal(softmax(x, far), softmax(dense, mask[0, 0]))
        dx = []
        for upstream in (x, dense):
            (xs,) = leaves(dense)
            softmax(xs).backward(upstream)
            dx.append(xs.grad)
        assert torch.equal(*dx)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    (x,) = leaves(torch.randn(2, 3, 5), dtype=torch.float64)
    mask = torch.rand(3, 5) < 0.7
    mask[1] = False
    for causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, c=causal: softmax(a, mask, scale=0.3, causal=c), (x,)
        )
        ours = softmax(x, mask, scale=0.3, causal=causal)
        torch.testing.assert_close(
            ours, torch_softmax(x, mask, 0.3, causal), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(softmax(x), x.softmax(-1))


def test_errors() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match=r"mask must be torch\.bool.*additive"):
        softmax(x, torch.zeros(2, 8))
    with pytest.raises(ValueError, match="does not broadcast"):
        softmax(x, torch.ones(3, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not broadcast"):
        softmax(x, torch.ones(1, 2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(\.\.\., S_q, S_k\) when causal"):
        softmax(x[0], causal=True)
    with pytest.raises(TypeError, match="floating point"):
        softmax(torch.ones(2, 8, dtype=torch.int64))


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        softmax(torch.randn(2, 8).double())
