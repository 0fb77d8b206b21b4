"""An example is a body that its route takes, by the type and by the schema in the document."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from scripts.operations import documents
from stoker_wire.http.server.openapi.examples import BODIES
from stoker_wire.messages.work import SubmitJob

DOCUMENTS = documents()


def _validator(schema: dict[str, Any], document: dict[str, Any]) -> Any:
    whole = {**schema, "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(json.loads(json.dumps(whole)))


@pytest.mark.parametrize("type_", BODIES, ids=str)
def test_an_example_is_of_its_type(type_: Any) -> None:
    msgspec.json.decode(msgspec.json.encode(BODIES[type_]), type=type_)


def test_every_example_fits_the_schema_beside_it() -> None:
    seen = 0
    for document in DOCUMENTS.values():
        for ways in document["paths"].values():
            for operation in ways.values():
                bodies = operation.get("requestBody", {}).get("content", {}).values()
                for place in (*operation["parameters"], *bodies):
                    if "example" in place:
                        seen += 1
                        _validator(place["schema"], document).validate(place["example"])
    assert seen > len(BODIES)


def test_every_example_is_shown() -> None:
    shown = [
        content["example"]
        for document in DOCUMENTS.values()
        for ways in document["paths"].values()
        for operation in ways.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        if "example" in content
    ]
    assert BODIES[SubmitJob] in shown
    assert [one for one in BODIES.values() if one not in shown] == []
