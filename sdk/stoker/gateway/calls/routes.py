"""The routes of callers: calls, and the objects that they hold by reference."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from stoker.gateway.calls.refs import MAX_PUT_NBYTES
from stoker.runtime.process.tracing.context import TRACES
from stoker_wire.errors import BadRequestError, GetTimeoutError, UnsupportedEncodingError
from stoker_wire.http.codec import BYTES, JSON, encode_json
from stoker_wire.http.gateway.calls import (
    CALLS_PATH,
    REFS_PATH,
    CallReply,
    CallRequest,
    CancelCall,
    FunctionsQuery,
    HeldRef,
    HeldRefs,
    PutQuery,
    RefWaitQuery,
    RegisteredFunctions,
    WaitedRefs,
    WaitRefs,
)
from stoker_wire.http.principals import WORK
from stoker_wire.http.problems import problem_response
from stoker_wire.http.server.request import Reply
from stoker_wire.http.server.routes import Route

if TYPE_CHECKING:
    from stoker.gateway.calls.caller import Caller
    from stoker_wire.http.server.request import Request
    from stoker_wire.http.server.service import Service

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


async def call(caller: Caller, req: Request) -> Reply | web.Response:
    """The answer has the result; of a function that returns bytes it is these, as they are.

    With `async` it is 202 with a reference.
    """
    if "msgpack" in req.http.headers.get("Content-Type", ""):
        raise UnsupportedEncodingError(
            "arguments are JSON\nsend Content-Type: application/json", field="Content-Type"
        )
    req.lift_deadline()  # a call has one of its own
    with TRACES.request(req.http.headers, f"POST {CALLS_PATH}"):
        return await _call(caller, req)


async def _call(caller: Caller, req: Request) -> Reply | web.Response:
    if req.body.is_async:
        return Reply(await caller.begin(req.body), status=202)
    is_json, data = await caller.call(req.body)
    if is_json:
        return web.Response(body=b'{"result":%b}' % data, headers={"Content-Type": JSON})
    return web.Response(body=data, headers={"Content-Type": BYTES})


async def cancel_call(caller: Caller, req: Request) -> HeldRef:
    return caller.cancel(req.body)


async def list_functions(caller: Caller, req: Request) -> RegisteredFunctions:
    """Those of a namespace: of the token's user, unless another is given."""
    items = await caller.targets.functions(req.query.namespace, req.query.name)
    return RegisteredFunctions(items=items)


async def put_object(caller: Caller, req: Request) -> Reply:
    """The body is JSON if its Content-Type says so, else bytes."""
    is_json = req.http.headers.get("Content-Type", BYTES).partition(";")[0].strip() == JSON
    held = await caller.put(await req.read(), is_json=is_json, ttl_s=req.query.ttl_s)
    return Reply(held, status=201)


async def list_refs(caller: Caller, req: Request) -> HeldRefs:
    return HeldRefs(items=tuple(held.record() for held in caller.refs))


async def get_ref(caller: Caller, req: Request) -> HeldRef:
    held = caller.refs.find(req.path["ref"])
    if req.query.wait_s:
        await caller.wait([held], 1, req.query.wait_s)
    return held.record()


async def get_value(caller: Caller, req: Request) -> web.Response:
    """JSON or bytes, as its Content-Type says; `Range: bytes=0-99` is a part of it. What the call raised is a
    problem document.
    """
    held = caller.refs.find(req.path["ref"])
    if not await caller.wait([held], 1, req.query.wait_s):
        raise GetTimeoutError(
            f"{held.ref.id} is not there yet\n{caller.why(held.ref)}\n"
            "wait for it: ?wait_s=20, or POST /v1/refs/wait",
            field="wait_s",
        )
    is_json, data = await caller.refs.value(held.ref, req.deadline_s)
    held.is_json = is_json
    headers = {"Content-Type": JSON if is_json else BYTES, "Accept-Ranges": "bytes"}
    asked = _RANGE.fullmatch(req.http.headers.get("Range", ""))
    if asked is None or not any(asked.groups()):
        return web.Response(body=data, headers=headers)
    first, last = _span(asked[1], asked[2], len(data))
    if first > last:
        error = BadRequestError(
            f"Range: {asked[0]!r} is not within the {len(data)} bytes", field="Range"
        )
        status, headers["Content-Type"], body = problem_response(error, status=416)
        return web.Response(
            body=body, status=status, headers={**headers, "Content-Range": f"bytes */{len(data)}"}
        )
    headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
    return web.Response(body=data[first : last + 1], status=206, headers=headers)


