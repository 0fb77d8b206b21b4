"""What a server's log says of handshakes that fail, and how often."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from stoker_wire.tls.failures import FailureLog, client_failure

if TYPE_CHECKING:
    from tests.unit.wire.conftest import Cluster
    from tests.unit.wire.tls.conftest import Certs


def failure(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


@pytest.mark.logs("TLS: a client")
def test_one_kind_of_failure_is_logged_once_in_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    log = FailureLog(lambda: now_s)
    for _ in range(1000):
        log.note(failure("HTTP_REQUEST"))
    log.note(failure("TLSV1_ALERT_UNKNOWN_CA"))
    assert len(caplog.records) == 2
    now_s = 11.0
    log.note(failure("HTTP_REQUEST"))
    assert len(caplog.records) == 3
    assert "(999 times more before)" in caplog.records[-1].message


def test_what_is_no_certificates_fault_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    with caplog.at_level(logging.INFO):
        log.note(ssl.SSLEOFError(8, "EOF occurred in violation of protocol"))
        log.note(failure("LENGTH_MISMATCH"))
    assert not caplog.records


def test_an_error_that_is_none_of_tls_has_no_explanation() -> None:
    assert client_failure(ConnectionRefusedError(111, "Connection refused")) == ""
    assert client_failure(ssl.SSLEOFError(8, "EOF occurred")) == ""


@pytest.mark.logs("TLS: a client sent plain HTTP")
async def test_plain_http_to_a_port_of_tls_is_logged_with_the_fix(
    cluster: Cluster, certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("server")))
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"HTTP" not in await reader.read()
    writer.close()
    assert "must begin with https://" in caplog.text


async def test_a_port_scan_leaves_nothing_in_the_log(
    cluster: Cluster, certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    for sent in (b"", b"\x16\x03\x01", bytes(100)):
        with socket.create_connection(("127.0.0.1", service.port)) as line:
            line.sendall(sent)
    await cluster.client(service, settings=service.settings).call("GET", "/readyz")
    assert "WARNING" not in caplog.text
