"""Routes of events, leadership, keys, functions, packages and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from stoker_gcs.api.events import matcher, page, watch
from stoker_gcs.api.queries import KvListQuery, KvPutQuery, ResignQuery, WaitQuery
from stoker_gcs.explain.id_prefixes import find_ids
from stoker_gcs.registry.kv import FUNCTIONS, PACKAGES
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.messages.control import (
    Campaign,
    CreateToken,
    Event,
    EventQuery,
    IdMatches,
    IdQuery,
    KvEntry,
    Leader,
    ListQuery,
    Page,
    Token,
)

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.request import Handler
    from stoker_wire.http.server import Request, Service

MAX_BLOB_BYTES = 512 * 1024 * 1024


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""
    _events(service, parts)
    _ids(service, parts)
    _leaders(service, parts)
    _keys(service, parts)
    _blobs(service, parts, FUNCTIONS, "/v1/functions/{hash}")
    _blobs(service, parts, PACKAGES, "/v1/packages/{hash}")
    _tokens(service, parts)


def _events(service: Service, parts: Parts) -> None:
    async def events(req: Request) -> Any:
        query = req.query
        if not query.watch:
            return await page(parts.truth, query)
        matches = matcher(query.kind, query.subject)
        return await watch(parts.truth, req, query.since, matches, service.settings.bookmark_s)

    service.route(
        "GET",
        "/v1/events",
        events,
        query=EventQuery,
        reply=Page[Event],
        summary="The log: one page, or a watch from ?since on",
    )


def _ids(service: Service, parts: Parts) -> None:
    async def ids(req: Request) -> IdMatches:
        return await find_ids(parts, req.query)

    service.route(
        "GET",
        "/v1/ids",
        ids,
        query=IdQuery,
        reply=IdMatches,
        summary="Nodes, jobs, tasks, actors and workers whose id begins so",
    )


def _leaders(service: Service, parts: Parts) -> None:
    async def campaign(req: Request) -> Leader:
        return await parts.leaders.campaign(req.path["name"], req.body)

    async def current(req: Request) -> Leader:
        return await parts.leaders.current(req.path["name"])

    async def resign(req: Request) -> None:
        await parts.leaders.resign(req.path["name"], req.query.holder)

    path = "/v1/leaders/{name}"
    service.route(
        "POST",
        path,
        campaign,
        body=Campaign,
        reply=Leader,
        idempotency=False,
        summary="Lead, or go on leading; 409 names who leads instead",
    )
    service.route("GET", path, current, reply=Leader, summary="Who leads; 503 while nobody does")
    service.route("DELETE", path, resign, query=ResignQuery, summary="Give up leading")


def _keys(service: Service, parts: Parts) -> None:
    async def put(req: Request) -> KvEntry:
        namespace, key = req.path["namespace"], req.path["key"]
        value = await req.read()
        entry = await parts.kv.put(namespace, key, value, if_absent=req.query.if_absent)
        if entry is None:
            raise ConflictError(f"the key {key!r} exists in namespace {namespace!r}")
        return entry

    async def get(req: Request) -> bytes:
        req.waiting_for(f"the key {req.path['key']!r} to exist")
        return await parts.kv.get(req.path["namespace"], req.path["key"], req.query.wait_s)

    async def delete(req: Request) -> None:
        if not await parts.kv.delete(req.path["namespace"], req.path["key"]):
            raise NotFoundError(
                f"there is no key {req.path['key']!r} in namespace {req.path['namespace']!r}"
            )

    async def listing(req: Request) -> Page[KvEntry]:
        return await parts.kv.page(req.path["namespace"], req.query.prefix, req.query)

    path = "/v1/kv/{namespace}/{key:.+}"
    service.route(
        "PUT", path, put, raw_body=True, query=KvPutQuery, reply=KvEntry, summary="Set a key"
    )
    service.route("GET", path, get, query=WaitQuery, summary="A key's value; waits for it to exist")
    service.route("DELETE", path, delete, summary="Remove a key")
    service.route(
        "GET",
        "/v1/kv/{namespace}",
        listing,
        query=KvListQuery,
        reply=Page[KvEntry],
        summary="Keys by prefix",
    )


def _blobs(service: Service, parts: Parts, kind: str, path: str) -> None:
    async def put(req: Request) -> None:
        await parts.blobs.put(kind, req.path["hash"], await req.read())

    async def get(req: Request) -> bytes:
        return await parts.blobs.get(kind, req.path["hash"])

    async def head(req: Request) -> web.Response:
        nbytes = await parts.blobs.exists(kind, req.path["hash"])
        if nbytes is None:
            return web.Response(status=404)
        return web.Response(headers={"X-Stoker-Nbytes": str(nbytes)})

    service.route(
        "PUT", path, put, raw_body=True, max_body_bytes=MAX_BLOB_BYTES, summary=f"Keep a {kind}"
    )
    handlers: tuple[tuple[str, Handler], ...] = (("GET", get), ("HEAD", head))
    for method, handler in handlers:
        what = f"A {kind}'s bytes" if method == "GET" else f"Whether a {kind} is kept"
        service.route(method, path, handler, summary=what)


def _tokens(service: Service, parts: Parts) -> None:
    async def create(req: Request) -> Token:
        return await parts.tokens.create(req.body, key=req.idempotency_key)

    async def listing(req: Request) -> Page[Token]:
        return await parts.tokens.page(req.query)

    async def revoke(req: Request) -> Token:
        return await parts.tokens.revoke(req.path["token_id"])

    service.route(
        "POST",
        "/v1/tokens",
        create,
        body=CreateToken,
        reply=Token,
        # The secret is derived again for a retry; it must not lie in a store of replies.
        idempotency=False,
        summary="Make a token; shows its secret once",
    )
    service.route(
        "GET", "/v1/tokens", listing, query=ListQuery, reply=Page[Token], summary="List tokens"
    )
    service.route("DELETE", "/v1/tokens/{token_id}", revoke, reply=Token, summary="Revoke a token")
