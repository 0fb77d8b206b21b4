"""Rotary embedding: every backend against complex numbers in fp64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_kernels import Llama3Scaling, YarnScaling, rotary, rotary_tables
from tests.kernels._numerics import assert_close, leaves, poison_empty
from tests.kernels.ops._far_apart import far_apart

if TYPE_CHECKING:
    from pathlib import Path


def rotated(
    x: torch.Tensor, angle: torch.Tensor, interleaved: bool, cast: torch.dtype
) -> torch.Tensor:
    """x (..., H, D) turned by angle (..., R/2) as complex numbers, written on its own."""
    half = angle.shape[-1]
    turned = x[..., : 2 * half]
    parts = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    parts = parts if interleaved else parts.mT
    c, s = angle.cos().to(cast).unsqueeze(-2), angle.sin().to(cast).unsqueeze(-2)
    a, b = parts.unbind(-1)
    turned = torch.stack([a * c - b * s, a * s + b * c], -1)
    turned = (turned if interleaved else turned.mT).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def angles(position: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    i = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return position.double()[..., None] * 10000.0 ** (-2 * i / rotary_dim)


def check(
    x: torch.Tensor,
    position: torch.Tensor,
    rotary_dim: int,
    interleaved: bool,
    table_dtype: torch.dtype = torch.float32,
    **where: Any,
) -> None:
    """Forward and backward against fp64; ``position`` is what ``where`` should amount to."""
    cos, sin = rotary_tables(rotary_dim, 64, dtype=table_dtype)
    angle = angles(position, rotary_dim)
    dy = torch.randn(x.shape).to(x.dtype)
    results = []
    for dtype, ours in ((x.dtype, True), (x.dtype, False), (torch.float64, False)):
        if ours:
            leaf = x.detach().requires_grad_()
            y = rotary(leaf, cos, sin, interleaved=interleaved, **where)
        else:
            (leaf,) = leaves(x, dtype=dtype)
            y = rotated(leaf, angle, interleaved, dtype)
        y.backward(dy.to(dtype))
        results.append((y, leaf.grad))
    for name, kernel, witness, oracle in zip(("y", "dx"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        ((1, 1, 1, 2), 2),
        ((2, 5, 3, 16), 16),
        ((2, 5, 3, 16), 6),
        ((1, 3, 17, 10), 10),
        ((3, 33, 1, 7), 4),
        ((1, 2, 40, 64), 48),
    ],
)
def test_matches_fp64(
    backend: str,
    interleaved: bool,
    shape: tuple[int, ...],
    rotary_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_empty(monkeypatch)
    check(torch.randn(shape).to(dtype), torch.arange(shape[1]), rotary_dim, interleaved)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_extreme_magnitudes(backend: str, interleaved: bool, magnitude: float) -> None:
    check(torch.randn(2, 9, 3, 8) * magnitude, torch.arange(9), 8, interleaved)


def test_offsets_shift_the_positions(backend: str, interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8)
    check(x, torch.arange(5) + 59, 8, interleaved, offset=59)
    shift = torch.tensor([7, 0])
    check(x, torch.arange(5) + shift[:, None], 8, interleaved, offset=shift)
    check(x[:, :1], shift[:, None], 8, interleaved, offset=shift.int())


def test_given_positions(backend: str, interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8)
    for position in (
        torch.tensor([3, 3, 0, 63, 1]),
        torch.randint(64, (2, 5)),
        torch.randint(64, (5, 2), dtype=torch.int32).t(),
        torch.randint(64, (2, 1)).expand(2, 5),
    ):
        check(x, position, 8, interleaved, positions=position)
    position = torch.randint(64, (10,))
    check(torch.randn(10, 3, 8), position, 8, interleaved, positions=position)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_restart(backend: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Empty sequences at the start, inside and at the end; rows after the last have position 0."""
    ends = torch.tensor([0, 0, 4, 4, 5, 11, 11], dtype=dtype)
    x = torch.randn(13, 3, 8)
    position = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 0, 0])
    check(x, position, 8, interleaved, cu_seqlens=ends)
    shift = torch.tensor([50, 10, 20, 30, 40, 60], dtype=dtype)
    position[:11] += torch.tensor([10] * 4 + [30] + [40] * 6)
    check(x, position, 8, interleaved, cu_seqlens=ends, offset=shift)
    for count in (1, 2, 3, 7):  # every depth of the search, one row per sequence
        ends = torch.arange(count + 1, dtype=dtype)
        check(x[:count], torch.full((count,), 5), 8, interleaved, cu_seqlens=ends, offset=5)


