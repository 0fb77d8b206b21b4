"""Every route of every service takes the tokens of its roles and of no other: each cell is called."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from scripts.docs import SERVICE_ROUTES, roles_page
from stoker_wire.http.principals import Principal
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.service import Request, Service
from stoker_wire.messages.common import Empty, Role
from stoker_wire.settings import Settings

SECRET = "secret-of-the-test"


async def _reached(_: object, __: Request, *___: object) -> Empty:
    return Empty()


def _token(service: Service, role: Role) -> str:
    principal = Principal(roles=frozenset({role}), name="someone", namespaces=("*",))
    return service.tokens.user(principal, issued_at_s=0.0)


@pytest.mark.parametrize("name", sorted(SERVICE_ROUTES))
async def test_every_route_takes_its_roles_and_no_other(name: str) -> None:
    service = Service(name, Settings(), token=SECRET)
    table = SERVICE_ROUTES[name]
    # What a handler does is not asked here, only whether it is reached.
    bare: dict[str, Any] = {"body": None, "query": None, "reply": None, "raw_body": True}
    for route in table:
        if isinstance(route, Route):
            plain = dataclasses.replace(route, handler=_reached, stream=False, **bare)
        else:
            plain = Route("GET", route.path, _reached, summary="", roles=route.roles)
        service.add_routes((plain,), None)
    await service.start("127.0.0.1", 0)
    service.ready()
    wrong: list[str] = []
    try:
        async with aiohttp.ClientSession(service.url) as session:
            for role in Role:
                headers = {"Authorization": f"Bearer {_token(service, role)}"}
                for route in table:
                    method = route.method if isinstance(route, Route) else "GET"
                    path = re.sub(r"{[^}]*}", "x_1", route.path)
                    async with session.request(method, path, headers=headers) as reply:
                        status = reply.status
                    if status != (200 if role in route.roles else 403):
                        wrong.append(f"{role}: {method} {route.path} answered {status}")
    finally:
        await service.stop(grace_s=0.2)
        await asyncio.sleep(0)
    assert not wrong, wrong


def test_the_table_in_the_docs_is_current() -> None:
    from scripts.docs import ROLES

    assert ROLES.read_text() == roles_page(), "run: make docs"


def test_nobody_but_services_and_admins_may_be_a_node_or_lead() -> None:
    people = {Role.USER, Role.JOB, Role.VIEWER}
    for method, path in (
        ("POST", "/v1/nodes"),
        ("POST", "/v1/nodes/{node_id}/heartbeat"),
        ("POST", "/v1/nodes/{node_id}/leave"),
        ("POST", "/v1/leaders/{name}"),
        ("DELETE", "/v1/leaders/{name}"),
        ("POST", "/v1/workers/exited"),
        ("POST", "/v1/tokens"),
    ):
        (route,) = [
            one
            for one in SERVICE_ROUTES["gcs"]
            if isinstance(one, Route) and (one.method, one.path) == (method, path)
        ]
        assert not route.roles & people, path


def test_services_have_their_routes_from_tables_which_name_the_roles() -> None:
    """``Service.route`` leaves the roles out by default, for tests."""
    root = Path(__file__).parents[2]
    calls = [
        str(path.relative_to(root))
        for package in ("gcs", "scheduler", "nodelet", "sdk", "wire")
        for path in (root / package).rglob("*.py")
        if re.search(r"service\.(route|websocket)\(", path.read_text())
    ]
    assert calls == []
