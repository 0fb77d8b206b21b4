"""The kernels' random bits and PyTorch's are the same numbers, and drop what they should."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.primitives.philox import draw_seed, keep_mask, philox4x32, threshold_of


def test_known_answers() -> None:
    """The vectors published with Random123 for philox4x32-10."""
    zero = philox4x32(0, torch.tensor([0]))
    assert zero[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_kernel_draws_the_same_mask(interpreter: None) -> None:
    from stoker_kernels.primitives.dropout import keep_mask_kernel

    seed, rows, columns = torch.tensor([2**40 + 12345]), 5, 21
    out = torch.full((rows, columns), -1, dtype=torch.int32)
    keep_mask_kernel[(1,)](seed, out, rows, columns, threshold_of(0.3, "p"), BLOCK_M=8, BLOCK_N=16)
    assert torch.equal(out.bool(), keep_mask(seed, rows, columns, threshold_of(0.3, "p")))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_drops_at_the_asked_rate(p: float) -> None:
    n = 40_000
    kept = keep_mask(torch.tensor([3]), 200, 200, threshold_of(p, "p")).sum().item()
    assert abs(kept - n * (1 - p)) <= 5 * (n * p * (1 - p)) ** 0.5


def test_seeds_follow_torch() -> None:
    torch.manual_seed(5)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(first, draw_seed(torch.device("cpu")))
    assert not torch.equal(first, second)


def test_bad_probabilities() -> None:
    with pytest.raises(ValueError, match=r"dropout_p must be a probability in \[0, 1\], got 1.5"):
        threshold_of(1.5, "dropout_p")
