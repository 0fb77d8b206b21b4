"""A port that another user of the machine holds gets no token, whichever client asks there."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.data import channel
from stoker_wire.data.range_reader import RangeReader
from stoker_wire.errors import BadRequestError, ForeignPortError, UnavailableError
from stoker_wire.http.client import port_owner
from stoker_wire.http.client.client import Client
from stoker_wire.messages.common import Address
from stoker_wire.tls.files import TlsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@contextmanager
def squatter(uid: int, family: int = socket.AF_INET) -> Iterator[tuple[str, int]]:
    """A port of another user, who takes every connection and writes down what comes; its URL."""
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    ready, heard = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            with socket.create_server((host, 0), family=family) as listening:
                os.write(ready[1], listening.getsockname()[1].to_bytes(2, "big"))
                while True:
                    with listening.accept()[0] as line:
                        line.settimeout(5.0)
                        os.write(heard[1], line.recv(1 << 16))
        finally:
            os._exit(0)
    port = int.from_bytes(os.read(ready[0], 2), "big")
    try:
        yield (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"), heard[0]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.set_blocking(heard[0], False)
        for fd in (*ready, *heard):
            os.close(fd)


def nothing_heard(fd: int) -> bool:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 16) == b""
    except BlockingIOError:
        return True


async def by_client(url: str) -> None:
    async with Client(url, token="secret", peer="test") as client:
        await client.call("GET", "/v1/nodes", timeout_s=5.0, retry=False)


async def by_websocket(url: str) -> None:
    async with Client(url, token="secret", peer="test") as client:
        await client.ws("/v1/session", timeout_s=5.0)


async def by_command_line(url: str) -> None:
    await asyncio.to_thread(HttpClient(url, token="secret").call, "GET", "/v1/nodes", timeout_s=1.0)


async def by_range_reader(url: str) -> None:
    reader = RangeReader(url, token="secret", peer="test", tls=TlsFiles())
    await asyncio.to_thread(reader.read, "o_1", 0, memoryview(bytearray(8)))


async def by_channel(url: str) -> None:
    there = Address("p_1", "", "", "", url)
    await channel.connect(
        there, path="", me=there, job_id="j", authorization="secret", tls=TlsFiles()
    )


CLIENTS = [by_client, by_websocket, by_command_line, by_range_reader, by_channel]


@as_root
@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_a_port_of_another_user_gets_nothing(ask: Any, family: int) -> None:
    with squatter(STRANGER, family) as (url, heard):
        with pytest.raises(UnavailableError, match=r"(?s)another user.*STOKER_SERVER_USER"):
            await ask(url)
        assert nothing_heard(heard)


@as_root
@pytest.mark.parametrize("named", [str(STRANGER), "nobody"])
async def test_a_user_that_the_services_run_as_is_named_by_a_setting(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SERVER_USER", named)
    with squatter(STRANGER) as (url, heard):
        with pytest.raises(UnavailableError):
            await by_command_line(url)
        assert b"secret" in os.read(heard, 1 << 16)


def test_an_unknown_user_is_an_error_that_says_so() -> None:
    with pytest.raises(BadRequestError, match="STOKER_SERVER_USER='no-such-user' is no user"):
        port_owner.uid_of("no-such-user")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_ones_own_port_is_known_before_and_after_it_has_accepted(family: int) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listening:
        there = listening.getsockname()[:2]
        with socket.create_connection(there) as line:
            assert port_owner._uid(family, there, (host, 0)) == os.geteuid()
            port_owner.check_port_owner(line)
            with listening.accept()[0]:
                here = line.getsockname()[:2]
                assert port_owner._uid(family, there, here) == os.geteuid()
                port_owner.check_port_owner(line)


def test_what_took_the_connection_counts_though_another_listens_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uid(_: int, __: Any, remote: tuple[str, int]) -> int:
        return STRANGER if remote[1] else os.geteuid()

    monkeypatch.setattr(port_owner, "_uid", uid)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as line,
        pytest.raises(ForeignPortError),
    ):
        port_owner.check_port_owner(line)
