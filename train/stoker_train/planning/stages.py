"""The cut of layers into the stages of a pipeline, by dynamic programming."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def cut(
    seconds: Sequence[float] | NDArray[np.float64],
    stages: int,
    nbytes: Sequence[Sequence[float]] | NDArray[np.float64] | None = None,
    limit_bytes: float = float("inf"),
) -> tuple[tuple[int, int], ...] | None:
    """Cut layers into ``stages`` runs [first, end) such that the slowest stage is as fast as can be.

    ``seconds`` has the cost of each layer; ``nbytes[stage][layer]`` what a layer takes in a stage, of which
    no stage may have more than ``limit_bytes``. None where every cut exceeds that. Each stage gets a layer
    at least. Of equal cuts, the one whose earlier stages are shorter: these keep more micro-batches.

    best[k][j] = min over i of max(best[k - 1][i], cost of layers i to j): O(stages x layers^2).
    """
    layers = len(seconds)
    if not 1 <= stages <= layers:
        raise ValueError(f"stages must lie in 1..{layers}, the number of layers, got {stages}")
    empty = np.tri(layers + 1, dtype=bool)
    cost = np.where(empty, np.inf, _runs(seconds))
    too_large = None if nbytes is None else _runs(nbytes) > limit_bytes
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices: list[NDArray[np.int64]] = []
    for stage in range(stages):
        worst = np.maximum(best[:, None], cost)
        if too_large is not None:
            worst[too_large[stage]] = np.inf
        choice = worst.argmin(axis=0)
        best = worst[choice, np.arange(layers + 1)]
        choices.append(choice)
    if not np.isfinite(best[layers]):
        return None
    cuts: list[tuple[int, int]] = []
    end = layers
    for choice in reversed(choices):
        cuts.append((int(choice[end]), end))
        end = int(choice[end])
    return tuple(reversed(cuts))


def _runs(values: Sequence[object] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [..., first, end] -> the sum of that run of the last axis."""
    wide = np.asarray(values, dtype=np.float64)
    sums = np.zeros((*wide.shape[:-1], wide.shape[-1] + 1))
    np.cumsum(wide, axis=-1, out=sums[..., 1:])
    return sums[..., None, :] - sums[..., :, None]
