"""1-bit compression on the GPU, in one pass each way, no atomics.

A program holds ROWS blocks as [ROWS, 32 words, 32 bits]. Bytes moved per value: compress b + 8 + 1/8
(gradient of b bytes read, error read and written, bits written), decompress b + W/8 for the messages
of W workers; scales add 1/256. Formulas: see ``reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.onebit.reference import BLOCK, WORD
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import launch
from stoker_kernels.tuning import Config, choose

WORDS = BLOCK // WORD
DEFAULT: Config = {"ROWS": 2, "num_warps": 4}
CANDIDATES: list[Config] = [
    {"ROWS": rows, "num_warps": warps}
    for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (4, 8))
]


@triton.jit
def tile_offsets(ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Places of this program's values: [ROWS, WORDS, 32] int64."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return block[:, None, None] * (WORDS * 32) + place[None, :, :]


@triton.jit
def onebit_compress_kernel(
    gradient_ptr, error_ptr, words_ptr, scales_ptr, n, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    offset = tile_offsets(ROWS, WORDS)  # [R, W, 32]
    inside = offset < n
    error = tl.load(error_ptr + offset, mask=inside, other=0.0)
    u = tl.load(gradient_ptr + offset, mask=inside, other=0.0).to(tl.float32) + error
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    count = tl.minimum(n - block * (WORDS * 32), WORDS * 32)  # values of a block; <= 0 past the end
    scale = tl.sum(tl.sum(tl.abs(u), 2), 1) / tl.maximum(count, 1).to(tl.float32)  # [R]
    tl.store(scales_ptr + block, scale, mask=count > 0)
    positive = u >= 0
    scales = scale[:, None, None]
    rest = u - tl.where(positive, scales, -scales)
    tl.store(error_ptr + offset, tl.where(scales < float("inf"), rest, error), mask=inside)
    lane = tl.arange(0, 32)[None, None, :]
    words = tl.sum((positive & inside).to(tl.int32) << lane, 2)  # [R, W], every bit its own lane
    word = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(words_ptr + word, words, mask=word * 32 < n)


@triton.jit(do_not_specialize=["workers"])
def onebit_decompress_kernel(
    words_ptr, scales_ptr, out_ptr, n, workers, stride_words, stride_scales,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    offset = tile_offsets(ROWS, WORDS)  # [R, W, 32]
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    word = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]  # [R, W]
    lane = tl.arange(0, 32)[None, None, :]
    total = tl.zeros([ROWS, WORDS, 32], dtype=tl.float32)
    for worker in range(workers):
        row = tl.cast(worker, tl.int64)
        words = tl.load(words_ptr + row * stride_words + word, mask=word * 32 < n, other=0)
        scale = tl.load(
            scales_ptr + row * stride_scales + block, mask=block * (WORDS * 32) < n, other=0.0
        )[:, None, None]
        total += tl.where(((words[:, :, None] >> lane) & 1) != 0, scale, -scale)
    mean = total / workers
    tl.store(out_ptr + offset, mean.to(out_ptr.dtype.element_ty), mask=offset < n)


def compress(gradient: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.compress`` on the GPU; ``gradient`` and ``error`` are contiguous."""
    n = gradient.numel()
    words = error.new_empty(cdiv(n, WORD), dtype=torch.int32)
    scales = error.new_empty(cdiv(n, BLOCK))
    config = choose("onebit_compress", DEFAULT, lambda: CANDIDATES, dtype=gradient.dtype)
    launch(
        onebit_compress_kernel, (cdiv(n, BLOCK * config["ROWS"]),),
        gradient, error, words, scales, n, WORDS=WORDS, on=gradient, **config,
    )  # fmt: skip
    return words, scales


def decompress(
    words: torch.Tensor, scales: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute ``reference.decompress`` on the GPU."""
    out = scales.new_empty(n, dtype=dtype)
    config = choose("onebit_decompress", DEFAULT, lambda: CANDIDATES, dtype=dtype)
    launch(
        onebit_decompress_kernel, (cdiv(n, BLOCK * config["ROWS"]),),
        words, scales, out, n, words.shape[0], words.stride(0), scales.stride(0),
        WORDS=WORDS, on=out, **config,
    )  # fmt: skip
    return out
