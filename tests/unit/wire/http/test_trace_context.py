"""Headers and variables of the W3C trace context: what is valid travels, anything else is no context."""

from __future__ import annotations

import pytest

from stoker_wire.http.trace_context import joined, of_headers, of_variables, split, variables

ID = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def test_a_context_comes_back_from_each_form() -> None:
    trace = joined(f"00-{ID}-01", "a=1,b=2")
    assert split(trace) == (f"00-{ID}-01", "a=1,b=2")
    assert of_variables(variables(trace)) == trace
    assert of_headers({"traceparent": f" 00-{ID}-01 ", "tracestate": "a=1,b=2"}) == trace
    assert joined(f"00-{ID}-00") == f"00-{ID}-00"
    assert variables("") == {}


@pytest.mark.parametrize(
    "text",
    ["", "none", f"00-{ID}", f"00-{ID}-1", f"ff-{ID}-01", f"00-{ID.upper()}-01", f"00-{ID}-01-x",
     f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{ID[:33]}{'0' * 16}-01", f"01-{ID}-01x"],
)  # fmt: skip
def test_what_is_none_is_no_context(text: str) -> None:
    assert joined(text, "a=1") == ""


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert joined(f"cc-{ID}-01-what-the-future-brings") == f"00-{ID}-01"


@pytest.mark.parametrize("state", ["x" * 513, "a=ü", "a=1\r\nb"])
def test_a_state_that_cannot_travel_is_dropped(state: str) -> None:
    assert joined(f"00-{ID}-01", state) == f"00-{ID}-01"
