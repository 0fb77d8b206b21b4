"""The member of a document that does not fit, found with few conversions of the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stoker_wire.messages import tolerant
from stoker_wire.messages.tolerant import steps_to


class Leaf(msgspec.Struct):
    amounts: dict[str, float] = {}


class Tree(msgspec.Struct):
    leaves: dict[str, Leaf] = {}


@pytest.mark.parametrize("at", [0, 1, 499, 998, 999])
def test_a_bad_member_is_found_wherever_it_is(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = {"amounts": {f"n{i}": "bad" if i == at else 1.0 for i in range(1000)}}
    document = {"leaves": {"first": {}, "second": leaf, "third": leaf}}
    tries = 0
    convert = msgspec.convert

    def counted(*given: Any, **how: Any) -> Any:
        nonlocal tries
        tries += 1
        return convert(*given, **how)

    with pytest.raises(msgspec.ValidationError) as caught:
        convert(document, Tree)
    monkeypatch.setattr(tolerant.msgspec, "convert", counted)
    _, steps = steps_to(str(caught.value), document, Tree)
    assert steps == ["leaves", "second", "amounts", f"n{at}"]
    assert tries < 20
