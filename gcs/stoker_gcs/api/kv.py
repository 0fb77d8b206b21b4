"""Routes of the key-value store, and of functions and packages (blobs named by content)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from stoker_gcs.registry.kv import FUNCTIONS, PACKAGES
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.control import KvEntry, Page
from stoker_wire.messages.queries import KvListQuery, KvPutQuery, WaitQuery

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request

MAX_BLOB_BYTES = 512 * 1024 * 1024


async def put_key(app: GcsApp, req: Request) -> KvEntry:
    namespace, key = req.path["namespace"], req.path["key"]
    value = await req.read()
    entry = await app.kv.put(namespace, key, value, if_absent=req.query.if_absent)
    if entry is None:
        raise ConflictError(f"the key {key!r} exists in namespace {namespace!r}")
    return entry


async def get_key(app: GcsApp, req: Request) -> bytes:
    req.waiting_for(f"the key {req.path['key']!r} to exist")
    return await app.kv.get(req.path["namespace"], req.path["key"], req.query.wait_s)


async def delete_key(app: GcsApp, req: Request) -> None:
    if not await app.kv.delete(req.path["namespace"], req.path["key"]):
        raise NotFoundError(
            f"there is no key {req.path['key']!r} in namespace {req.path['namespace']!r}"
        )


async def list_keys(app: GcsApp, req: Request) -> Page[KvEntry]:
    return await app.kv.page(req.path["namespace"], req.query.prefix, req.query)


async def put_blob(kind: str, app: GcsApp, req: Request) -> None:
    await app.blobs.put(kind, req.path["hash"], await req.read())


async def get_blob(kind: str, app: GcsApp, req: Request) -> bytes:
    return await app.blobs.get(kind, req.path["hash"])


async def head_blob(kind: str, app: GcsApp, req: Request) -> web.Response:
    nbytes = await app.blobs.size(kind, req.path["hash"])
    if nbytes is None:
        return web.Response(status=404)
    return web.Response(headers={"X-Stoker-Nbytes": str(nbytes)})


def _blob_routes(kind: str, path: str) -> tuple[Route, ...]:
    return (
        Route(
            "PUT",
            path,
            partial(put_blob, kind),
            raw_body=True,
            max_body_bytes=MAX_BLOB_BYTES,
            summary=f"Store {kind}",
        ),
        Route("GET", path, partial(get_blob, kind), summary=f"Get {kind}"),
        Route("HEAD", path, partial(head_blob, kind), summary=f"Check whether {kind} is stored"),
    )


ROUTES = (
    Route(
        "PUT",
        "/v1/kv/{namespace}/{key:.+}",
        put_key,
        raw_body=True,
        query=KvPutQuery,
        reply=KvEntry,
        summary="Set key",
    ),
    Route(
        "GET",
        "/v1/kv/{namespace}/{key:.+}",
        get_key,
        query=WaitQuery,
        summary="Get value of key; wait until it exists",
    ),
    Route("DELETE", "/v1/kv/{namespace}/{key:.+}", delete_key, summary="Delete key"),
    Route(
        "GET",
        "/v1/kv/{namespace}",
        list_keys,
        query=KvListQuery,
        reply=Page[KvEntry],
        summary="List keys by prefix",
    ),
    *_blob_routes(FUNCTIONS, "/v1/functions/{hash}"),
    *_blob_routes(PACKAGES, "/v1/packages/{hash}"),
)
