"""Decide which samples a step takes, and who reads them: the order of an epoch, and shares of a step.

Every rank computes the same from the same numbers, so nothing about samples is ever sent. The loader asks
here for the order, the replica for its share. Pure: no clock, no IO, no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np

from stoker.exceptions import BadRequestError

__all__ = ("epoch_order", "micro_batches", "shares")


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the samples of an epoch in their order, (length,) int64: a function of (seed, epoch) alone.

    A permutation where ``shuffle``, else 0, 1, 2... It sorts random keys, of a generator's raw bits. NumPy
    promises that these never change (NEP 19), as it does not of ``Generator.permutation``: a job that goes
    on from a checkpoint under another NumPy must see the order in which it began.
    """
    if length < 0 or seed < 0 or epoch < 0:
        name, value = next(
            (name, value)
            for name, value in (("length", length), ("seed", seed), ("epoch", epoch))
            if value < 0
        )
        raise BadRequestError(
            f"{name}={value} of epoch_order() is negative\ngive 0 or more", field=name
        )
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(length)
    # Each key holds its sample in the low bits: a plain sort, which is many times as fast as an argsort, and
    # no two keys are equal.
    mask = np.uint64((1 << length.bit_length()) - 1)
    keys &= ~mask
    keys |= np.arange(length, dtype=np.uint64)
    keys.sort()
    keys &= mask
    return keys.view(np.int64)


def shares(count: int, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of each rank's share of a step's ``count`` samples, in order of rank.

    Sizes are in proportion to the weights, by largest remainder (the lower rank where remainders are
    equal), and sum to ``count``. BadRequestError for weights that are negative, not finite or all 0.
    """
    return _shares(count, tuple(weights))


@lru_cache(maxsize=256)
def _shares(count: int, weights: tuple[float, ...]) -> tuple[tuple[int, int], ...]:
    if count < 0:
        raise BadRequestError(
            f"count={count} of shares() is negative\ngive the samples of a step", field="count"
        )
    bad = next((one for one in weights if not (one >= 0 and math.isfinite(one))), None)
    if bad is not None or not any(weights):
        raise BadRequestError(
            f"weights={weights!r:.80} of shares() are no shares\n"
            "give each rank a finite number of 0 or more, and one of them more than 0",
            field="weights",
        )
    if len(set(weights)) == 1:
        least, larger = divmod(count, len(weights))
        sizes = [least + (rank < larger) for rank in range(len(weights))]
        return _placed(sizes)
    # Exact, so that ranks on different processors cannot round apart.
    exact = [Fraction(one) for one in weights]
    total = sum(exact)
    quotas = [count * one / total for one in exact]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - quotas[rank], rank))
    for rank in by_remainder[: count - sum(sizes)]:
        sizes[rank] += 1
    return _placed(sizes)


def _placed(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))


def micro_batches(size: int, local: int) -> tuple[int, ...]:
    """Return the sizes of the passes over a share of ``size`` samples, none above ``local``.

    As few passes as can be, as equal as can be, larger ones first; none for an empty share. Ranks may
    differ in their number of passes; each exchanges gradients once a step, in its last.
    """
    if local < 1:
        raise BadRequestError(
            f"local={local} of micro_batches() is no batch\ngive 1 or more samples", field="local"
        )
    passes = -(-size // local)
    if passes == 0:
        return ()
    least, larger = divmod(size, passes)
    return (least + 1,) * larger + (least,) * (passes - larger)
