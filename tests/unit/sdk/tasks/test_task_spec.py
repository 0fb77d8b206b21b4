"""What calls of one function share, and what those of each cell of a notebook do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stoker.runtime.options.options import TaskOptions
from stoker.runtime.tasks import task_spec
from stoker.runtime.tasks.task_spec import FunctionSpec
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.data import Template

if TYPE_CHECKING:
    import pytest


def function() -> FunctionSpec:
    return FunctionSpec(
        submitter=cast("Any", None),
        function="f00d",
        blob=b"",
        name="f",
        template=Template(number=0, function="f00d", name="f"),
        options=TaskOptions(),
        demand=Demand(job_id="job_1", resources={"CPU": 1.0}),
    )


def test_calls_of_a_cell_have_a_template_of_their_own_and_the_rest_in_common() -> None:
    spec = function()
    assert spec.in_cell("") is spec
    one = spec.in_cell("one")
    assert spec.in_cell("one") is one and one.template.cell == "one" and not spec.template.cell
    one.registered, one.mean_s = True, 0.5
    two = spec.in_cell("two")
    assert len({s.template.number for s in (spec, one, two)}) == 3
    assert two.demand_key == spec.demand_key
    assert (two.registered, two.mean_s) == (True, 0.5)
    assert two.awaiting_registration is not one.awaiting_registration


def test_a_function_knows_the_cells_that_called_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_spec, "_CELLS", 2)
    spec = function()
    one, two, three = (spec.in_cell(cell) for cell in ("one", "two", "three"))
    assert (spec.in_cell("two"), spec.in_cell("three")) == (two, three)
    assert spec.in_cell("one") is not one
