"""Routes of the key-value store, and of functions and packages (blobs named by content)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from stoker_gcs.api.events import watch
from stoker_gcs.registry.kv.blobs import FUNCTIONS, PACKAGES
from stoker_gcs.registry.kv.registry import RequestKey
from stoker_wire.data.piece_lists import FindMissing, MissingPackages
from stoker_wire.errors import BadRequestError
from stoker_wire.http.principals import NODES, WORK
from stoker_wire.http.server.idempotency import fingerprint
from stoker_wire.http.server.request import Reply
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import while_read
from stoker_wire.messages.common import MAX_NAME
from stoker_wire.messages.control import (
    MAX_KEY,
    KvAdd,
    KvCompareSet,
    KvDelete,
    KvDeletePrefix,
    KvEntry,
    KvGet,
    KvOperation,
    KvPut,
    KvReply,
    Page,
)
from stoker_wire.messages.queries import KvDeleteQuery, KvListQuery, KvPutQuery, WaitQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request
    from stoker_wire.messages.control import Event

T = TypeVar("T")
_NAMED = 5
MAX_BLOB_BYTES = 512 * 1024 * 1024


async def put_key(app: GcsApp, req: Request) -> KvEntry:
    query: KvPutQuery = req.query
    namespace = _namespace(req)
    body = KvPut(
        key=_at_most(MAX_KEY, "key", req.path["key"]),
        value=await req.read(),
        if_absent=query.if_absent,
        if_revision=query.if_revision,
        ttl_s=query.ttl_s,
    )
    entry = (await app.kv.put(namespace, body)).entry
    assert entry is not None
    return entry


async def get_key(app: GcsApp, req: Request) -> Reply:
    """The header X-Stoker-Revision is the sequence number of its last change."""
    req.waiting_for(f"the key {req.path['key']!r} to exist")
    item = await _awaited(
        req,
        req.query.wait_s,
        app.kv.get(req.path["namespace"], req.path["key"], req.query.wait_s),
    )
    headers = {"X-Stoker-Revision": str(item.revision)}
    if item.expires_at_s is not None:
        headers["X-Stoker-Expires-At-S"] = str(item.expires_at_s)
    return Reply(item.value, headers=headers)


async def delete_key(app: GcsApp, req: Request) -> None:
    body = KvDelete(key=req.path["key"], if_revision=req.query.if_revision)
    await app.kv.delete(req.path["namespace"], body)


async def list_keys(app: GcsApp, req: Request) -> Any:
    """Events of a watch have the value of a key that was put, unless it has more than 1024 bytes."""
    if req.query.watch:
        return await watch(app, req, _changes(req.path["namespace"], req.query.prefix))
    return await app.kv.page(req.path["namespace"], req.query)


def _changes(namespace: str, prefix: str) -> Callable[[Event], bool]:
    # Not by the subject: a namespace may hold a slash.
    def matches(event: Event) -> bool:
        payload = event.payload
        return (
            event.kind.startswith("kv.")
            and payload["namespace"] == namespace
            and payload["key"].startswith(prefix)
        )

    return matches


async def change_keys(app: GcsApp, req: Request) -> KvReply:
    """`op` says what is done: put, add, compare_set, delete, delete_prefix or get.

    With an Idempotency-Key a change that is sent again within ten minutes is done once, by whichever
    replica, restarted or not; it gets the reply of the first.
    """
    namespace, body, kv = _namespace(req), req.body, app.kv
    if isinstance(body, KvGet):
        req.waiting_for(f"the keys {', '.join(map(repr, body.keys[:_NAMED]))} to exist")
        return await _awaited(req, body.wait_s, kv.get_several(namespace, body))
    request = await _request_key(req)
    if isinstance(body, KvDeletePrefix):
        req.waiting_for(f"the keys with prefix {body.prefix!r} to be deleted")
        return await kv.delete_prefix(namespace, body, request)
    req.waiting_for(f"its turn to change the key {body.key!r}")
    match body:
        case KvPut():
            return await kv.put(namespace, body, request)
        case KvAdd():
            return await kv.add(namespace, body, request)
        case KvCompareSet():
            return await kv.compare_set(namespace, body, request)
        case _:
            return await kv.delete(namespace, body, request)


async def _awaited(req: Request, wait_s: float, reading: Coroutine[Any, Any, T]) -> T:
    """Return what is read; a wait ends when nobody listens any more, or this service stops."""
    return await (while_read(req, reading) if wait_s > 0 else reading)


def _namespace(req: Request) -> str:
    return _at_most(MAX_NAME, "namespace", req.path["namespace"])


def _at_most(length: int, field: str, text: str) -> str:
    if len(text) > length:
        raise BadRequestError(
            f"{field}: expected at most {length} characters, got {len(text)}", field=field
        )
    return text


async def _request_key(req: Request) -> RequestKey | None:
    if req.idempotency_key is None:
        return None
    scope = f"{req.principal} {req.http.rel_url.raw_path_qs} {req.idempotency_key}"
    return RequestKey(fingerprint(scope.encode()).hex(), fingerprint(await req.read()))


async def put_function(app: GcsApp, req: Request) -> None:
    await app.blobs.put(FUNCTIONS, req.path["hash"], await req.read())


async def get_function(app: GcsApp, req: Request) -> bytes:
    return await app.blobs.get(FUNCTIONS, req.path["hash"])


async def check_function(app: GcsApp, req: Request) -> web.Response:
    return _size(await app.blobs.size(FUNCTIONS, req.path["hash"]))


async def put_package(app: GcsApp, req: Request) -> None:
    await app.blobs.put(PACKAGES, req.path["hash"], await req.read())


async def get_package(app: GcsApp, req: Request) -> bytes:
    return await app.blobs.get(PACKAGES, req.path["hash"])


async def check_package(app: GcsApp, req: Request) -> web.Response:
    return _size(await app.blobs.size(PACKAGES, req.path["hash"]))


async def find_missing_packages(app: GcsApp, req: Request) -> MissingPackages:
    """Those that are there are in use from here on, as by HEAD of each."""
    return MissingPackages(hashes=await app.blobs.missing(PACKAGES, req.body.hashes))


def _size(nbytes: int | None) -> web.Response:
    if nbytes is None:
        return web.Response(status=404)
    return web.Response(headers={"X-Stoker-Nbytes": str(nbytes)})


ROUTES = (
    Route(
        "PUT",
        "/v1/kv/{namespace}/{key:.+}",
        put_key,
        raw_body=True,
        query=KvPutQuery,
        reply=KvEntry,
        roles=WORK | NODES,
        summary="Set key",
    ),
    Route(
        "POST",
        "/v1/kv/{namespace}",
        change_keys,
        body=KvOperation,
        reply=KvReply,
        # Kept by the registry in the transaction of the change itself.
        idempotency=False,
        roles=WORK | NODES,
        summary="Change keys by comparison, count, delete by prefix; read several keys",
    ),
    Route(
        "GET",
        "/v1/kv/{namespace}/{key:.+}",
        get_key,
        query=WaitQuery,
        roles=WORK | NODES,
        summary="Get value of key; wait until it exists",
    ),
    Route(
        "DELETE",
        "/v1/kv/{namespace}/{key:.+}",
        delete_key,
        query=KvDeleteQuery,
        roles=WORK | NODES,
        summary="Delete key",
    ),
    Route(
        "GET",
        "/v1/kv/{namespace}",
        list_keys,
        query=KvListQuery,
        reply=Page[KvEntry],
        roles=WORK | NODES,
        summary="List keys by prefix, or watch them",
    ),
    Route(
        "PUT",
        "/v1/functions/{hash}",
        put_function,
        raw_body=True,
        max_body_bytes=MAX_BLOB_BYTES,
        roles=WORK,
        summary="Store function",
    ),
    Route(
        "GET",
        "/v1/functions/{hash}",
        get_function,
        roles=WORK | NODES,
        summary="Get function",
    ),
    Route(
        "HEAD",
        "/v1/functions/{hash}",
        check_function,
        roles=WORK | NODES,
        summary="Check whether function is stored",
    ),
    Route(
        "PUT",
        "/v1/packages/{hash}",
        put_package,
        raw_body=True,
        max_body_bytes=MAX_BLOB_BYTES,
        roles=WORK,
        cost="expensive",
        summary="Store package",
    ),
    Route(
        "GET",
        "/v1/packages/{hash}",
        get_package,
        roles=WORK | NODES,
        summary="Get package",
    ),
    Route(
        "HEAD",
        "/v1/packages/{hash}",
        check_package,
        roles=WORK | NODES,
        summary="Check whether package is stored",
    ),
    Route(
        "POST",
        "/v1/packages/missing",
        find_missing_packages,
        body=FindMissing,
        reply=MissingPackages,
        idempotency=False,  # It is the same at any time.
        roles=WORK,
        summary="Find packages that are not stored",
    ),
)