def test_no_sequence_at_all(backend: str) -> None:
    x = torch.randn(3, 2, 8)
    assert torch.equal(rotary(x, *rotary_tables(8, 4), cu_seqlens=torch.tensor([0])), x)


@pytest.mark.parametrize("bad", [-1, 64, 2**31 + 3, 2**40])
def test_a_position_outside_the_tables_gives_nan(backend: str, bad: int) -> None:
    x = torch.randn(1, 3, 2, 8, requires_grad=True)
    cos, sin = rotary_tables(6, 64)
    y = rotary(x, cos, sin, positions=torch.tensor([1, bad, 63]))
    y.backward(torch.ones_like(y))
    for result in (y, x.grad):
        assert result[0, 1, :, :6].isnan().all()
        assert result[0, [0, 2]].isfinite().all()
    assert torch.equal(y[..., 6:], x[..., 6:])


def test_tables_in_the_storage_dtype_and_strided(backend: str, interleaved: bool) -> None:
    cos, sin = rotary_tables(8, 64, dtype=torch.bfloat16)
    x = torch.randn(2, 5, 3, 8).bfloat16()
    y = rotary(x, cos, sin, interleaved=interleaved)
    wide = rotary(x, cos.float(), sin.float(), interleaved=interleaved)
    assert torch.equal(y, wide)
    both = torch.cat([cos, sin], -1)
    assert torch.equal(rotary(x, both[:, :4], both[:, 4:], interleaved=interleaved), y)
    assert torch.equal(rotary(x, cos.t().contiguous().t(), sin, interleaved=interleaved), y)


def test_strided_input_and_stride_0_gradient(backend: str, interleaved: bool) -> None:
    place = torch.arange(5)
    check(torch.randn(2, 3, 5, 8).transpose(1, 2), place, 8, interleaved)
    check(torch.randn(2, 5, 9, 8)[:, :, 2:5], place, 6, interleaved)  # q of a packed projection
    check(torch.randn(2, 5, 8, 3).mT, place, 8, interleaved)
    check(torch.randn(2, 5, 1, 8).expand(2, 5, 3, 8), place, 8, interleaved)
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    cos, sin = rotary_tables(8, 5)
    rotary(x, cos, sin, interleaved=interleaved).sum().backward()
    (same,) = leaves(x)
    rotary(same, cos, sin, interleaved=interleaved).backward(torch.ones(x.shape))
    assert torch.equal(x.grad, same.grad)