def _span(first: str, last: str, nbytes: int) -> tuple[int, int]:
    """Return the first and the last byte of a range; the last is before the first if there is none."""
    if not first:
        return max(0, nbytes - int(last)), nbytes - 1
    return int(first), min(int(last), nbytes - 1) if last else nbytes - 1


async def wait_refs(caller: Caller, req: Request) -> WaitedRefs:
    body: WaitRefs = req.body
    if body.num_returns > len(body.refs):
        raise BadRequestError(
            f"num_returns: {body.num_returns} is more than the {len(body.refs)} refs given",
            field="num_returns",
        )
    req.lift_deadline()
    refs = [caller.refs.find(ref, "refs") for ref in body.refs]
    await caller.wait(refs, body.num_returns, body.timeout_s)
    records = [held.record() for held in refs]
    return WaitedRefs(
        ready=tuple(one for one in records if one.state != "PENDING"),
        pending=tuple(one for one in records if one.state == "PENDING"),
    )


async def free_object(caller: Caller, req: Request) -> None:
    """A call that is not finished is cancelled."""
    caller.refs.free(req.path["ref"])


async def get_calls_openapi(service: Service, _: Request) -> web.Response:
    """The other routes of a gateway are those of the gcs: `/openapi.json`."""
    return web.Response(body=encode_json(calls_document(service)), headers={"Content-Type": JSON})


def calls_document(service: Service) -> dict[str, Any]:
    """Return the OpenAPI document of what callers answer, without the probes that every service has."""
    from stoker_wire.http.server.openapi.document import document

    routes = [one for one in service.routes if one.path.startswith((CALLS_PATH, REFS_PATH))]
    return document(service.name, service.version, routes)


ROUTES = (
    Route(
        "POST",
        CALLS_PATH,
        call,
        body=CallRequest,
        reply=CallReply,
        replies={202: HeldRef},
        roles=WORK,
        summary="Call function or method of actor",
    ),
    Route(
        "POST",
        f"{CALLS_PATH}/cancel",
        cancel_call,
        body=CancelCall,
        reply=HeldRef,
        roles=WORK,
        summary="Cancel call",
    ),
    Route(
        "GET",
        f"{CALLS_PATH}/functions",
        list_functions,
        query=FunctionsQuery,
        reply=RegisteredFunctions,
        roles=WORK,
        summary="List registered functions",
    ),
    Route(
        "POST",
        REFS_PATH,
        put_object,
        raw_body=True,
        max_body_bytes=MAX_PUT_NBYTES,
        query=PutQuery,
        replies={201: HeldRef},
        roles=WORK,
        summary="Put object",
    ),
    Route("GET", REFS_PATH, list_refs, reply=HeldRefs, roles=WORK, summary="List held objects"),
    Route(
        "POST",
        f"{REFS_PATH}/wait",
        wait_refs,
        body=WaitRefs,
        reply=WaitedRefs,
        roles=WORK,
        summary="Wait for several objects",
    ),
    Route(
        "GET",
        f"{REFS_PATH}/{{ref}}",
        get_ref,
        query=RefWaitQuery,
        reply=HeldRef,
        roles=WORK,
        summary="Get state of object; wait until it is there",
    ),
    Route(
        "GET",
        f"{REFS_PATH}/{{ref}}/value",
        get_value,
        query=RefWaitQuery,
        roles=WORK,
        summary="Get value of object, or a range of it",
    ),
    Route("DELETE", f"{REFS_PATH}/{{ref}}", free_object, roles=WORK, summary="Free object"),
)

DOCUMENT_ROUTES = (
    Route(
        "GET",
        f"{CALLS_PATH}/openapi.json",
        get_calls_openapi,
        media_type=JSON,
        roles=WORK,
        summary="Get routes of calls and refs as OpenAPI 3.1",
    ),
)
