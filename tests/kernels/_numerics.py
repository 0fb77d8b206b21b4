"""How close is close enough: one rule for every kernel test, no tolerance chosen by hand.

The oracle is PyTorch in fp64; the witness is plain PyTorch in the tested dtype. Two checks, both:
* FlashAttention's rule: max|kernel - oracle| <= 2 * max|witness - oracle| + atol, where atol is the
  rounding of the dtype at the oracle's size, 2 * max|(oracle + 0.3 - 0.3) - oracle|. It calibrates
  itself to shape and magnitude.
* RMS(kernel - oracle) / RMS(oracle) below a bound per dtype: it sees a small bias the maximum hides.
  Where cancellation leaves the oracle near zero, twice the witness's RMS error or one
  epsilon of the summands is the bound instead.
"""

from __future__ import annotations

import torch

# The interpreter truncates to bf16 instead of rounding: up to one ulp (2^-8), twice the GPU's error.
RMS_RATIO = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


def assert_close(
    kernel: torch.Tensor,
    witness: torch.Tensor,
    oracle: torch.Tensor,
    what: str = "output",
    terms: float = 1.0,
) -> None:
    """Both rules, on all elements; ``kernel`` and ``witness`` share a dtype, ``oracle`` is fp64.

    ``terms`` bounds the summands that cancel in the result: no fp32 sum of them is nearer than about
    one epsilon of that, though a witness that sums in another order may be exact by luck.
    """
    assert kernel.shape == oracle.shape, f"{what}: shape {kernel.shape}, expected {oracle.shape}"
    assert oracle.dtype == torch.float64
    if not oracle.numel():
        return
    dtype = kernel.dtype
    actual = kernel.detach().double().cpu()
    oracle = oracle.detach().cpu()
    assert actual.isfinite().all(), f"{what}: non-finite values where the oracle has none"
    error = (actual - oracle).abs().max().item()
    allowed_by = (witness.detach().double().cpu() - oracle).abs().max().item()
    stored = oracle.to(dtype)
    epsilon = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    atol = 2 * ((stored + 0.3 - 0.3).double() - oracle).abs().max().item() + epsilon * terms
    if dtype == torch.bfloat16 and kernel.device.type == "cpu":
        atol += 2**-7 * oracle.abs().max().item()  # the interpreter truncates: one ulp, not half
    assert error <= 2 * allowed_by + atol, (
        f"{what}: max error {error:.3e} > 2 * {allowed_by:.3e} + {atol:.3e} ({dtype})"
    )
    scale = oracle.square().mean().sqrt().item()
    rms = (actual - oracle).square().mean().sqrt().item()
    witness_rms = (witness.detach().double().cpu() - oracle).square().mean().sqrt().item()
    bound = max(RMS_RATIO[dtype] * scale, 2 * witness_rms, epsilon * terms)
    assert rms <= bound, f"{what}: RMS error {rms:.3e} of {scale:.3e}, bound {bound:.3e} ({dtype})"


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Detached copies that require gradients, in ``dtype``."""
    return [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


def poison_empty(monkeypatch: object) -> None:
    """Make every new_empty buffer start as NaN, so an output lane nobody wrote shows."""
    original = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = original(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)  # type: ignore[attr-defined]
