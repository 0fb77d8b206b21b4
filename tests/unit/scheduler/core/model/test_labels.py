"""Label selectors: what they hold for, and the unreadable ones."""

from __future__ import annotations

import pytest

from stoker_scheduler.core.model.resources import InvalidDemandError
from stoker_scheduler.wire_types import terms_of


@pytest.mark.parametrize(
    ("written", "labels", "holds"),
    [
        ("a", {"zone": "a"}, True),
        ("a", {"zone": "b"}, False),
        ("a", {}, False),
        ("!a", {"zone": "b"}, True),
        ("!a", {"zone": "a"}, False),
        ("!a", {}, True),
        ("in(a, b)", {"zone": "b"}, True),
        ("in(a,b)", {"zone": "c"}, False),
        ("!in(a,b)", {"zone": "c"}, True),
        ("!in(a,b)", {"zone": "a"}, False),
        ("!in(a,b)", {}, True),
    ],
)
def test_a_label_selector(written: str, labels: dict[str, str], holds: bool) -> None:
    (term,) = terms_of({"zone": written})
    assert term.holds(labels) is holds


@pytest.mark.parametrize(
    "written", ["", "!", "in()", "in(a", "!in( , )", "in(a,, b)", "matches(x)", "??==zone!"]
)
def test_an_unreadable_selector_names_the_label(written: str) -> None:
    with pytest.raises(InvalidDemandError) as caught:
        terms_of({"zone": written})
    assert caught.value.field == "label_selector.zone"
