"""What a nodelet says while the gcs does not admit it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet import membership
from stoker_nodelet.core import State
from stoker_nodelet.membership import Complaint, Membership
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    FencedError,
    ProtocolError,
    StokerError,
    UnavailableError,
)
from stoker_wire.messages.cluster import RegisteredNode, RegisterNode

if TYPE_CHECKING:
    from collections.abc import Callable

NODE = RegisterNode(
    node_id="n_1", url="http://host:7620", unix="", hostname="h", host_id="h", pid=1, resources={}
)


class Gcs:
    """Answers registrations from a script."""

    def __init__(self, *script: StokerError) -> None:
        self.script = list(script)

    async def call(
        self, method: str, path: str, body: object, *, reply: object = None, **_: object
    ) -> RegisteredNode:
        if self.script:
            raise self.script.pop(0)
        return RegisteredNode(node_id="n_1", incarnation=1, heartbeat_s=0.01)


def member(*script: StokerError) -> Membership:
    """A node whose registrations and heartbeats are answered by the script."""
    workers = SimpleNamespace(
        kernels=SimpleNamespace(warm=()), dispatch=lambda event: None, state=State()
    )
    return Membership(NODE, Gcs(*script), workers, None, lambda there: None, heartbeat_s=0.01)  # type: ignore[arg-type]


@pytest.fixture
def levels(caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """Have a node registered by the script; return the levels of what it said."""

    async def said(*script: StokerError) -> list[str]:
        with caplog.at_level(logging.INFO, "stoker_nodelet.membership"):
            node = member(*script)
            await node._register()
        assert node.joined.is_set()
        return [record.levelname for record in caplog.records]

    return said


async def test_its_own_former_life_is_no_error(levels: Callable[..., Any]) -> None:
    assert await levels(*[ConflictError("url: http://host:7620 is in use")] * 2) == ["INFO"] * 2


async def test_another_node_at_its_url_is_one_error(
    levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_READMISSION_S", 0.0)
    assert await levels(*[ConflictError("url: http://host:7620 is in use")] * 2) == ["ERROR"]


async def test_what_cannot_be_admitted_is_an_error_at_once(levels: Callable[..., Any]) -> None:
    wrong, away = BadRequestError("resources.CPU: too many"), UnavailableError("gcs away")
    assert await levels(wrong, away, wrong) == ["ERROR", "WARNING"]


TOO_FAR = ProtocolError(
    "nodelet n_1 speaks protocol 3.3, gcs speaks 3.1\n"
    "components may be one minor version apart: upgrade gcs"
)


async def test_a_version_too_far_apart_is_one_error_at_once_that_names_the_cure(
    levels: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert await levels(*[TOO_FAR] * 4) == ["ERROR"]
    assert "upgrade gcs" in caplog.text


async def test_a_gcs_that_is_upgraded_too_far_is_one_error_while_heartbeats_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def at_once(_: Membership) -> None:
        """The next heartbeat is due."""

    monkeypatch.setattr(Membership, "usage", lambda _: {})
    monkeypatch.setattr(Membership, "_wait_for_heartbeat", at_once)
    node = member(*[TOO_FAR] * 4, FencedError("over"))
    with caplog.at_level(logging.INFO, "stoker_nodelet.membership"), pytest.raises(FencedError):
        await node._send_heartbeats()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_what_lasts_is_said_again_ever_more_rarely_and_a_change_at_once() -> None:
    complaint = Complaint()
    said = [at_s for at_s in range(60) if complaint.is_due("refused", float(at_s))]
    assert said == [0, 1, 3, 7, 15, 25, 35, 45, 55]
    assert complaint.is_due("refused otherwise", 60.0)
    complaint.end()
    assert complaint.is_due("refused otherwise", 60.1)
