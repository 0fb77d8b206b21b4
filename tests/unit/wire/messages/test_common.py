"""What a caller may name, and how much of it: beyond, a request is refused with the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_wire.errors import BadRequestError
from stoker_wire.http.codec import JSON, Codec
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import MAX_NAME, MAX_NAMES, MAX_PARTS, MAX_TEXT, ErrorInfo
from stoker_wire.messages.control import MAX_CURSOR, MAX_KEY, KvOperation, ListQuery
from stoker_wire.messages.groups import CreatePlacementGroup
from stoker_wire.messages.objects import CreateDetachedObject
from stoker_wire.messages.work import AttachDriver, CreateActor, SubmitJob

if TYPE_CHECKING:
    from collections.abc import Callable

DEMAND = {"job_id": "j", "resources": {}}
JOB = {"entrypoint": "true"}
ACTOR = {"actor_id": "a", "demand": DEMAND, "class_name": "A", "payload": ""}
GROUP = {"group_id": "g", "job_id": "j", "bundles": [{"resources": {"CPU": 1}}]}
OBJECT = {"object_id": "o", "nbytes": 1}


def text(length: int) -> str:
    return "x" * length


def names(count: int) -> dict[str, str]:
    return {f"n{i}": "1" for i in range(count)}


def amounts(count: int) -> dict[str, int]:
    return {f"n{i}": 1 for i in range(count)}


def list_of(count: int) -> list[str]:
    return ["x"] * count


@pytest.mark.parametrize(
    ("type_", "rest", "field", "make", "most"),
    [
        (SubmitJob, JOB, "name", text, MAX_NAME),
        (SubmitJob, JOB, "job_id", text, MAX_NAME),
        (SubmitJob, JOB, "namespace", text, MAX_NAME),
        (SubmitJob, JOB, "metadata", names, MAX_NAMES),
        (SubmitJob, JOB, "metadata.note", text, MAX_TEXT),
        (SubmitJob, JOB, "label_selector", names, MAX_NAMES),
        (SubmitJob, JOB, "resources", amounts, MAX_NAMES),
        (SubmitJob, JOB, "runtime_env.env_vars", names, MAX_PARTS),
        (SubmitJob, JOB, "runtime_env.pip", list_of, MAX_PARTS),
        (SubmitJob, JOB, "runtime_env.sys_path", list_of, MAX_PARTS),
        (SubmitJob, JOB, "runtime_env.py_modules", list_of, MAX_PARTS),
        (AttachDriver, {}, "metadata", names, MAX_NAMES),
        (AttachDriver, {}, "namespace", text, MAX_NAME),
        (CreateActor, ACTOR, "name", text, MAX_NAME),
        (CreateActor, ACTOR, "namespace", text, MAX_NAME),
        (CreateActor, ACTOR, "class_name", text, MAX_TEXT),
        (CreatePlacementGroup, GROUP, "name", text, MAX_NAME),
        (CreateDetachedObject, OBJECT, "namespace", text, MAX_NAME),
        (Demand, DEMAND, "locality", amounts, 10_000),
        (KvOperation, {"op": "put"}, "key", text, MAX_KEY),
        (KvOperation, {"op": "delete_prefix"}, "prefix", text, MAX_KEY),
        (ListQuery, {}, "cursor", text, MAX_CURSOR),
    ],
)
def test_what_is_too_long_is_named(
    type_: Any, rest: dict[str, Any], field: str, make: Callable[[int], Any], most: int
) -> None:
    codec: Codec[Any] = Codec(type_)
    head, _, member = field.partition(".")

    def document(count: int) -> bytes:
        value = {member: make(count)} if member else make(count)
        return msgspec.json.encode({**rest, head: value})

    assert codec.decode(document(most), JSON)
    with pytest.raises(BadRequestError, match=f"<= {most}") as caught:
        codec.decode(document(most + 1), JSON)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["resources", "label_selector"])
def test_a_name_that_is_too_long_is_refused(field: str) -> None:
    value = {"x" * (MAX_NAME + 1): 1 if field == "resources" else "1"}
    with pytest.raises(BadRequestError, match=f"<= {MAX_NAME}"):
        Codec(SubmitJob).decode(msgspec.json.encode({**JOB, field: value}), JSON)


def test_integers_of_json_that_no_other_encoding_has_are_text_in_the_extra_of_an_error() -> None:
    said = b'{"code": "c", "message": "m", "extra": {"a": [1, {"b": 18446744073709551616}], "c": true}}'
    error = msgspec.json.decode(said, type=ErrorInfo)
    assert error.extra == {"a": [1, {"b": "18446744073709551616"}], "c": True}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(error), type=ErrorInfo) == error
