"""Amounts of resources: what is too small to be counted is refused where it is asked for."""

from __future__ import annotations

import pytest

from stoker_wire.amounts import SMALLEST_PART, check_parts
from stoker_wire.errors import BadRequestError


def test_nothing_and_all_that_can_be_counted_may_be_asked_for() -> None:
    check_parts({"CPU": 0.0, "GPU": SMALLEST_PART, "memory": 1e15}, "resources")


@pytest.mark.parametrize("amount", [1e-5, 5e-324])
def test_an_amount_that_is_too_small_is_named(amount: float) -> None:
    with pytest.raises(BadRequestError, match="the smallest part") as raised:
        check_parts({"CPU": 1.0, "x": amount}, "limit")
    assert raised.value.field == "limit.x"
