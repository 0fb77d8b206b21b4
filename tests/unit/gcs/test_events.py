"""The catalogue of events: each kind has an emitter and a payload type, and the API lists all of them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import stoker_gcs
from stoker_gcs.api.routes import ROUTES
from stoker_gcs.app import build_app
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.store.memory import MemoryStore
from stoker_wire.http.principals import ROOT
from stoker_wire.http.server.openapi.document import document
from stoker_wire.http.server.service import Service
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.control import Campaign, CreateToken, Event, KvDelete, KvPut, Leader
from stoker_wire.messages.events import PAYLOADS, EventKind, KvChange, payload_as, payload_of
from stoker_wire.messages.groups import (
    Bundle,
    BundlePlacement,
    GroupState,
    GroupStrategy,
    PlacementGroup,
)
from stoker_wire.messages.work import Job, SubmitJob
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = sorted(Path(stoker_gcs.__file__).parent.rglob("*.py"))


def kinds_in(node: ast.AST) -> Iterator[str]:
    """The members of EventKind that an expression names."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "EventKind"
        ):
            yield inner.attr


def emitted() -> set[str]:
    """The kinds that some code gives to an event: in the call, or by a function or table that it uses."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("event", "Transition"):
                    for argument in node.args:
                        found.update(kinds_in(argument))
            elif (
                isinstance(node, ast.Return) and node.value is not None and "rules" in path.stem
            ) or (isinstance(node, ast.Assign) and "rules" in path.stem):
                found.update(kinds_in(node.value))
    return found


def test_every_kind_has_an_emitter() -> None:
    assert emitted() == {kind.name for kind in EventKind}


def test_no_kind_is_spelt_out_in_the_gcs() -> None:
    spelt = {kind.value for kind in EventKind}
    broken = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in spelt
    ]
    assert not broken


def test_every_kind_has_a_payload_type_and_an_entity_has_one() -> None:
    assert set(PAYLOADS) == set(EventKind)
    types: dict[str, set[type]] = {}
    for kind, type_ in PAYLOADS.items():
        types.setdefault(kind.partition(".")[0], set()).add(type_)
    assert all(len(of_entity) == 1 for of_entity in types.values()), types


def test_the_document_of_the_events_route_lists_the_kinds() -> None:
    service = Service("gcs", Settings(), token="t")
    service.add_routes(ROUTES, object())
    operation = document("gcs", "1", service.routes)["paths"]["/v1/events"]["get"]
    [kind] = [p["schema"] for p in operation["parameters"] if p["name"] == "kind"]
    assert kind["examples"] == [kind.value for kind in EventKind]


async def test_payloads_decode_as_the_catalogue_says() -> None:
    store = MemoryStore()
    async with Background("work") as work, Background("writers") as writers:
        app = build_app(store, MemoryEphemeralStore(), Settings(), TokenSigner("token"), work)
        writers.spawn(app.state.writer.changes.run(), name="changes")
        await app.load()
        await app.jobs.submit(SubmitJob(entrypoint="x", job_id="job_1"), key=None)
        await app.kv.put("ns", KvPut(key="key", value=b"value"))
        await app.kv.delete("ns", KvDelete(key="key"))
        await app.election.campaign("scheduler", Campaign(holder="p_1", url="http://h:1"))
        token = await app.tokens.create(CreateToken(name="ci"), by=ROOT, key=None)
        await app.tokens.revoke(token.token_id)
        events = await store.events(0)
    assert [event.kind for event in events] == [
        EventKind.JOB_SUBMITTED,
        EventKind.KV_PUT,
        EventKind.KV_DELETED,
        EventKind.LEADER_ELECTED,
        EventKind.TOKEN_CREATED,
        EventKind.TOKEN_REVOKED,
    ]
    for event in events:
        assert type(event.kind) is str
        assert isinstance(payload_of(event), PAYLOADS[EventKind(event.kind)])
    put, removed = payload_as(events[1], KvChange), payload_as(events[2], KvChange)
    assert put == KvChange(namespace="ns", key="key", nbytes=5, value=b"value")
    assert removed == KvChange(namespace="ns", key="key", deleted=True)
    assert payload_as(events[3], Job) is None
    assert payload_as(events[3], Leader) is not None


def test_a_kind_of_a_newer_gcs_is_of_its_entity_and_has_no_payload_type() -> None:
    leader = Leader(name="x", holder="p", url="u", epoch=1, expires_at_s=0.0)
    event = Event(
        seq=1, at_s=0.0, kind="leader.moved", subject="x", payload=msgspec.to_builtins(leader)
    )
    assert payload_as(event, Leader) == leader
    with pytest.raises(ValueError, match=r"leader\.moved"):
        payload_of(event)


def test_a_payload_that_came_as_json_is_the_record_that_was_sent() -> None:
    placed = BundlePlacement(lease_id="l_1", node_id="n_1", node_incarnation=1)
    group = PlacementGroup(
        group_id="pg_1",
        job_id="job_1",
        state=GroupState.CREATED,
        strategy=GroupStrategy.PACK,
        bundles=(Bundle(resources={"CPU": 1.0}),),
        placements={0: placed},
    )
    event = Event(seq=1, at_s=1.0, kind="placement_group.placed", subject="pg_1")
    for encode, decode in (
        (msgspec.json.encode, msgspec.json.decode),
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
    ):
        payload = decode(encode(group))
        assert payload_as(msgspec.structs.replace(event, payload=payload), PlacementGroup) == group
