"""The kernels' random bits and PyTorch's are the same numbers, and drop what they should."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.primitives.philox import (
    draw_seed,
    draw_seeds,
    keep_mask,
    keep_scale_of,
    philox4x32,
    threshold_of,
)


def test_known_answers() -> None:
    """The vectors published with Random123 for philox4x32-7 and -10."""
    zero = torch.tensor([0])
    assert philox4x32(0, zero)[0].tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ten = philox4x32(0, zero, 10)
    assert ten[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("p", [0.3, 2**-16, 1 - 2**-16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("seed", [2**40 + 12345, 2**62 - 1])
def test_the_kernel_draws_the_same_mask(interpreter: None, seed: int, wide: bool, p: float) -> None:
    from stoker_kernels.primitives.dropout import keep_mask_kernel

    rows, columns, threshold = 5, 21, threshold_of(p, "p")
    out = torch.full((rows, columns), -1, dtype=torch.int32)
    keep_mask_kernel[(1,)](
        torch.tensor([seed]),
        out,
        rows,
        columns,
        threshold,
        BLOCK_M=8,
        BLOCK_N=16,
        WIDE=wide,
    )
    assert torch.equal(out.bool(), keep_mask(torch.tensor([seed]), rows, columns, threshold))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_drops_at_the_asked_rate(p: float) -> None:
    n = 40_000
    kept = keep_mask(torch.tensor([3]), 200, 200, threshold_of(p, "p")).sum().item()
    assert abs(kept - n * (1 - p)) <= 5 * (n * p * (1 - p)) ** 0.5


def test_neighbours_are_independent() -> None:
    """Also the halves of one word, and places that share a counter."""
    mask = keep_mask(torch.tensor([7]), 2000, 64, threshold_of(0.5, "p")).float() - 0.5
    correlation = mask.T @ mask / 2000 * 4 - torch.eye(64)
    assert correlation.abs().max() < 6 / 2000**0.5


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 1 / 3, 0.9, 1 - 1e-9, 1.0])
def test_the_scale_is_exact_for_the_probability_taken(p: float) -> None:
    threshold = threshold_of(p, "p")
    assert abs(threshold / 2**16 - p) <= 2**-16
    assert (threshold == 2**16) == (p == 1.0)
    kept = (2**16 - threshold) / 2**16
    assert keep_scale_of(p) * kept == pytest.approx(1.0 if p < 1 else 0.0, abs=1e-15)


def test_seeds_follow_torch() -> None:
    torch.manual_seed(5)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(first, draw_seed(torch.device("cpu")))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    many = draw_seeds(torch.device("cpu"), 3)
    assert len({seed.item() for seed in many}) == 3
    assert all(seed.shape == (1,) and seed.dtype == torch.int64 for seed in many)


def test_bad_probabilities() -> None:
    with pytest.raises(ValueError, match=r"dropout_p must be a probability in \[0, 1\], got 1.5"):
        threshold_of(1.5, "dropout_p")
