"""Rules of the learning rate, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker_train.elastic.optimization import lr_factor


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("adascale", 3.0),
        ("sqrt", math.sqrt(8)),
        ("linear", 8.0),
        ("none", 1.0),
        (lambda scale, gain: scale / gain, 8 / 3),
    ],
)
def test_a_rule_gives_the_factor(rule: Any, factor: float) -> None:
    assert lr_factor(rule, 256, 32, gain=3.0) == pytest.approx(factor)
    assert lr_factor(rule, 32, 32) == pytest.approx(1.0)


def test_a_wrong_rule_is_named() -> None:
    with pytest.raises(ValueError, match="lr is 'cubic': it must be one of adascale, sqrt"):
        lr_factor("cubic", 2, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [0.0, -1.0, math.nan, math.inf])
def test_a_wrong_answer_is_named(answer: float) -> None:
    with pytest.raises(ValueError, match="lr returned"):
        lr_factor(lambda scale, gain: answer, 2, 1)
