"""Wrong specifications: the error names the field and what to give."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.parameter_server.storage.optimizers import SGD, Adam
from stoker_train.parameter_server.storage.spec import TableSpec, check_same, check_spec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "a/b"),
        ("width", 0),
        ("width", 2.5),
        ("width", True),
        ("shape", (3, -1)),
        ("dtype", "float16"),
        ("optimizer", "adam"),
        ("initializer", 0.0),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match="give") as raised:
        check_spec(TableSpec(**{"name": "t", field: value}))
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 3), ("dtype", "float64"), ("optimizer", Adam()), ("shape", (2,))],
)
def test_another_table_of_the_same_name_is_a_conflict(field: str, value: Any) -> None:
    there = TableSpec(name="t", width=2, optimizer=SGD())
    check_same(there, TableSpec(name="t", width=2))
    with pytest.raises(ConflictError, match=f"another {field}") as raised:
        check_same(there, TableSpec(**{"name": "t", "width": 2, field: value}))
    assert raised.value.field == field
