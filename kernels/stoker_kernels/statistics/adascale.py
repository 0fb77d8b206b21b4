"""AdaScale: how much a step over a larger batch is worth, from the gradient's noise.

Formulas (Johnson et al. 2020, "AdaScale SGD"). The base run has batches of B0 examples, this one of
B = S * B0. With sigma^2 = tr(Sigma) / B0 the variance of a base gradient and mu^2 = |G|^2:
    gain   r_t = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), between 1 (no noise) and S (all noise)
    step   eta_t = r_t * eta(floor(tau_t)),  tau_{t+1} = tau_t + r_t
eta is the base run's schedule; tau counts its iterations, so a run ends at the same tau for every S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stoker_kernels.statistics.noise_scale import GradientNoiseScale


def statistical_efficiency(
    noise_scale: torch.Tensor | float, base_batch: float, batch: float
) -> torch.Tensor:
    """Return the progress per example at ``batch`` against ``base_batch``, in (0, 1] for batch >= base_batch.

    (phi + B0) / (phi + B) with the noise scale phi, all in examples (Qiao et al., "Pollux", OSDI 2021,
    eq. 7). Times examples per second it is the goodput. It equals AdaScale's gain * B0 / B.
    """
    phi = torch.as_tensor(noise_scale, dtype=torch.float64)
    return torch.where(phi.isinf(), 1.0, (phi + base_batch) / (phi + batch))


class AdaScale:
    """The gain of every step, and the iterations of the base run done so far.

    ``noise`` holds the smoothed statistics (the paper's decay: max(0, 1 - S / 1000) a step, which
    ``GradientNoiseScale(decay=1 - 1 / 1000, base_batch=base_batch)`` is to first order). A step::

        counted = ada.update(small, big, small_batch=b, big_batch=n * b)
        lr = ada.gain * schedule(iteration)        # a tensor: nothing waits

    ``tau`` lies on the device; :meth:`lr` reads it, and so waits, because a Python schedule needs a
    number. A step that is not finite is no progress. Before the first finite one the gain is 1.
    """

    def __init__(self, noise: GradientNoiseScale, base_batch: float) -> None:
        if not base_batch > 0:
            raise ValueError(f"AdaScale: base_batch must be positive, got {base_batch}")
        self.noise, self.base_batch = noise, base_batch
        self.gain = torch.ones((), dtype=torch.float64, device=noise.skipped.device)
        self.tau = torch.zeros_like(self.gain)

    @torch.no_grad()
    def update(
        self,
        small: torch.Tensor | float,
        big: torch.Tensor | float,
        *,
        small_batch: float,
        big_batch: float,
    ) -> torch.Tensor:
        """Add one step of ``big_batch`` examples (see ``GradientNoiseScale.update``): sets gain and tau."""
        counted = self.noise.update(small, big, small_batch=small_batch, big_batch=big_batch)
        self.gain.copy_(torch.where(counted, self.gain_at(big_batch), self.gain))
        self.tau += torch.where(counted, self.gain, 0.0)
        return counted

    def gain_at(self, batch: float) -> torch.Tensor:
        """Return the gain of a step over ``batch`` examples now, in [1, S], S = batch / base_batch.

        Below the base batch it is smaller than 1: between S and 1.
        """
        scale = batch / self.base_batch
        variance = (self.noise.noise / self.base_batch).clamp(min=0.0)  # estimates may be negative
        mean_square = self.noise.signal.clamp(min=0.0)
        below = variance / scale + mean_square
        gain = torch.where(below > 0.0, (variance + mean_square) / below, 1.0)
        return gain.clamp(min(1.0, scale), max(1.0, scale))

    def lr(self, schedule: Callable[[int], float]) -> float:
        """Return gain * schedule(floor(tau)), the next step's learning rate; waits for the device."""
        return float(self.gain) * schedule(int(self.tau))

    def state_dict(self) -> dict[str, Any]:
        """Return gain, tau, and the statistics beneath."""
        return {
            "gain": self.gain.clone(),
            "tau": self.tau.clone(),
            "noise": self.noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.gain.copy_(state["gain"])
        self.tau.copy_(state["tau"])
        self.noise.load_state_dict(state["noise"])
