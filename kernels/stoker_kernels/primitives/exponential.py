"""The exponential inside a kernel, in two instructions."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x by the hardware's 2^x, 0 for what would be denormal; ``tl.exp`` rescales those, in 5.

    Give it a difference, ``exp(a - b)``: products folded into a multiply-add would lose a large b's bits.
    """
    return tl.exp2(x * LOG2_E)
