"""What users give wrong: refused before it is sent, by the name of the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.client.checks import checked_keys, checked_values
from stoker_train.parameter_server.storage.spec import TableSpec

SPEC = TableSpec(name="emb", width=2)


@pytest.mark.parametrize("keys", [[1.5], ["a"], [True], np.array([1], np.uint64), [None]])
def test_keys_are_whole_numbers(keys: Any) -> None:
    with pytest.raises(BadRequestError, match=r"(?s)keys of table 'emb'.*give whole") as raised:
        checked_keys(SPEC, keys)
    assert raised.value.field == "keys"


def test_keys_of_any_shape_and_width_are_int64() -> None:
    assert checked_keys(SPEC, []).dtype == np.int64
    assert checked_keys(SPEC, np.array([[1, 2]], np.uint8)).shape == (1, 2)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros((3, 3)), r"have the shape \(3, 3\)\.?\ngive \(3, 2\): a row of 2 for each key"),
        (np.zeros(3), r"give \(3, 2\)"),
        ([["a", "b"]] * 3, "have the dtype <U1"),
        (
            [[0, 1], [2, np.nan], [np.inf, 0]],
            r"not finite in 2 places\.?\nthe first is nan at \(1, 1\)",
        ),
    ],
)
def test_gradients_fit_and_are_finite(values: Any, text: str) -> None:
    with pytest.raises(BadRequestError, match=text) as raised:
        checked_values(SPEC, (3, 2), values)
    assert raised.value.field == "gradients"


def test_a_sum_past_the_largest_number_is_no_error() -> None:
    values = np.full((3, 2), 3e38, np.float32)
    assert checked_values(SPEC, (3, 2), values).tolist() == values.tolist()
