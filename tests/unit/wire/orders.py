"""A small service that takes orders: what the tests of services ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from stoker_wire.messages.common import Message, Record

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster


class Part(Message):
    weight: float = 1.0
    tags: dict[str, int] = {}


class Order(Message):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    resources: dict[str, float] = {}
    parts: tuple[Part, ...] = ()
    extra: Part | None = None


class Receipt(Record):
    name: str
    count: int
    path: str = ""


async def take(req: Request) -> Receipt:
    return Receipt(name=req.body.name, count=req.body.count, path=req.path.get("id", ""))


def orders(cluster: Cluster, **changes: Any) -> Service:
    service = cluster.service(**changes)
    service.route("POST", "/v1/orders/{id}", take, body=Order, reply=Receipt, summary="Take.")
    return service
