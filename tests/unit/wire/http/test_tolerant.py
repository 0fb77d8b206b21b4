"""The member of a document that does not fit, found with few conversions of the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stoker_wire.http import tolerant
from stoker_wire.http.tolerant import TolerantDecoder, convert_known, steps_to


class Leaf(msgspec.Struct):
    amounts: dict[str, float] = {}


class Tree(msgspec.Struct):
    leaves: dict[str, Leaf] = {}


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0
    below: Strict | None = None
    some: tuple[Strict, ...] = ()
    by_name: dict[str, Strict] = {}
    pair: tuple[int, Strict] | None = None


class Put(Strict, tag_field="op", tag="put"):
    shared: int = 0


class Add(Strict, tag_field="op", tag="add"):
    amount: int = 0


class Row(msgspec.Struct, array_like=True):
    at: int
    strict: Strict


class Counter:
    """Counts conversions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries = 0
        convert = msgspec.convert

        def counted(*given: Any, **how: Any) -> Any:
            self.tries += 1
            return convert(*given, **how)

        monkeypatch.setattr(tolerant.msgspec, "convert", counted)


@pytest.mark.parametrize(
    ("type_", "document", "known"),
    [
        (Strict, {"a": 1, "b": 2}, Strict(1)),
        (Strict, {"below": {"a": 1, "b": 2, "below": {"c": 3}}}, Strict(0, Strict(1, Strict()))),
        (Strict, {"some": [{"a": 1, "b": 1}, {"c": 1}]}, Strict(some=(Strict(1), Strict()))),
        (Strict, {"by_name": {"b": {"b": 1}}}, Strict(by_name={"b": Strict()})),
        (Strict, {"pair": [1, {"b": 1}]}, Strict(pair=(1, Strict()))),
        (Put | Add, {"op": "put", "shared": 1, "amount": 2}, Put(shared=1)),
        (Put | Add, {"op": "add", "shared": 1, "amount": 2}, Add(amount=2)),
        (list[Put | Add], [{"op": "add", "z": 1}, {"op": "put", "z": 1}], [Add(), Put()]),
        (Row, [1, {"a": 2, "b": 3}, "more"], Row(1, Strict(2))),
        (
            dict[str, Row | None],
            {"x": [1, {"z": 1}], "y": None},
            {"x": Row(1, Strict()), "y": None},
        ),
    ],
)
@pytest.mark.parametrize("json", [False, True])
def test_fields_that_are_not_known_are_ignored_at_any_depth(
    type_: Any, document: Any, known: Any, json: bool
) -> None:
    encode = msgspec.json.encode if json else msgspec.msgpack.encode
    assert TolerantDecoder(type_, json=json).decode(encode(document)) == known


def test_many_unknown_fields_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"some": [{f"new{i}": i for i in range(100)}] * 100}
    counter = Counter(monkeypatch)
    assert convert_known(document, Strict) == Strict(some=(Strict(),) * 100)
    assert counter.tries == 2


def test_what_is_wrong_besides_is_an_error() -> None:
    for document in ({"b": 1, "a": "x"}, {"a": "x"}, {"some": {"b": 1}}, {"b": 1, "below": [1]}):
        with pytest.raises(msgspec.ValidationError, match="xpected"):
            convert_known(document, Strict)


@pytest.mark.parametrize("at", [0, 1, 499, 998, 999])
def test_a_bad_member_is_found_wherever_it_is(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = {"amounts": {f"n{i}": "bad" if i == at else 1.0 for i in range(1000)}}
    document = {"leaves": {"first": {}, "second": leaf, "third": leaf}}
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Tree)
    counter = Counter(monkeypatch)
    _, steps = steps_to(str(caught.value), document, Tree)
    assert steps == ["leaves", "second", "amounts", f"n{at}"]
    assert counter.tries < 20
