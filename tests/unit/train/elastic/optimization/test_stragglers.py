"""Slow ranks and nodes: found within W windows, once, and never by jitter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from stoker_train.elastic.optimization import StepRow, StepTable, Stragglers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_train.elastic.optimization import Slow

NODES = ("a", "a", "b", "b")


def table(
    generator: np.random.Generator, slow: Sequence[float], shares: Sequence[float] | None = None
) -> StepTable:
    """A step of ranks that compute for 1 ms a sample, ±10 %, times ``slow``."""
    shares = shares or [32] * len(slow)
    return StepTable.of(
        *(
            StepRow(share=share, compute_s=0.001 * share * factor * generator.uniform(0.9, 1.1))
            for share, factor in zip(shares, slow, strict=True)
        )
    )


def windows(
    watch: Stragglers,
    generator: np.random.Generator,
    slow: Sequence[float],
    count: int,
    shares: Sequence[float] | None = None,
) -> list[Slow]:
    return [
        one for _ in range(count * watch.steps) for one in watch.add(table(generator, slow, shares))
    ]


def test_a_slow_rank_is_found_after_as_many_windows_and_told_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    watch = Stragglers(NODES, windows=3)
    assert windows(watch, generator, [1, 1, 1, 1], 5) == []
    assert windows(watch, generator, [1, 3, 1, 1], 2) == []
    (found,) = windows(watch, generator, [1, 3, 1, 1], 1)
    assert (found.kind, found.ranks, found.node, found.windows) == ("rank", (1,), "a", 3)
    assert found.ratio == pytest.approx(3, rel=0.2)
    assert windows(watch, generator, [1, 3, 1, 1], 5) == []
    assert [(one.ranks, one.windows) for one in watch.slow] == [((1,), 8)]
    windows(watch, generator, [1, 1, 1, 1], 1)
    assert watch.slow == ()
    assert len(windows(watch, generator, [1, 3, 1, 1], 3)) == 1, "told again after it recovered"


def test_jitter_is_no_straggler_in_1000_windows(seed: int) -> None:
    watch = Stragglers(NODES, windows=1, steps=3)
    assert windows(watch, np.random.default_rng(seed), [1, 1, 1.2, 1], 1000) == []


def test_a_slow_node_is_told_apart_from_its_ranks(seed: int) -> None:
    generator = np.random.default_rng(seed)
    watch = Stragglers(NODES, windows=2, steps=4)
    (found,) = windows(watch, generator, [1, 1, 2.2, 2], 4)
    assert (found.kind, found.ranks, found.node) == ("node", (2, 3), "b")
    eight = Stragglers(["a"] * 2 + ["b"] * 3 + ["c"] * 3, windows=2, steps=4)
    found, other = windows(eight, generator, [1, 3, 2, 2, 2, 1, 1, 1], 2)
    assert {(one.kind, one.ranks) for one in (found, other)} == {
        ("node", (2, 3, 4)),
        ("rank", (1,)),
    }


def test_one_rank_of_a_node_alone_is_a_rank(seed: int) -> None:
    watch = Stragglers(["a", "b", "c"], windows=1)
    (found,) = windows(watch, np.random.default_rng(seed), [1, 1, 4], 1)
    assert (found.kind, found.node) == ("rank", "c")


def test_less_to_do_is_no_more_speed(seed: int) -> None:
    """Time counts by sample: with fewer a slow rank still is one, and a fast one with many is none."""
    generator = np.random.default_rng(seed)
    watch = Stragglers(NODES, windows=1)
    (found,) = windows(watch, generator, [1, 4, 1, 1], 1, shares=[38, 8, 38, 38])
    assert found.ranks == (1,)
    watch = Stragglers(NODES, windows=1)
    assert windows(watch, generator, [1, 1, 1, 1], 3, shares=[64, 8, 16, 0]) == []


def test_suggested_shares_let_all_end_together(seed: int) -> None:
    generator = np.random.default_rng(seed)
    watch = Stragglers(NODES, windows=1, steps=50)
    assert watch.weights() is None
    windows(watch, generator, [1, 3, 1, 1], 1, shares=[32, 32, 32, 0])
    weights = watch.weights()
    assert weights is not None
    assert sum(weights) == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(1 / 3, rel=0.1)
    assert weights[3] == pytest.approx(weights[0], rel=0.1), "not measured: as the median"
    assert watch.sample_s is not None


def test_another_membership_is_refused() -> None:
    with pytest.raises(ValueError, match="the table has 1 ranks, not 4"):
        Stragglers(NODES).add(StepTable.of(StepRow()))


@pytest.mark.parametrize(("field", "value"), [("ratio", 1.0), ("windows", 0), ("steps", 0)])
def test_wrong_options_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} is"):
        Stragglers(NODES, **{field: value})  # type: ignore[arg-type]
