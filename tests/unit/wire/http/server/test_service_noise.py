"""Bytes that are no HTTP: refused, and nothing in the log that anybody could fill with them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.unit.wire.conftest import TOKEN
from tests.unit.wire.orders import orders

if TYPE_CHECKING:
    from tests.unit.wire.conftest import Cluster

WAIT_S = 30.0
POST = b"POST /v1/orders/7 HTTP/1.1\r\nHost: localhost\r\n"
GOOD = POST + b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="tls"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="http2"),
        pytest.param(bytes(range(256)) * 4, id="bytes"),
        pytest.param(b"GET\r\n\r\n", id="no path"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="version"),
        pytest.param(b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", id="two lengths"),
        pytest.param(b"Content-Length: -1\r\n\r\n", id="negative length"),
        pytest.param(b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", id="long length"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", id="both"
        ),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", id="chunk"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", id="huge chunk"),
        pytest.param(b"X-Long: " + b"x" * 9000 + b"\r\n\r\n", id="long header"),
        pytest.param(b"X: y\r\n" * 1000 + b"\r\n", id="many headers"),
        pytest.param(b"Bad Name: 1\r\n\r\n", id="header name"),
        pytest.param(b"X: a\nY: b\x00\r\n\r\n", id="bare line feed"),
        pytest.param(b"Host: elsewhere\r\n\r\n", id="two hosts"),
        pytest.param(b"Content-Length: 100\r\n\r\nhalf", id="half a body"),
    ],
)
async def test_noise_is_refused_and_leaves_no_line_in_the_log(
    cluster: Cluster, noise: bytes, token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = await cluster.start(orders(cluster))
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    whole = noise[:3].isupper() or noise[:1] < b"\x20"
    writer.write(noise if whole else (GOOD if token else POST) + noise)
    writer.write_eof()
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read(1 << 16)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert answer[:13] in (b"", *(b"HTTP/1.%d 4%02d" % (1, code) for code in (0, 1, 3, 5, 13)))
    await service.stop(grace_s=0.2)
    assert not caplog.records
