"""SiLU and GELU inside a kernel: value and slope in fp32, in few enough instructions to stay memory-bound.

Used by ``ops/glu`` and ``ops/bias_gelu``. At 4 bytes of bf16 traffic per value an H200 leaves a kernel
about 25 instructions each, so there is no division, no libdevice, no tanh and no erf:
    silu(x)      = x * sigmoid(x)
    gelu_tanh(x) = x * (1 + tanh(z / 2)) / 2 = x * sigmoid(z),  z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
    gelu_erf(x)  = x * Phi(x) = max(x, 0) - |x| Phi(-|x|),  Phi the normal distribution function
    slope of x * sigmoid(z(x)) = sigmoid(z) + x z'(x) sigmoid(z) sigmoid(-z)
    slope of x * Phi(x)        = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
Nothing cancels (1 - sigmoid is never taken as a difference) and no finite input gives NaN by overflow.
log2 Phi(-a) is a polynomial of degree 8 in a, fitted on [0, 13.5] against 50-digit erfc by iteratively
weighted least squares to an absolute error of 6.3e-8 in Phi, half an fp32 epsilon; from 13.5 on Phi(-a)
is 0 in fp32. GELU: Hendrycks & Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
TANH_LINEAR = tl.constexpr(1.5957691216057308)  # z = LINEAR x + CUBIC x^3
TANH_CUBIC = tl.constexpr(0.07135481627260025)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _reciprocal(d):
    """1 / d for d >= 1, 0 for inf: a division would rescale d first, four instructions more."""
    r = tl.rsqrt(d)
    return r * r


@triton.jit
def _sigmoid_pair(z):
    """sigmoid(z) and sigmoid(z) sigmoid(-z), both relatively precise for either sign of z."""
    e = tl.exp2(tl.abs(z) * -LOG2_E)  # in [0, 1]
    r = _reciprocal(1.0 + e)
    small = e * r
    return tl.where(z >= 0, r, small), small * r


@triton.jit
def _normal_tail(x):
    """a = |x| up to 13.5, and Phi(-a); a NaN stays one."""
    a = tl.minimum(tl.abs(x), 13.5, propagate_nan=tl.PropagateNan.ALL)
    p = -6.30893349e-07 * a + 1.36773883e-05
    p = p * a - 6.77297544e-05
    p = p * a - 4.13376794e-04
    p = p * a + 7.41096982e-03
    p = p * a - 5.27271361e-02
    p = p * a - 4.59134595e-01
    p = p * a - 1.15111402
    p = p * a - 0.999999819
    return a, tl.exp2(p)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """x fp32 -> its activation; KIND is "silu", "gelu_tanh" or "gelu_erf"."""
    tl.static_assert(KIND == "silu" or KIND == "gelu_tanh" or KIND == "gelu_erf")
    if KIND == "gelu_erf":
        a, tail = _normal_tail(x)
        y = tl.maximum(x, 0.0) - a * tail
    else:
        if KIND == "silu":
            power = x * -LOG2_E  # exp2 of it may be inf: x / inf is 0
        else:
            power = x * (-LOG2_E * TANH_LINEAR + (-LOG2_E * TANH_CUBIC) * (x * x))
        y = x * _reciprocal(1.0 + tl.exp2(power))
    return y


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr):
    """x fp32 -> its activation and the derivative there."""
    tl.static_assert(KIND == "silu" or KIND == "gelu_tanh" or KIND == "gelu_erf")
    if KIND == "gelu_erf":
        a, tail = _normal_tail(x)
        bell = tl.exp2(x * x * (-0.5 * LOG2_E))
        y = tl.maximum(x, 0.0) - a * tail
        slope = tl.where(x >= 0, 1.0 - tail, tail) + x * bell * INVERSE_SQRT_2PI
    elif KIND == "silu":
        s, ds = _sigmoid_pair(x)
        y = x * s
        slope = s + x * ds
    else:
        square = tl.minimum(x * x, 1e30)  # past |x| = 11 ds is 0, and 0 * inf would be NaN
        s, ds = _sigmoid_pair(x * (TANH_LINEAR + TANH_CUBIC * square))
        y = x * s
        slope = s + (x * ds) * (TANH_LINEAR + (3 * TANH_CUBIC) * square)
    return y, slope
