"""Prefix sums and the radix sort against torch's, on every backend."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.ops.scan import prefix_sum, radix_sort, reference
from stoker_kernels.ops.scan.autograd import SORTED
from tests.kernels._numerics import poison_empty

SHAPES = [(1,), (3, 5), (2, 2048), (1, 2049), (2, 3, 4500)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_match_fp64(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, reverse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    poison_empty(monkeypatch)
    x = torch.randn(shape).to(dtype)
    wide = x.double()
    wide = wide.flip(-1).cumsum(-1).flip(-1) if reverse else wide.cumsum(-1)
    y = prefix_sum(x, reverse=reverse)
    assert y.dtype == dtype
    # Every partial sum is one of at most n additions in fp32, then rounded once.
    bound = x.double().abs().cumsum(-1)[..., -1:] * 2**-22 + wide.abs() * torch.finfo(dtype).eps
    assert ((y.double() - wide).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_exact_and_wide(backend: str, dtype: torch.dtype) -> None:
    x = torch.randint(2**30, 2**31 - 1, (2, 2500), dtype=dtype)
    assert torch.equal(prefix_sum(x), x.cumsum(-1))
    assert prefix_sum(x).dtype == torch.int64


def test_many_tiles_are_joined_in_steps(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker_kernels.ops.scan.triton import sums

    monkeypatch.setattr(sums, "TILE", 128)
    monkeypatch.setattr(sums, "JOINED", 8)
    x = torch.randint(-9, 9, (2, 128 * 19 + 5), dtype=torch.int64)
    for reverse in (False, True):
        wanted = x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)
        assert torch.equal(prefix_sum(x, reverse=reverse), wanted)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf - inf
@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_not_finite_reaches_later_sums_alone(interpreter: None, reverse: bool) -> None:
    """Over three tiles; where it lies in the first that is summed, in the last, or in both."""
    inf, nan = float("inf"), float("nan")
    x = torch.ones(6, 5000)
    for row, places in enumerate(({1500: inf}, {1500: nan}, {4500: -inf}, {4500: nan})):
        for place, value in places.items():
            x[row, place] = value
    x[4, 1500], x[4, 4500] = inf, -inf
    wanted = reference.prefix_sum(x, reverse)
    torch.testing.assert_close(
        prefix_sum(x, reverse=reverse), wanted, rtol=0, atol=0, equal_nan=True
    )


def test_gradients() -> None:
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(prefix_sum, (x,))
    assert torch.autograd.gradcheck(lambda x: prefix_sum(x, reverse=True), (x,))


def draw(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of all sizes, many of them equal; floats with NaN of both signs, infinities and both zeros."""
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        far = torch.randint(ends.min, ends.max, shape, dtype=dtype)
        near = torch.randint(0, 4, shape, dtype=dtype)
        return torch.where(torch.rand(shape) < 0.5, far, near)
    x = torch.randn(shape) * 10.0 ** torch.randint(-4, 5, shape)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0])
    special = torch.cat([special, special.new_tensor([-float("nan")])])
    drawn = special[torch.randint(0, len(special), shape)]
    return torch.where(torch.rand(shape) < 0.5, x, drawn).to(dtype)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", list(SORTED))
def test_sorts_as_a_stable_torch_sort(
    backend: str, dtype: torch.dtype, descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    for shape in ((1,), (3, 512), (2, 1100)):
        x = draw(dtype, shape)
        before = x.clone()
        values, indices = radix_sort(x, descending=descending)
        wanted, places = torch.sort(x, dim=-1, descending=descending, stable=True)
        assert torch.equal(indices, places)
        torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_empty_and_strided(backend: str) -> None:
    for shape in ((0,), (3, 0), (0, 5)):
        assert prefix_sum(torch.zeros(shape)).shape == shape
        values, indices = radix_sort(torch.zeros(shape))
        assert values.shape == indices.shape == shape
    x = torch.randn(40, 6).T[:, ::2]
    assert torch.equal(radix_sort(x)[1], torch.sort(x, stable=True).indices)
    torch.testing.assert_close(prefix_sum(x), x.cumsum(-1))


def test_a_sorts_gradient_goes_where_the_value_came_from(backend: str) -> None:
    x = torch.randn(3, 50, requires_grad=True)
    values, indices = radix_sort(x)
    weight = torch.arange(50.0).expand(3, 50)
    values.backward(weight)
    assert x.grad is not None
    assert torch.equal(x.grad.gather(1, indices), weight)


def test_errors() -> None:
    with pytest.raises(ValueError, match="prefix_sum: x must be one of float32"):
        prefix_sum(torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="radix_sort: x must be one of float32"):
        radix_sort(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="must have a last dimension"):
        prefix_sum(torch.zeros(()))
