"""The format of a profile, by the name of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.processes.profiles import format_of
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.node_api import ProfileFormat, ProfileKind


@pytest.mark.parametrize(
    ("kind", "name", "given", "expected"),
    [
        ("cpu", "a.svg", None, "svg"),
        ("cpu", "a.speedscope.json", None, "speedscope"),
        ("cpu", "a.json", None, "trace"),
        ("cpu", "a.raw", None, "raw"),
        ("cpu", "a.dat", "raw", "raw"),
        ("cpu", None, None, "svg"),
        ("memory", "a.html", None, "html"),
        ("memory", None, None, "html"),
        ("torch", "a.json", None, "trace"),
        ("torch", None, None, "trace"),
    ],
)
def test_the_suffix_says_the_format(
    kind: str, name: str | None, given: str | None, expected: str
) -> None:
    path = Path(name) if name else None
    assert format_of(ProfileKind(kind), path, given) is ProfileFormat(expected)


def test_a_suffix_of_another_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadRequestError, match="no suffix of a memory profile") as caught:
        format_of(ProfileKind.MEMORY, Path("a.svg"), None)
    assert "use one of .html, or --format" in str(caught.value)
