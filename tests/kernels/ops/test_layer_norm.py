"""LayerNorm: every backend against fp64 torch, alone and with dropout and the residual sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stoker_kernels import DropoutAddLayerNorm, LayerNorm, layer_norm
from stoker_kernels.ops.layer_norm import dropout_mask
from stoker_kernels.primitives.philox import draw_seed, keep_scale_of
from tests.kernels._numerics import assert_close, leaves, poison_empty

if TYPE_CHECKING:
    from pathlib import Path

EPS = 1e-5
SEED = torch.tensor([2**40 + 17])


def check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dy: torch.Tensor
) -> None:
    """Plain LayerNorm, forward and backward, against fp64, with torch in x's dtype as witness."""
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        xs, ws = leaves(x, weight, dtype=dtype)
        (bs,) = leaves(bias, dtype=dtype) if bias is not None else (None,)
        y = layer_norm(xs, ws, bs, eps=EPS) if ours else F.layer_norm(xs, ws.shape, ws, bs, EPS)
        y.backward(dy.to(dtype))
        results.append((y, xs.grad, ws.grad, *(() if bs is None else (bs.grad,))))
    # What cancels: in dx the mean of the gradient against the gradient, both over the deviation.
    wide = x.double()
    terms = ((wide.var(-1, correction=0) + EPS).rsqrt().max() * dy.double().abs().max()).item()
    for name, kernel, witness, oracle in zip(("y", "dx", "dw", "db"), *results, strict=False):
        assert_close(kernel, witness, oracle, name, terms=terms if name == "dx" else 1.0)


