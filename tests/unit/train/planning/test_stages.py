"""The cut of layers into stages: as good as trying every cut."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from stoker_train.planning.stages import cut


def every_cut(layers: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple(pairwise((0, *inner, layers))) for inner in combinations(range(1, layers), stages - 1)
    ]


def test_a_cut_is_the_best_of_all(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(150):
        layers = drawn.randint(1, 12)
        stages = drawn.randint(1, min(4, layers))
        seconds = [drawn.choice([0.0, 1.0, drawn.random()]) for _ in range(layers)]
        nbytes = [[drawn.random() for _ in range(layers)] for _ in range(stages)]
        limit = drawn.uniform(0.3, layers)

        def slowest(runs: tuple[tuple[int, int], ...], of: list[float] = seconds) -> float:
            return max(sum(of[first:end]) for first, end in runs)

        def fits(
            runs: tuple[tuple[int, int], ...],
            of: list[list[float]] = nbytes,
            limit: float = limit,
        ) -> bool:
            return all(
                sum(of[stage][first:end]) <= limit for stage, (first, end) in enumerate(runs)
            )

        all_cuts = every_cut(layers, stages)
        found = cut(seconds, stages)
        assert found in all_cuts
        assert slowest(found) == pytest.approx(min(map(slowest, all_cuts)))

        allowed = [runs for runs in all_cuts if fits(runs)]
        found = cut(seconds, stages, nbytes, limit)
        if not allowed:
            assert found is None
        else:
            assert found in allowed
            assert slowest(found) == pytest.approx(min(map(slowest, allowed)))


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages must lie in 1\.\.2, the number of layers, got 3"):
        cut([1.0, 1.0], 3)
