"""Ids say what they name, and a wrong one fails with the name of its field."""

from __future__ import annotations

import pytest

from stoker_wire.errors import BadRequestError
from stoker_wire.ids import IdSource, Prefix, check_id, new_id, return_id


@pytest.mark.parametrize("prefix", list(Prefix))
def test_a_fresh_id_passes_its_own_check(prefix: Prefix) -> None:
    made = new_id(prefix)
    assert check_id(made, prefix, field="x") == made


def test_a_source_never_repeats_itself_nor_another_source() -> None:
    one, two = IdSource(Prefix.TASK), IdSource(Prefix.TASK)
    assert len({source() for source in (one, two) for _ in range(1000)}) == 2000


def test_a_return_value_is_named_after_its_task() -> None:
    assert return_id("t_ab12", 3) == "o_ab12.3"
    assert check_id("o_ab12.3", Prefix.OBJECT, field="x")


@pytest.mark.parametrize(
    "wrong", ["", "n_1", "t_", "t_ABC", "t_a b", "t_" + "a" * 200, "t_a\n", "t_../../etc"]
)
def test_a_wrong_id_is_refused_with_its_field(wrong: str) -> None:
    with pytest.raises(BadRequestError, match=r"task_id: .* is not a task id") as caught:
        check_id(wrong, Prefix.TASK, field="task_id")
    assert caught.value.field == "task_id"
