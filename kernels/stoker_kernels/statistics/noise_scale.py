"""The gradient noise scale tr(Sigma) / |G|^2 in examples: the batch beyond which more adds little.

Formulas (McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1). G is the
true gradient, Sigma the covariance of one example's gradient. The mean over a batch of B examples has
    E |g_B|^2 = |G|^2 + tr(Sigma) / B
so two batch sizes give two equations, and their solution is unbiased:
    |G|^2     = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
    tr(Sigma) = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)

n replicas (or accumulated micro-batches) of b examples each are the case B_small = b, B_big = n b with
|g_small|^2 the mean of the |g_i|^2 and g_big = mean(g_i) the averaged gradient:
    |G|^2     = (n |g_big|^2 - mean |g_i|^2) / (n - 1)
    tr(Sigma) = (mean |g_i|^2 - |g_big|^2) * n b / (n - 1)
tr(Sigma) is per example: the scale n b is the whole batch. A single estimate is so noisy that it may be
negative, and a quotient of noisy numbers is biased, so numerator and denominator are smoothed first.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

N = TypeVar("N", torch.Tensor, float)


def estimate(small: N, big: N, small_batch: float, big_batch: float) -> tuple[N, N]:
    """Estimate (|G|^2, tr(Sigma)), unbiased, from one pair of |g|^2 of two batch sizes, elementwise.

    Raises ``ValueError`` unless 0 < small_batch < big_batch.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"gradient noise needs 0 < small_batch < big_batch, got {small_batch} and {big_batch}: "
            f"with one replica, accumulate at least two micro-batches"
        )
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1.0 / small_batch - 1.0 / big_batch)
    return signal, noise


class GradientNoiseScale:
    """Smoothed |G|^2 and tr(Sigma) by parameter group, from two square sums of every step.

    With ``torch.distributed`` and n replicas of b examples, a step is::

        small = square_sums(g["params"] for g in optimizer.param_groups)  # of this replica's gradient
        ...                                # average the gradients
        dist.all_reduce(small)
        optimizer.step()
        big = optimizer_square_sums(optimizer)  # or square_sums again, for an optimizer of torch
        noise.update(small / n, big, small_batch=b, big_batch=n * b)

    Batch sizes may change from step to step: what is smoothed does not depend on them. ``decay`` is per
    ``base_batch`` examples when that is given (a step of k * base_batch counts as k), else per step. A
    step with a value that is not finite changes nothing but ``skipped``. ``update`` launches a few tiny
    kernels and never waits for the device (``device`` is where the square sums are); reading a property
    as a number does.
    """

    def __init__(
        self,
        groups: int = 1,
        *,
        decay: float = 0.99,
        base_batch: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if groups < 1:
            raise ValueError(f"GradientNoiseScale: groups must be at least 1, got {groups}")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"GradientNoiseScale: decay must lie in [0, 1), got {decay}")
        if base_batch is not None and not base_batch > 0:
            raise ValueError(f"GradientNoiseScale: base_batch must be positive, got {base_batch}")
        self.groups, self.decay, self.base_batch = groups, decay, base_batch
        # (3, groups): the moving sums of |G|^2, of tr(Sigma), and of the weights given to both.
        self._sums = torch.zeros(3, groups, dtype=torch.float64, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(
        self,
        small: torch.Tensor | float,
        big: torch.Tensor | float,
        *,
        small_batch: float,
        big_batch: float,
    ) -> torch.Tensor:
        """Add one step: |g|^2 of the small batch (or its mean over replicas) and of the big one.

        Both (groups,), or a scalar for one group. Returns whether the step counted, a bool tensor on
        the device. Raises ``ValueError`` for other shapes or batches of equal size.
        """
        small, big = self._checked(small, "small"), self._checked(big, "big")
        new = torch.stack([*estimate(small, big, small_batch, big_batch), torch.ones_like(small)])
        scale = 1.0 if self.base_batch is None else big_batch / self.base_batch
        decay = self.decay**scale
        finite = new.isfinite().all()
        self._sums.copy_(torch.where(finite, decay * self._sums + (1.0 - decay) * new, self._sums))
        self.updates += finite
        self.skipped += ~finite
        return finite

    def update_from_replicas(
        self, square_sums: torch.Tensor, mean: torch.Tensor | float, *, batch: float
    ) -> torch.Tensor:
        """Do :meth:`update` from the |g_i|^2 of n gradients, (n,) or (n, groups), of ``batch`` examples each.

        ``mean`` is |g|^2 of their average.
        """
        n = square_sums.shape[0]
        small = square_sums.double().mean(0)
        return self.update(small, mean, small_batch=batch, big_batch=n * batch)

    def _checked(self, value: torch.Tensor | float, name: str) -> torch.Tensor:
        tensor = torch.as_tensor(value, dtype=self._sums.dtype).to(self._sums.device)
        if tensor.ndim == 0 and self.groups == 1:
            tensor = tensor.view(1)
        if tensor.shape != (self.groups,):
            raise ValueError(
                f"GradientNoiseScale: {name} must have shape ({self.groups},), one square sum for each "
                f"group, got {tuple(tensor.shape)}"
            )
        return tensor

    @property
    def signal_by_group(self) -> torch.Tensor:
        """Smoothed |G|^2, (groups,) float64; NaN before the first step."""
        return self._sums[0] / self._sums[2]

    @property
    def noise_by_group(self) -> torch.Tensor:
        """Smoothed tr(Sigma) per example, (groups,) float64; NaN before the first step."""
        return self._sums[1] / self._sums[2]

    @property
    def signal(self) -> torch.Tensor:
        """Smoothed |G|^2 of all parameters together."""
        return self.signal_by_group.sum()

    @property
    def noise(self) -> torch.Tensor:
        """Smoothed tr(Sigma) per example of all parameters together."""
        return self.noise_by_group.sum()

    @property
    def noise_scale(self) -> torch.Tensor:
        """tr(Sigma) / |G|^2 in examples, of all parameters; inf where the noise hides the gradient."""
        return _ratio(self.noise, self.signal)

    @property
    def noise_scale_by_group(self) -> torch.Tensor:
        """tr(Sigma) / |G|^2 in examples for each group, (groups,)."""
        return _ratio(self.noise_by_group, self.signal_by_group)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the smoothed sums and counters."""
        return {
            "sums": self._sums.clone(),
            "updates": self.updates.clone(),
            "skipped": self.skipped.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned. Raises ``ValueError`` for other groups."""
        if state["sums"].shape != self._sums.shape:
            raise ValueError(
                f"GradientNoiseScale: the state is of {state['sums'].shape[-1]} groups, not {self.groups}"
            )
        self._sums.copy_(state["sums"])
        self.updates.copy_(state["updates"])
        self.skipped.copy_(state["skipped"])


def _ratio(noise: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
    """Return max(noise, 0) / signal; inf where the signal is not above 0, NaN where nothing was measured."""
    ratio = noise.clamp(min=0.0) / signal
    return torch.where(signal <= 0.0, torch.inf, ratio)
