"""SiLU and GELU inside a kernel: value and slope in fp32, from exp2 and one reciprocal, no libdevice.

Used by ``ops/glu`` and ``ops/bias_gelu``. Every form is written so that nothing cancels and nothing
overflows to NaN for finite inputs: ``1 - sigmoid(z)`` is never taken as a difference, tanh never formed:
    silu(x)       = x * sigmoid(x)
    gelu_tanh(x)  = x * (1 + tanh(z / 2)) / 2 = x * sigmoid(z),  z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
    gelu_erf(x)   = x * Phi(x),  Phi the normal distribution function
    slope of x * sigmoid(z(x)) = sigmoid(z) + x z'(x) sigmoid(z) sigmoid(-z)
    slope of x * Phi(x)        = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
For x <= 0, Phi(x) = exp(-x^2 / 2) * t * P(t) with t = 1 / (1 + 0.33 |x|) and P of degree 6: the form of
Abramowitz & Stegun 7.1.26, fitted anew (weighted least squares against 50-digit erfc on [0, 14]) to an
absolute error of 4e-9. It keeps its relative precision in the tail, where 1 + erf has none left, and
costs half the instructions of an erf. GELU: Hendrycks & Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
TANH_LINEAR = tl.constexpr(1.5957691216057308)  # z = LINEAR x + CUBIC x^3
TANH_CUBIC = tl.constexpr(0.07135481627260025)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _sigmoid(z):
    """Saturates to 0 and 1: exp2 may overflow to inf, whose reciprocal is 0."""
    return 1.0 / (1.0 + tl.exp2(z * -LOG2_E))


@triton.jit
def _sigmoid_and_slope(z):
    """sigmoid(z) and sigmoid(z) sigmoid(-z), both relatively precise for either sign of z."""
    e = tl.exp2(tl.abs(z) * -LOG2_E)  # in (0, 1]
    r = 1.0 / (1.0 + e)
    return tl.where(z >= 0, r, e * r), e * r * r


@triton.jit
def _normal(x):
    """Phi(x) and exp(-x^2 / 2)."""
    bell = tl.exp2(x * x * (-0.5 * LOG2_E))
    t = 1.0 / (1.0 + 0.33 * tl.abs(x))
    p = 0.04479498666307542 * t - 0.2169678039459336
    p = p * t + 0.3240386059939438
    p = p * t - 0.08172932869829144
    p = p * t + 0.1765994868594334
    p = p * t + 0.12082064639465381
    p = p * t + 0.1324434107623418
    tail = p * t * bell
    return tl.where(x >= 0, 1.0 - tail, tail), bell


@triton.jit
def activate(x, KIND: tl.constexpr):
    """x fp32 -> its activation; KIND is "silu", "gelu_tanh" or "gelu_erf"."""
    tl.static_assert(KIND == "silu" or KIND == "gelu_tanh" or KIND == "gelu_erf")
    if KIND == "silu":
        y = x * _sigmoid(x)
    elif KIND == "gelu_tanh":
        y = x * _sigmoid(x * (TANH_LINEAR + TANH_CUBIC * x * x))
    else:
        phi, _ = _normal(x)
        y = x * phi
    return y


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr):
    """x fp32 -> its activation and the derivative there."""
    tl.static_assert(KIND == "silu" or KIND == "gelu_tanh" or KIND == "gelu_erf")
    if KIND == "silu":
        s, ds = _sigmoid_and_slope(x)
        slope = s + x * ds
    elif KIND == "gelu_tanh":
        s, ds = _sigmoid_and_slope(x * (TANH_LINEAR + TANH_CUBIC * x * x))
        # Past |x| = 11 ds is 0 while x z' may have overflowed: inf * 0 is no slope.
        slope = s + tl.where(ds > 0, x * (TANH_LINEAR + 3 * TANH_CUBIC * x * x) * ds, 0.0)
    else:
        s, bell = _normal(x)
        slope = s + x * bell * INVERSE_SQRT_2PI
    return x * s, slope
