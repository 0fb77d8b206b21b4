"""A request's body: counted as it is decoded, and never inflated."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import UnsupportedEncodingError
from stoker_wire.http.server.service import Reply, Request

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Service
    from tests.unit.wire.conftest import Cluster

LIMIT = 2000
LONG = b" " * (100 * LIMIT)


def lengths(cluster: Cluster) -> Service:
    """A service that says how long a body is."""
    service = cluster.service(max_body_bytes=LIMIT)

    async def measure(req: Request) -> Reply:
        return Reply(len(await req.read()))

    async def ignore(req: Request) -> int:
        return 0

    service.route("PUT", "/v1/length", measure, raw_body=True, summary="Measure.")
    service.route("POST", "/v1/nothing", ignore, summary="Ignore.")
    return service


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(LONG)), ("deflate", zlib.compress(LONG)), ("br", b"x"), ("X", b"x")],
)
@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/length"), ("POST", "/v1/nothing")])
async def test_a_compressed_body_is_refused_as_it_is(
    cluster: Cluster, encoding: str, body: bytes, method: str, path: str
) -> None:
    assert len(body) < LIMIT
    service = await cluster.start(lengths(cluster))
    session = cluster.client(service).session
    headers = {"Content-Encoding": encoding}
    async with session.request(method, service.url + path, data=body, headers=headers) as reply:
        problem = await reply.json(content_type=None)
    assert (reply.status, problem["code"]) == (415, UnsupportedEncodingError.code)
    assert (problem["field"], problem["title"]) == ("Content-Encoding", "Unsupported media type")


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "Identity"}])
async def test_a_body_as_long_as_the_limit_is_read_whole(
    cluster: Cluster, headers: dict[str, str]
) -> None:
    service = await cluster.start(lengths(cluster))
    session = cluster.client(service).session
    url = f"{service.url}/v1/length"
    async with session.put(url, data=LONG[:LIMIT], headers=headers) as reply:
        assert (reply.status, await reply.text()) == (200, str(LIMIT))
