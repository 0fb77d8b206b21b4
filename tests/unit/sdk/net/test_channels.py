"""Where a runtime listens: a socket of its user alone, no web page, and never in plain where there is TLS."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from aiohttp import web

from stoker.exceptions import StartError
from stoker.runtime.net.channels import Channels
from stoker.runtime.process.identity import Identity, LocalNode
from stoker_wire.http.auth import Credential, channel_proof
from stoker_wire.settings import Settings
from stoker_wire.tls.files import TlsFiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "of this cluster"


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Channels]:
    identity = Identity(
        peer_id="w_1",
        gcs_url="",
        credential=Credential(TOKEN),
        host_id="h",
        node=None,
        socket_path=str(folder / "sockets" / "w_1.sock"),
        tcp_host="127.0.0.1",
        is_worker=True,
    )

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="assigned")

    io: Any = SimpleNamespace(loop=asyncio.get_running_loop())
    channels = Channels(identity, io, Settings(**settings), TlsFiles())
    unused: Any = None
    job: Any = SimpleNamespace(job_id="job_1")
    await channels.serve(job, unused, {("POST", "/v1/assign"): answer}, unused, unused)
    try:
        yield channels
    finally:
        await channels.close()


async def post(channels: Channels, headers: dict[str, str], *, unix: bool) -> int:
    path = channels.address.unix
    connector = aiohttp.UnixConnector(path) if unix else aiohttp.TCPConnector()
    url = "http://localhost" if unix else channels.address.url
    headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/assign", headers=headers) as reply,
    ):
        return reply.status


async def test_the_socket_is_its_users_alone_whatever_the_umask_is_and_leaves_with_it(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        async with serving(tmp_path) as channels:
            path = cast("str", channels.address.unix)
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(tmp_path / "sockets").st_mode) == 0o700
    finally:
        assert os.umask(before) == 0
    assert os.listdir(tmp_path / "sockets") == []


@pytest.mark.parametrize("unix", [True, False])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "head.example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.nip.io"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer wrong", "Host": "evil.example"}, 403),
    ],
)
async def test_requests_of_web_pages_are_refused_before_their_token_is_looked_at(
    tmp_path: Path, headers: dict[str, str], status: int, unix: bool
) -> None:
    async with serving(tmp_path, allowed_hosts=("head.example",)) as channels:
        assert await post(channels, headers, unix=unix) == status


async def test_a_channel_is_opened_by_a_proof_for_this_peer_or_by_leave_of_the_gcs(
    tmp_path: Path,
) -> None:
    asked: list[Any] = []

    async def review(question: Any) -> bool:
        asked.append(question)
        return bool(question.proof == "good")

    async with serving(tmp_path) as channels:
        channels._review = review
        proof = channel_proof(TOKEN, "w_1")
        assert await channels._may_open(f"Channel job_1  {proof}")
        assert not asked, "its own job's are known without a question"
        assert await channels._may_open("Channel job_2  good")
        assert not await channels._may_open(f"Channel job_1  {channel_proof(TOKEN, 'w_2')}")
        assert [one.peer_id for one in asked] == ["w_1", "w_1"]
        for header in ("", f"Bearer {TOKEN}", f"Channel {proof}", f"Channel a b c {proof}"):
            assert not await channels._may_open(header)
        assert len(asked) == 2


IO: Any = None


def identity(*, gcs_url: str, node_url: str = "", tcp_host: str | None = "127.0.0.1") -> Identity:
    node = LocalNode("n_1", node_url, "/nowhere") if node_url else None
    return Identity(
        peer_id="d_1",
        gcs_url=gcs_url,
        credential=Credential("t"),
        host_id="h",
        node=node,
        socket_path="",
        tcp_host=tcp_host,
    )


@pytest.mark.parametrize("node_url", ["", "https://10.0.0.1:7620"])
def test_a_runtime_refuses_to_listen_in_plain_in_a_cluster_with_tls(node_url: str) -> None:
    driver = identity(gcs_url="https://10.0.0.1:7600", node_url=node_url)
    with pytest.raises(StartError, match=r"(?s)STOKER_TLS.*certs issue NAME --host 127\.0\.0\.1"):
        Channels(driver, IO, Settings(), TlsFiles("off", ca="/some/ca.pem"))


def test_a_runtime_that_listens_on_no_port_needs_no_certificate() -> None:
    driver = identity(gcs_url="https://10.0.0.1:7600", tcp_host=None)
    assert Channels(driver, IO, Settings(), TlsFiles("off", ca="/some/ca.pem")).address.url == ""


def test_a_proxy_with_tls_before_the_gcs_makes_no_node_one_with_tls() -> None:
    driver = identity(gcs_url="https://proxy.example", node_url="http://10.0.0.1:7620")
    channels = Channels(driver, IO, Settings(), TlsFiles())
    assert channels.address.url.startswith("http://127.0.0.1:")
    assert channels._tcp is not None
    channels._tcp.close()


def test_a_runtime_without_a_certificate_is_told_what_to_set() -> None:
    with pytest.raises(StartError, match="STOKER_TLS_CERT and STOKER_TLS_KEY"):
        Channels(identity(gcs_url="https://10.0.0.1:7600"), IO, Settings(), TlsFiles("server"))