def torch_layer(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused op out of torch's own, with the kernel's dropout mask."""
    h = x
    if dropout_p:
        kept = x * keep_scale_of(dropout_p)
        h = torch.where(dropout_mask(SEED, x.shape, dropout_p), kept, 0)
    h = h if residual is None else h + residual
    return F.layer_norm(h, weight.shape, weight, bias, EPS), h


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (131, 48), (3, 5, 129), (2, 4097)])
def test_matches_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    n = shape[-1]
    bias = torch.randn(n).to(dtype) if n != 7 else None
    weight = (1 + 0.1 * torch.randn(n)).to(dtype)
    check(torch.randn(shape).to(dtype), weight, bias, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, magnitude: float) -> None:
    check(torch.randn(9, 33) * magnitude, torch.randn(33), torch.randn(33), torch.randn(9, 33))


def test_a_large_mean_does_not_cancel_the_variance(backend: str) -> None:
    """E[x^2] - E[x]^2 in fp32 would have no digit left here."""
    check(torch.randn(4, 64) + 3e3, torch.randn(64), None, torch.randn(4, 64))


def test_constant_rows_stay_finite(backend: str) -> None:
    x, w, b = leaves(torch.full((3, 8), 5.0), torch.ones(8), torch.randn(8))
    y = layer_norm(x, w, b)
    torch.testing.assert_close(y, b.expand(3, 8))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_strided_input_and_stride_0_gradient(backend: str) -> None:
    weight, bias = torch.randn(16), torch.randn(16)
    x = torch.randn(16, 6).t()  # last dimension has stride 6
    check(x, weight, bias, torch.ones(()).expand(6, 16))
    check(torch.randn(6, 32)[:, :16], weight, bias, torch.randn(16, 6).t())
    check(torch.randn(16).expand(6, 16), weight, bias, torch.randn(6, 16))
    check(torch.randn(6 * 16 + 1)[1:].view(6, 16), weight, bias, torch.randn(6, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 129), (37, 48)])
@pytest.mark.parametrize("case", ["residual", "dropout", "both", "both, no bias"])
def test_dropout_and_residual_match_fp64(
    backend: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    dropout_p = 0.0 if case == "residual" else 0.3
    x, residual, dy, dh = (torch.randn(shape).to(dtype) for _ in range(4))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    results = []
    for to, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        xs, rs, ws, bs = leaves(x, residual, weight, bias, dtype=to)
        r = None if case == "dropout" else rs
        b = None if case == "both, no bias" else bs
        if ours:
            y, h = layer_norm(xs, ws, b, eps=EPS, residual=r, dropout_p=dropout_p, seed=SEED)
        else:
            y, h = torch_layer(xs, r, ws, b, dropout_p)
        torch.autograd.backward([y, h], [dy.to(to), dh.to(to)])
        grads = [t.grad for t in (xs, rs, ws, bs) if t.grad is not None]
        results.append((y, h, *grads))
    assert len({len(result) for result in results}) == 1
    if shape == (1, 1):
        return  # the deviation is 0: its rsqrt(eps) of 316 multiplies rounding errors alone
    terms = (results[2][1].var(-1, correction=0) + EPS).rsqrt().max().item() * 3
    for index, (kernel, witness, oracle) in enumerate(zip(*results, strict=True)):
        # h is rounded once before it is normalised: that error is in the witness too.
        assert_close(kernel, witness, oracle, f"{case} {index}", terms=terms)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("offset", [1.0, None])
def test_offset_and_no_weight(
    backend: str, offset: float | None, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset is a greater weight; no weight is one of ones, without a gradient."""
    poison_empty(monkeypatch)
    x, residual, dy = (torch.randn(3, 5, 129) for _ in range(3))
    weight, bias = torch.randn(129), torch.randn(129)
    results = []
    for plain in (False, True):
        xs, rs, ws, bs = leaves(x, residual, weight, bias)
        b = None if offset is None else bs
        if plain:
            given, added = torch.ones(129) if offset is None else ws + offset, 0.0
        else:
            given, added = None if offset is None else ws, offset or 0.0
        if has_residual:
            y, _ = layer_norm(xs, given, b, residual=rs, dropout_p=0.3, seed=SEED, offset=added)
        else:
            y = layer_norm(xs, given, b, offset=added)
        y.backward(dy)
        results.append((y, *(t.grad for t in (xs, rs, ws, bs) if t.grad is not None)))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dropout_p", [0.0, 1 / 2**16, 0.1, 0.5, 1.0])
def test_dropout_drops_at_the_asked_rate_and_keeps_the_expectation(
    backend: str, dropout_p: float
) -> None:
    x = torch.ones(40, 500)
    seed = draw_seed(x.device)
    out = layer_norm(x, torch.ones(500), residual=x, dropout_p=dropout_p, seed=seed)
    dropped = out[1] == 1  # h is 1 + dropout(1)
    assert torch.equal(dropped, ~dropout_mask(seed, x.shape, dropout_p))
    n = x.numel()
    spread = 5 * (n * dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(dropped.sum().item() - n * dropout_p) <= spread + 1
    if dropout_p < 1:
        kept = out[1][~dropped]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 + keep_scale_of(dropout_p)))
    # Rows and columns share no mask.
    if dropout_p == 0.5:
        agree = (dropped[:-1] == dropped[1:]).float().mean(1)
        assert ((agree - 0.5).abs() < 5 * 0.5 / 500**0.5).all()


def test_what_is_normalised_is_the_rounded_stream(backend: str) -> None:
    x, residual = torch.randn(6, 40).bfloat16(), torch.randn(6, 40).bfloat16()
    w = torch.ones(40)
    y, h = layer_norm(x, w, residual=residual, dropout_p=0.3, seed=SEED)
    assert torch.equal(y, layer_norm(h, w))


def test_dropped_elements_get_no_gradient_and_a_seed_repeats(backend: str) -> None:
    x, w = leaves(torch.randn(6, 21), torch.randn(21))
    y, h = layer_norm(x, w, dropout_p=0.4, seed=SEED)
    (y.square().sum() + h.sum()).backward()
    keep = dropout_mask(SEED, x.shape, 0.4)
    assert torch.equal(x.grad != 0, keep)
    assert torch.equal(h != 0, keep)
    again, _ = layer_norm(x, w, dropout_p=0.4, seed=SEED)
    other, _ = layer_norm(x, w, dropout_p=0.4, seed=SEED + 1)
    assert torch.equal(again, y)
    assert not torch.equal(other, y)


