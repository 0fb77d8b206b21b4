"""The parameters of a job's step time from the steps it has measured, as Pollux fits them.

Minimised, by L-BFGS-B (OSDI 2021, section 4.1): the root mean square error of ``log T_acc`` and that of
``log T_step``, and a little for what speaks of neither (a gamma above 1, and slopes of the network that are
large beside their offsets). What has not been seen yet is pinned near 0, so assumed to scale perfectly: a
scheduler that believes it explores.

A root of mean squares has a kink where the observations are met exactly, and the loss flat valleys: there the
search stops early, and leaves offset and slope of the network as it came upon them. A slope that is too steep
hides every larger allocation. So ours is rounded by ``TOLERANCE``, searched over the logarithms of the
parameters, of which each has a scale of its own, and searched again from where a search has ended; Pollux's
is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from stoker_goodput.throughput import MAX_GAMMA, TINY, Floats, ThroughputParams, overlapped

START = np.array([1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1.0 + 1e-3])
GAMMA_WEIGHT = 1e-3
SLOPE_WEIGHT = 1e-2
TOLERANCE = 0.03
"""Errors of this size and below are those of the model, not worth a distorted parameter."""
LARGEST_S = 1e4
"""No parameter is larger."""
NETWORK_RATIO = 1.1
"""What was not seen across nodes is at least so many times what was seen within one."""
MAX_SEARCHES = 8
WORTH_A_SEARCH = 1e-3
"""A search that makes the loss less by such a part is followed by another one."""
_ALPHA_C, _BETA_C, _ALPHA_N, _BETA_N, _ALPHA_R, _BETA_R, _GAMMA = range(7)


@dataclass(frozen=True, slots=True)
class Observation:
    """The seconds of a pass that accumulates, and of one that exchanges gradients, in one configuration.

    Raises ValueError, with the field, for counts below 1 and for times that are not positive.
    """

    nodes: int
    replicas: int
    local_batch: int
    accumulation_s: float
    step_s: float

    def __post_init__(self) -> None:
        for name in ("nodes", "replicas", "local_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        for name in ("accumulation_s", "step_s"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise ValueError(f"{name} is {value}: it must be a time, and positive")


def fit(observations: Iterable[Observation], tolerance: float = TOLERANCE) -> ThroughputParams:
    """Return the parameters that explain the observations, each of which counts once.

    A ``tolerance`` of 0 is Pollux's own loss. Raises ValueError if there are none.
    """
    seen = np.array([astuple(one) for one in observations], dtype=np.float64)
    if not len(seen):
        raise ValueError("there are no observations to fit")
    nodes, replicas, local, accumulation, step = seen.T
    start, lower, upper = _bounds(nodes, replicas, local, accumulation)
    loss = _Loss.of(nodes, replicas, local, accumulation, step, tolerance)
    if tolerance:
        values, free = start.copy(), lower < upper

        def of_logs(logs: Floats) -> tuple[float, Floats]:
            values[free] = np.exp(logs)
            size, gradient = loss(values)
            return size, (gradient * values)[free]

        limits = np.log(lower[free]), np.log(np.minimum(upper[free], LARGEST_S))
        values[free] = np.exp(_search_again(of_logs, np.log(start[free]), *limits))
    else:
        values, _ = _search(loss, start, lower, upper)
    values = np.clip(values, lower, upper)
    if not (nodes > 1).any():
        values[_ALPHA_N] = max(values[_ALPHA_N], values[_ALPHA_R] * NETWORK_RATIO)
        values[_BETA_N] = max(values[_BETA_N], values[_BETA_R] * NETWORK_RATIO)
    return ThroughputParams(*map(float, values))


def _search(
    loss: Callable[[Floats], tuple[float, Floats]], start: Floats, lower: Floats, upper: Floats
) -> tuple[Floats, float]:
    from scipy.optimize import minimize

    bounds = list(zip(lower, upper, strict=True))
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return np.asarray(found.x, dtype=np.float64), float(found.fun)


def _search_again(
    loss: Callable[[Floats], tuple[float, Floats]], start: Floats, lower: Floats, upper: Floats
) -> Floats:
    """Search until that gains nothing: what a search believes of the curvature can end it far from a minimum.

    So it does once in 6,000 fits, and nearly always one look more is all that this costs.
    """
    values, size = _search(loss, start, lower, upper)
    for _ in range(MAX_SEARCHES):
        values, now = _search(loss, values, lower, upper)
        if now > size * (1 - WORTH_A_SEARCH):
            break
        size = now
    return values


def error(params: ThroughputParams, observations: Iterable[Observation]) -> float:
    """Return the largest relative error of the step times that ``params`` predict; 0 for none."""
    seen = np.array([astuple(one) for one in observations], dtype=np.float64)
    if not len(seen):
        return 0.0
    nodes, replicas, local, accumulation, step = seen.T
    passes = np.abs(params.accumulation_time(local) / accumulation - 1)
    steps = np.abs(params.step_time(nodes, replicas, local) / step - 1)
    return float(np.maximum(passes, steps).max())


def _bounds(
    nodes: Floats, replicas: Floats, local: Floats, accumulation: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return where to start, and between what to stay; both are the same for what is pinned."""
    start = START.copy()
    lower = np.full(7, TINY)
    upper = np.full(7, np.inf)
    lower[_GAMMA], upper[_GAMMA] = 1.0, MAX_GAMMA
    pinned: dict[int, float] = {}
    if len(np.unique(local)) == 1:
        pinned[_ALPHA_C] = float(accumulation.mean()) / 2
    if not (nodes > 1).any():
        pinned[_ALPHA_N] = pinned[_BETA_N] = TINY
    if not ((nodes == 1) & (replicas > 1)).any():
        pinned[_ALPHA_R] = pinned[_BETA_R] = TINY
    if not (replicas > 2).any():
        pinned[_BETA_N] = pinned[_BETA_R] = TINY
    for index, value in pinned.items():
        start[index] = lower[index] = upper[index] = value
    return start, lower, upper


