"""What a nodelet says while the gcs does not admit it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet import membership
from stoker_nodelet.core import State
from stoker_nodelet.membership import Membership
from stoker_wire.errors import BadRequestError, ConflictError, StokerError, UnavailableError
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

    async def call(self, method: str, path: str, body: object, *, reply: object) -> RegisteredNode:
        if self.script:
            raise self.script.pop(0)
        return RegisteredNode(node_id="n_1", incarnation=1, heartbeat_s=0.01)


@pytest.fixture
def levels(caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """Have a node registered by the script; return the levels of what it said."""

    async def said(*script: StokerError) -> list[str]:
        workers = SimpleNamespace(
            kernels=SimpleNamespace(warm=()), dispatch=lambda event: None, state=State()
        )
        with caplog.at_level(logging.INFO, "stoker_nodelet.membership"):
            node = Membership(
                NODE, Gcs(*script), workers, None, lambda there: None, heartbeat_s=0.01
            )  # type: ignore[arg-type]
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