def test_seeds_follow_torch_and_evaluation_drops_nothing(backend: str) -> None:
    x, w = torch.randn(4, 32), torch.ones(32)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([layer_norm(x, w, dropout_p=0.5)[0] for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[0][1])
    y, h = layer_norm(x, w, dropout_p=0.5, training=False)
    assert torch.equal(h, x)
    assert torch.equal(y, layer_norm(x, w))
    y, h = layer_norm(x, w, dropout_p=0.5, training=False, residual=x)
    assert torch.equal(h, x + x)


def test_checkpoint_replays_the_mask(backend: str) -> None:
    layer = DropoutAddLayerNorm(24, dropout_p=0.3)
    x, residual = torch.randn(5, 24), torch.randn(5, 24)
    grads = []
    for replay in (False, True):
        torch.manual_seed(11)
        layer.zero_grad()
        xs, rs = leaves(x, residual)
        if replay:
            y, h = checkpoint(layer, xs, rs, use_reentrant=False)
        else:
            y, h = layer(xs, rs)
        torch.rand(3)  # the generator moves on before the replay
        (y * torch.arange(24.0)).sum().add(h.square().sum()).backward()
        grads.append([xs.grad, rs.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_one_tensor_as_input_and_residual(backend: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y, h = layer_norm(x, torch.ones(8), residual=x)
    torch.testing.assert_close(h, 2 * x)
    h.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((3, 8), 2.0))
    assert y.isfinite().all()


def test_backward_leaves_the_upstream_gradients_alone(backend: str) -> None:
    x, residual, w = leaves(torch.randn(4, 8), torch.randn(4, 8), torch.randn(8))
    upstream = [torch.randn(4, 8), torch.randn(4, 8)]
    before = [t.clone() for t in upstream]
    out = layer_norm(x, w, residual=residual, dropout_p=0.5, seed=SEED)
    torch.autograd.backward(out, upstream)
    assert all(torch.equal(a, b) for a, b in zip(upstream, before, strict=True))


def test_repeats_bit_for_bit(backend: str) -> None:
    x, w, dy = torch.randn(70, 200), torch.randn(200), torch.randn(70, 200)
    grads = []
    for _ in range(2):
        xs, ws = leaves(x, w)
        y, _ = layer_norm(xs, ws, torch.zeros(200), dropout_p=0.1, seed=SEED)
        y.backward(dy)
        grads.append((xs.grad, ws.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's inf - inf
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_stay_in_their_row(backend: str, value: float) -> None:
    x = torch.randn(4, 8)
    x[2, 3] = value
    (xs,) = leaves(x)
    y = layer_norm(xs, torch.ones(8), torch.zeros(8))
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()
    y.sum().backward()
    assert xs.grad[[0, 1, 3]].isfinite().all()


def test_mixed_dtypes_and_empty_batch(backend: str) -> None:
    w, b = leaves(torch.ones(16), torch.zeros(16))
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    y = layer_norm(x, w, b)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (w.grad.dtype, b.grad.dtype) == (torch.float32, torch.float32)
    x, w, b = leaves(torch.zeros(0, 8), torch.ones(8), torch.ones(8))
    y, h = layer_norm(x, w, b, residual=torch.zeros(0, 8), dropout_p=0.5)
    (y.sum() + h.sum()).backward()
    assert torch.equal(w.grad, torch.zeros(8))
    assert torch.equal(b.grad, torch.zeros(8))


def test_row_offsets_beyond_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    """Rows 2^30 elements apart: with int32 the third would wrap to 2^31 before the first.

    The storage is a sparse file; its hole below the first row is what a wrapped offset would read.
    """
    stride = 2**30
    storage = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=2**32 + 64, dtype=torch.bfloat16
    )
    x = storage.as_strided((3, 32), (stride, 1), 2 * stride)
    x.copy_(torch.randn(3, 32))
    dense = x.clone()
    w = torch.ones(32, dtype=torch.bfloat16)
    y, h = layer_norm(x, w, residual=x, dropout_p=0.5, seed=SEED)
    expected, h_expected = layer_norm(dense, w, residual=dense, dropout_p=0.5, seed=SEED)
    assert torch.equal(h, h_expected)
    assert torch.equal(y, expected)
    dx = []
    for upstream in (x, dense):
        (xs,) = leaves(dense)
        torch.autograd.backward(
            layer_norm(xs, w, dropout_p=0.5, seed=SEED), [upstream.detach()] * 2
        )
        dx.append(xs.grad)
    assert torch.equal(*dx)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    x, r, w, b = leaves(*(torch.randn(3, 5) for _ in range(2)), torch.randn(5), torch.randn(5))
    x, r, w, b = leaves(x, r, w, b, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, eps=EPS), (x, w, b))
    assert torch.autograd.gradcheck(
        lambda x, r, w, b: layer_norm(x, w, b, residual=r, dropout_p=0.4, seed=SEED), (x, r, w, b)
    )
    ours = layer_norm(x, w, b, residual=r, dropout_p=0.4, seed=SEED)
    for a, expected in zip(ours, torch_layer(x, r, w, b, 0.4), strict=True):
        torch.testing.assert_close(a, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unused", [0, 1])
def test_an_output_nobody_used(backend: str, unused: int) -> None:
    """Its missing gradient counts as zeros."""
    start, residual, dout = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)
    results = []
    for explicit in (False, True):
        x, r = leaves(start, residual)
        outputs = layer_norm(x, torch.ones(8), residual=r, dropout_p=0.25, seed=SEED)
        gradients = [dout, torch.zeros(3, 8)] if unused else [torch.zeros(3, 8), dout]
        if explicit:
            torch.autograd.backward(outputs, gradients)
        else:
            outputs[1 - unused].backward(dout)
        results.append((x.grad, r.grad))
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


def test_modules() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    plain, plain_torch = LayerNorm(8), torch.nn.LayerNorm(8)
    plain.load_state_dict(plain_torch.state_dict())
    torch.testing.assert_close(plain(x), plain_torch(x))
    assert LayerNorm(8, bias=False).bias is None
    block = DropoutAddLayerNorm(8, dropout_p=0.5)
    y, h = block(x)
    assert (h == 0).any()
    torch.testing.assert_close(y, plain(h))
    block.eval()
    assert torch.equal(block(x)[1], x)
    assert torch.equal(block(x, x)[1], 2 * x)
    assert torch.equal(DropoutAddLayerNorm(8)(x)[1], x)


def test_errors() -> None:
    x, w = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight must have shape"):
        layer_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match="bias must match weight"):
        layer_norm(x, w, torch.ones(7))
    with pytest.raises(ValueError, match="bias needs a weight"):
        layer_norm(x, None, w)
    with pytest.raises(ValueError, match="residual must match x"):
        layer_norm(x, w, residual=torch.randn(3, 8))
    with pytest.raises(ValueError, match=r"dropout_p must be a probability in \[0, 1\]"):
        layer_norm(x, w, dropout_p=-0.1)
    with pytest.raises(ValueError, match=r"dropout_p must be a probability in \[0, 1\]"):
        DropoutAddLayerNorm(8, dropout_p=2.0)
    with pytest.raises(ValueError, match=r"seed must be \(1,\) int64"):
        layer_norm(x, w, dropout_p=0.5, seed=torch.tensor(3))


def test_what_the_kernel_refuses(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        layer_norm(torch.randn(2, 8).double(), torch.ones(8).double())
    with pytest.raises(ValueError, match="at most 65536 columns"):
        layer_norm(torch.randn(1, 65537), torch.ones(65537))
