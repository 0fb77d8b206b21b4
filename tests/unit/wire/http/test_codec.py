"""Bodies that do not decode: the error names the member, and costs no more than the body."""

from __future__ import annotations

import msgspec
import pytest

from stoker_wire.errors import BadRequestError
from stoker_wire.http import codec
from stoker_wire.http.codec import EXPLAINED_NBYTES, JSON, MSGPACK, Codec


class Crate(msgspec.Struct, forbid_unknown_fields=True):
    amounts: dict[str, float] = {}
    padding: str = ""


CODEC = Codec(Crate)


@pytest.mark.parametrize(("content_type", "format"), [(JSON, "json"), (MSGPACK, "msgpack")])
@pytest.mark.parametrize(("padding", "field"), [(0, "amounts.a"), (EXPLAINED_NBYTES, "amounts")])
def test_a_long_body_is_not_made_into_objects_to_name_what_is_wrong(
    content_type: str, format: str, padding: int, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = getattr(msgspec, format).encode({"amounts": {"a": "x"}, "padding": "x" * padding})
    whole = getattr(msgspec, format).decode
    lengths: list[int] = []

    def decode(given: bytes) -> object:
        lengths.append(len(given))
        return whole(given)

    monkeypatch.setattr(getattr(codec.msgspec, format), "decode", decode)
    with pytest.raises(BadRequestError, match="float") as caught:
        CODEC.decode(raw, content_type)
    assert caught.value.field == field
    assert lengths == ([] if padding else [len(raw)])
