"""fp8 products in PyTorch: the specification, and the CPU implementation.

A group of values shares a scale, the largest of them mapped to the format's largest number (448 for e4m3,
57344 for e5m2):
    scale = max(largest |x|, 2^-100) / limit,   q = fp8(x / scale),   x is about q * scale
Groups, by ``scaling``:
    "row"    a whole row along the inner dimension: a token of x, an output channel of W
    "block"  128 values of a row of x, 128 by 128 values of W (DeepSeek-V3, arXiv 2412.19437, 3.3.2)
    y  = dequantised x (e4m3) times dequantised W (e4m3)^T + b,  summed in fp32, rounded once
    dx = dequantised dy (e5m2) times dequantised W (e4m3, grouped along N)
    dW = dy^T x,  db = sum over rows of dy: in the dtype of x, as the sum over tokens is the longest and
         an optimizer's steps keep its errors (torchao's recipe "rowwise_with_gw_hp")
Error: rounding to e4m3 is within 2^-4 of a value, to e5m2 within 2^-3, or for values far below their
group's largest within scale / 2 of the last place, 2^-10 and 2^-17. So |y - exact| <= (2^-3 + 2^-8) sum |x w|
for e4m3 twice, and <= (2^-3 + 2^-4 + 2^-7) sum |dy w| for the gradient, and what the small values add.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype

BLOCK = 128
SMALLEST = 2.0**-100  # of a group's largest value: zeros have a scale too
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(
    values: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map values to fp8 of their shape, and the scale of each group; ``dims`` are a group's, kept as 1."""
    limit = torch.finfo(dtype).max
    largest = values.abs().amax(dims, keepdim=True).clamp(min=SMALLEST)
    return (values * (limit / largest)).clamp(-limit, limit).to(dtype), largest / limit


def rounded(
    values: torch.Tensor, rows_of_group: int, columns_of_group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Quantise values (R, C) in groups and return them dequantised; the last groups may be smaller."""
    rows, columns = values.shape
    down, across = -rows % rows_of_group, -columns % columns_of_group
    padded = torch.nn.functional.pad(values, (0, across, 0, down))
    grouped = padded.unflatten(1, (-1, columns_of_group)).unflatten(0, (-1, rows_of_group))
    q, scale = quantize(grouped, (1, 3), dtype)
    return (q.to(values.dtype) * scale).view(padded.shape)[:rows, :columns]


def operands(
    a: torch.Tensor, b: torch.Tensor, scaling: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a (R, C) of ``dtype`` and b (N, C) of e4m3 as the product sees them."""
    length = BLOCK if scaling == "block" else max(1, a.shape[1])
    return (
        rounded(a, 1, length, dtype),
        rounded(b, BLOCK if scaling == "block" else 1, length, FORWARD),
    )


def fp8_linear_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str
) -> torch.Tensor:
    """Map x (..., K), weight (N, K), bias (N,) -> y (..., N) in x's dtype."""
    wide = compute_dtype(x.dtype)
    rows = x.to(wide).reshape(-1, x.shape[-1])
    a, b = operands(rows, weight.to(wide), scaling, FORWARD)
    y = a @ b.t()
    if bias is not None:
        y += bias
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def fp8_linear_dx(dy: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
    """Map dy (..., N), weight (N, K) -> dx (..., K) in weight's dtype."""
    wide = compute_dtype(weight.dtype)
    rows = dy.to(wide).reshape(dy.shape[:-1].numel(), dy.shape[-1])
    a, b = operands(rows, weight.to(wide).t(), scaling, GRADIENT)
    return (a @ b.t()).to(weight.dtype).view(*dy.shape[:-1], weight.shape[1])
