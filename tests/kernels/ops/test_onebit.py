"""1-bit messages: every backend against the definition in fp64."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from stoker_kernels.ops.onebit import BLOCK, onebit_compress, onebit_decompress, reference
from tests.kernels._numerics import assert_close, poison_empty
from tests.kernels.ops._far_apart import far_apart, sparse, start_at_program

if TYPE_CHECKING:
    from pathlib import Path


def bits_of(words: torch.Tensor, n: int) -> torch.Tensor:
    """Unpack by Python's integers: independent of the shifts under test."""
    text = "".join(format(word & 0xFFFFFFFF, "032b")[::-1] for word in words.tolist())
    return torch.tensor([c == "1" for c in text[:n]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 31, 33, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_message_and_error_match_fp64(
    backend: str, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    gradient, error = torch.randn(n).to(dtype), torch.randn(n)
    u = gradient.double() + error.double()
    scales = torch.stack([block.abs().mean() for block in u.split(BLOCK)])
    q = torch.where(u >= 0, 1.0, -1.0) * scales.repeat_interleave(BLOCK)[:n]
    after = error.clone()
    words, got = onebit_compress(gradient, after)
    assert (words.shape, words.dtype) == ((-(-n // 32),), torch.int32)
    assert torch.equal(bits_of(words, n), u >= 0)
    assert not bits_of(words, 32 * len(words))[n:].any()
    assert_close(got, scales.float(), scales, "scales")
    assert_close(after, (u - q).float(), u - q, "error", terms=4 * u.abs().max().item())
    mean = onebit_decompress(torch.stack([words, words]), torch.stack([got, 3 * got]), n, dtype)
    assert_close(mean, (2 * q).to(dtype), 2 * q, "mean of two", terms=4 * scales.max().item())


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
def test_conserves_at_every_magnitude(backend: str, magnitude: float) -> None:
    gradient, error = torch.randn(2000) * magnitude, torch.randn(2000) * magnitude
    before = gradient.double() + error
    words, scales = onebit_compress(gradient, error)
    sent = onebit_decompress(words[None], scales[None], 2000)
    torch.testing.assert_close(sent.double() + error, before, rtol=0, atol=3e-7 * 5 * magnitude)


def test_blocks_do_not_touch_each_other(backend: str) -> None:
    """A NaN makes its own block's scale NaN and leaves that block's error; others go on."""
    gradient, error = torch.randn(3 * BLOCK), torch.randn(3 * BLOCK)
    gradient[BLOCK + 7] = float("nan")
    before = error.clone()
    words, scales = onebit_compress(gradient, error)
    assert scales.isfinite().tolist() == [True, False, True]
    assert torch.equal(error[BLOCK : 2 * BLOCK], before[BLOCK : 2 * BLOCK])
    assert error.isfinite().all()
    assert not torch.equal(error[:BLOCK], before[:BLOCK])
    sent = onebit_decompress(words[None], scales[None], 3 * BLOCK)
    assert sent.isfinite().view(3, BLOCK).all(1).tolist() == [True, False, True]


def test_strided_gradient_is_left_alone_and_empty_ones_pass(backend: str) -> None:
    gradient = torch.randn(30, 40).t()
    untouched = gradient.clone()
    errors = torch.zeros(1200), torch.zeros(1200)
    a = onebit_compress(gradient, errors[0])
    b = onebit_compress(gradient.contiguous(), errors[1])
    assert torch.equal(a[0], b[0])
    assert torch.equal(errors[0], errors[1])
    assert torch.equal(gradient, untouched)
    onebit_compress(torch.ones(()).expand(40, 30), errors[0])  # stride 0
    words, scales = onebit_compress(torch.zeros(0), torch.zeros(0))
    assert words.numel() == scales.numel() == 0
    assert onebit_decompress(words[None], scales[None], 0).shape == (0,)


def test_wrong_buffers_are_refused() -> None:
    for error in (torch.zeros(5), torch.zeros(4).bfloat16(), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="error must be contiguous, of shape"):
            onebit_compress(torch.zeros(4), error)
    words, scales = onebit_compress(torch.zeros(40), torch.zeros(40))
    with pytest.raises(ValueError, match=r"words must be \(W, 2\) for 40 values"):
        onebit_decompress(words, scales[None], 40)
    with pytest.raises(ValueError, match=r"scales must be \(1, 1\) for 40 values"):
        onebit_decompress(words[None], scales, 40)


def test_blocks_past_2_to_the_31_values(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the last block alone, on a gradient of 2^31 values and some."""
    kernels = import_module("stoker_kernels.ops.onebit.triton")
    rows, rest = {"ROWS": 1, "WORDS": kernels.WORDS}, 1000
    n = 2**31 + rest
    gradient, error, out = (sparse(tmp_path, n) for _ in range(3))
    gradient[-rest:], error[-rest:] = torch.randn(rest), torch.randn(rest)
    expected_error = error[-rest:].clone()
    expected = reference.compress(gradient[-rest:], expected_error)
    words, scales = sparse(tmp_path, -(-n // 32), torch.int32), sparse(tmp_path, -(-n // BLOCK))
    start_at_program(monkeypatch, 2**31 // BLOCK)
    kernels.launch(
        kernels.onebit_compress_kernel, (1,), gradient, error, words, scales, n, on=error, **rows
    )
    assert torch.equal(words[2**26 :], expected[0])
    torch.testing.assert_close(scales[2**21 :], expected[1])
    torch.testing.assert_close(error[-rest:], expected_error)
    kernels.launch(
        kernels.onebit_decompress_kernel, (1,), words, scales, out, n, 1, 0, 0, on=out, **rows
    )
    sent = reference.decompress(expected[0][None], expected[1][None], rest, torch.float32)
    torch.testing.assert_close(out[-rest:], sent)


def test_messages_further_apart_than_2_to_the_31(interpreter: None, tmp_path: Path) -> None:
    words, scales = (
        torch.stack(part)
        for part in zip(
            *(onebit_compress(torch.randn(500), torch.zeros(500)) for _ in range(3)), strict=True
        )
    )
    kernels = import_module("stoker_kernels.ops.onebit.triton")
    (tmp_path / "words").mkdir()
    (tmp_path / "scales").mkdir()
    got = kernels.decompress(
        far_apart(words, 0, tmp_path / "words"), far_apart(scales, 0, tmp_path / "scales"), 500,
        torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(got, reference.decompress(words, scales, 500, torch.float32))