def test_memory_order_is_kept(backend: str) -> None:
    cos, sin = rotary_tables(8, 5)
    heads_first = torch.randn(2, 3, 5, 8, requires_grad=True)
    y = rotary(heads_first.transpose(1, 2), cos, sin).transpose(1, 2)
    assert y.is_contiguous()
    y.backward(torch.randn(2, 3, 5, 8))
    assert heads_first.grad.is_contiguous()
    assert rotary(torch.randn(2, 5, 9, 8)[:, :, :3], cos, sin).is_contiguous()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiles_whole_in_both_memory_orders_and_with_lengths(backend: str) -> None:
    """Beyond the workloads: strides that the fake must foresee, and the optional tensors."""
    cos, sin = rotary_tables(6, 64)
    where = {"cu_seqlens": torch.tensor([0, 4, 10]), "offset": torch.tensor([3, 0])}

    def both(heads_first: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = rotary(heads_first.transpose(1, 2), cos, sin, offset=2)
        return y.transpose(1, 2), rotary(packed, cos, sin, **where)

    torch._dynamo.reset()
    results = []
    inputs = torch.randn(2, 3, 5, 8), torch.randn(10, 3, 8)
    for run in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        xs = leaves(*inputs)
        ys = run(*xs)
        torch.autograd.backward(ys, [y.detach().square() for y in ys])
        results.append((*ys, *(x.grad for x in xs)))
    for eager, compiled in zip(*results, strict=True):
        assert eager.stride() == compiled.stride()
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_2_to_the_31(interpreter: None, tmp_path: Path, dim: int) -> None:
    shape = [2, 2, 2, 8]
    shape[dim] = 3
    near = torch.randn(shape).half()
    far = far_apart(near, dim, tmp_path)
    cos, sin = rotary_tables(8, 3)
    assert torch.equal(rotary(far, cos, sin), rotary(near, cos, sin))
    assert torch.equal(
        rotary(far, cos, sin, interleaved=True), rotary(near, cos, sin, interleaved=True)
    )


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)])
def test_empty(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    rotary(x, *rotary_tables(8, 5)).sum().backward()
    assert x.grad.shape == shape


def test_gradient_turns_back(backend: str, interleaved: bool) -> None:
    """A rotation keeps lengths, and its gradient is its inverse: dx of y itself is x."""
    x = torch.randn(2, 9, 3, 8, requires_grad=True)
    y = rotary(x, *rotary_tables(8, 9), interleaved=interleaved)
    before = y.detach().clone()
    upstream = y.detach()
    y.backward(upstream)
    torch.testing.assert_close(x.grad, x)
    assert torch.equal(upstream, before)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_distance_only(backend: str, interleaved: bool) -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    cos, sin = rotary_tables(16, 64)

    def score(q_place: int, k_place: int) -> torch.Tensor:
        turned = [
            rotary(t, cos, sin, interleaved=interleaved, offset=p)
            for t, p in ((q, q_place), (k, k_place))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(60, 56), rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_pair(backend: str) -> None:
    x = torch.randn(1, 3, 2, 8)
    x[0, 1, 0, 2] = float("nan")
    wrong = rotary(x, *rotary_tables(8, 3)).isnan()
    assert wrong.nonzero().tolist() == [[0, 1, 0, 2], [0, 1, 0, 6]]


def test_gradcheck(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    (x,) = leaves(torch.randn(2, 3, 2, 6), dtype=torch.float64)
    cos, sin = rotary_tables(4, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a: rotary(a, cos, sin, interleaved=interleaved, offset=2), (x,)
    )
    oracle = rotated(x, angles(torch.arange(3) + 2, 4), interleaved, torch.float64)
    assert_close(rotary(x, cos, sin, interleaved=interleaved, offset=2), oracle, oracle)


def test_tables_are_exact_to_the_last_bit() -> None:
    cos, sin = rotary_tables(64, 100_001, base=500_000.0)
    assert cos.shape == sin.shape == (100_001, 32)
    assert cos.dtype == torch.float32
    exponent = torch.arange(32, dtype=torch.float64) / 32
    angle = 100_000 * 500_000.0**-exponent
    assert torch.equal(cos[-1], angle.cos().float())
    assert torch.equal(sin[-1], angle.sin().float())
    assert rotary_tables(8, 3, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="positive and even"):
        rotary_tables(7, 3)


def test_errors() -> None:
    x, (cos, sin) = torch.randn(2, 5, 3, 8), rotary_tables(8, 5)
    places = torch.zeros(2, dtype=torch.int64)
    for message, arguments, options in (
        (r"x must be \(B, S, H, D\) or", (x[0, 0], cos, sin), {}),
        ("cos and sin must both be", (x, cos, sin[:4]), {}),
        ("0 < R <= D = 6", (x[..., :6], cos, sin), {}),
        ("positions 1 .. 5 need tables", (x, cos, sin), {"offset": 1}),
        ("positions -1 .. 3 need tables", (x, cos, sin), {"offset": -1}),
        (r"positions must have shape \(5,\) or \(2, 5\)", (x, cos, sin), {"positions": places}),
        ("leave out cu_seqlens and offset", (x[0], cos, sin), {"positions": places, "offset": 2}),
        (r"goes with packed x", (x, cos, sin), {"cu_seqlens": places}),
        (r"one per sequence \(2,\)", (x, cos, sin), {"offset": places[:1]}),
        ("x on cpu", (x, cos.to("meta"), sin.to("meta")), {}),
        ("positions is on meta", (x, cos, sin), {"positions": places.to("meta")}),
        ("the tables get no gradient", (x, cos.clone().requires_grad_(), sin), {}),
    ):
        with pytest.raises(ValueError, match=message):
            rotary(*arguments, **options)
    with pytest.raises(TypeError, match="positions must be int32 or int64"):
        rotary(x, cos, sin, positions=torch.zeros(5))
    with pytest.raises(TypeError, match="cos must be floating point"):
        rotary(x, cos.long(), sin.long())


def test_float64_is_refused_by_the_kernel(interpreter: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        rotary(torch.randn(2, 5, 3, 8).double(), *rotary_tables(8, 5))


def test_tables_of_a_row_each(backend: str, interleaved: bool) -> None:
    """As Hugging Face's models hand them, each angle twice in (B, S, R): equal to the rows' positions."""
    x = torch.randn(2, 5, 3, 16)
    positions = torch.tensor([[0, 3, 9, 2, 2], [7, 1, 0, 0, 5]])
    cos, sin = rotary_tables(12, 10)
    doubled = [torch.cat([t[positions]] * 2, -1)[..., :6] for t in (cos, sin)]
    ours, expected = leaves(x)[0], leaves(x)[0]
    dy = torch.randn(x.shape)
    y = rotary(ours, *doubled, interleaved=interleaved)
    y.backward(dy)
    rotary(expected, cos, sin, interleaved=interleaved, positions=positions).backward(dy)
    assert torch.equal(ours.grad, expected.grad)
    shared = [t[:1] for t in doubled]
    both = rotary(x, *(t.expand(2, 5, 6) for t in shared), interleaved=interleaved)
    assert torch.equal(rotary(x, *shared, interleaved=interleaved), both)
    with pytest.raises(ValueError, match="leave out positions"):
        rotary(x, *doubled, positions=positions)
    with pytest.raises(ValueError, match="of a row each"):
        rotary(x, *(t[:, :4] for t in doubled))


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_llama3_scaling(factor: float) -> None:
    """Llama 3.1's code, branch by branch: dim 128, base 500000, 8192 trained positions."""
    expected = []
    for i in range(64):
        theta = 500000.0 ** (-i / 64)
        wavelength = 2 * math.pi / theta
        if wavelength < 8192 / 4:
            expected.append(theta)
        elif wavelength > 8192:
            expected.append(theta / factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected.append((1 - smooth) * theta / factor + smooth * theta)
    angle = 20000 * torch.tensor(expected, dtype=torch.float64)
    cos, sin = rotary_tables(
        128, 20001, 500000.0, scaling=Llama3Scaling(factor), dtype=torch.float64
    )
    torch.testing.assert_close(cos[20000], angle.cos(), rtol=0, atol=1e-9)
    torch.testing.assert_close(sin[20000], angle.sin(), rtol=0, atol=1e-9)


def test_yarn_scaling() -> None:
    """Pairs that turn 32 times or more keep their frequency, those that turn once are stretched."""
    scaling = YarnScaling(4.0, 4096)
    plain, _ = rotary_tables(64, 2, dtype=torch.float64)
    cos, sin = rotary_tables(64, 2, scaling=scaling, dtype=torch.float64)
    magnitude = 0.1 * math.log(4.0) + 1.0
    torch.testing.assert_close(cos[0], torch.full((32,), magnitude, dtype=torch.float64))
    theta, stretched = plain[1].arccos(), torch.atan2(sin[1], cos[1])
    low = math.floor(64 * math.log(4096 / (64 * math.pi)) / (2 * math.log(10000)))
    high = math.ceil(64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10000)))
    assert 0 < low < high < 31
    torch.testing.assert_close(stretched[: low + 1], theta[: low + 1])
    torch.testing.assert_close(stretched[high:], theta[high:] / 4, rtol=1e-5, atol=1e-9)
    assert ((stretched / theta)[low:high].diff() < 0).all()
    weight = 1 - (low + 1 - low) / (high - low)
    expected = theta[low + 1] * (weight + (1 - weight) / 4)
    torch.testing.assert_close(stretched[low + 1], expected)
    assert YarnScaling(4.0, 4096, attention_factor=1.5).magnitude == 1.5


def test_scalings_refuse_what_makes_no_sense() -> None:
    for make in (
        lambda: Llama3Scaling(0.5),
        lambda: Llama3Scaling(8.0, low_freq_factor=4.0, high_freq_factor=4.0),
        lambda: YarnScaling(4.0, 0),
        lambda: YarnScaling(float("inf"), 4096),
    ):
        with pytest.raises(ValueError, match="needs factor >= 1"):
            make()