@dataclass(slots=True)
class _Loss:
    """The loss of parameters, and its gradient. It is asked often: what stays the same is computed once."""

    local: Floats
    more: Floats
    """Replicas beyond the second."""
    across: NDArray[np.intp]
    """The observations that exchange across nodes, and those that do within one."""
    within: NDArray[np.intp]
    log_accumulation: Floats
    log_step: Floats
    tolerance: float

    @classmethod
    def of(
        cls,
        nodes: Floats,
        replicas: Floats,
        local: Floats,
        accumulation: Floats,
        step: Floats,
        tolerance: float,
    ) -> _Loss:
        return cls(
            local,
            np.maximum(replicas - 2, TINY),
            np.flatnonzero(nodes > 1),
            np.flatnonzero((nodes <= 1) & (replicas > 1)),
            np.log(accumulation),
            np.log(step),
            tolerance,
        )

    def __call__(self, values: Floats) -> tuple[float, Floats]:
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = values.tolist()
        across, within, more = self.across, self.within, self.more
        accumulation = alpha_c + beta_c * self.local
        network = np.full(len(more), TINY)
        network[across] = alpha_n + beta_n * more[across]
        network[within] = alpha_r + beta_r * more[within]
        log_predicted = np.log(overlapped(accumulation, network, gamma))
        # T_step depends on either time by the part that it has in the sum of powers.
        log_network, log_passes = np.log(network), np.log(accumulation)
        power = np.minimum(gamma * (log_network - log_passes), 700.0)
        part = 1.0 / (1.0 + np.exp(power))
        by_gamma = (part * log_passes + (1 - part) * log_network - log_predicted) / gamma

        gradient = np.zeros(7)
        loss, weight = self._error(log_passes - self.log_accumulation)
        by_accumulation = weight / accumulation
        of_step, weight = self._error(log_predicted - self.log_step)
        loss += of_step
        by_accumulation += weight * part / accumulation
        by_network = weight * (1 - part) / network
        gradient[_ALPHA_C] = _sum(by_accumulation)
        gradient[_BETA_C] = by_accumulation @ self.local
        for rows, at in ((across, _ALPHA_N), (within, _ALPHA_R)):
            if len(rows):
                gradient[at] = _sum(by_network[rows])
                gradient[at + 1] = by_network[rows] @ more[rows]
        gradient[_GAMMA] = weight @ by_gamma + 2 * GAMMA_WEIGHT * (gamma - 1)
        loss += GAMMA_WEIGHT * (gamma - 1) ** 2
        for alpha, beta, at in ((alpha_n, beta_n, _ALPHA_N), (alpha_r, beta_r, _ALPHA_R)):
            slope = beta / alpha
            loss += SLOPE_WEIGHT * slope**2
            gradient[at] -= 2 * SLOPE_WEIGHT * slope**2 / alpha
            gradient[at + 1] += 2 * SLOPE_WEIGHT * slope / alpha
        return loss, gradient

    def _error(self, residuals: Floats) -> tuple[float, Floats]:
        """Return the root mean square, rounded where it is 0, and its derivative by each residual."""
        size = math.sqrt(residuals @ residuals / len(residuals) + self.tolerance**2)
        return size, residuals / (len(residuals) * size) if size > 0 else residuals


_sum = np.add.reduce
