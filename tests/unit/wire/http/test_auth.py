"""The token file is private from its first moment, and every comparison takes constant time."""

from __future__ import annotations

import hmac
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import (
    ForbiddenError,
    NotFoundError,
    OpenBindError,
    StartError,
    UnauthorizedError,
)
from stoker_wire.http import auth
from stoker_wire.http.principals import ADMINS, JOBS, NODES, Principal
from stoker_wire.http.server.service import Service
from stoker_wire.messages.common import Empty, Role
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


async def whoami(req: Request) -> dict[str, str]:
    return {"principal": req.principal.name}


def test_a_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    token = auth.load_or_create_token(path)
    assert len(token) == 48
    assert auth.load_or_create_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["token"]


def test_all_who_start_at_once_get_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        tokens = list(threads.map(auth.load_or_create_token, [tmp_path / "token"] * 64))
    assert len(set(tokens)) == 1


def test_a_file_that_others_can_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "token"
    auth.load_or_create_token(path)
    path.chmod(0o640)
    with pytest.raises(StartError, match=f"(?s)mode 0640.*chmod 600 {path}"):
        auth.load_or_create_token(path)


def test_an_empty_or_missing_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(StartError, match="copy it from the head node"):
        auth.load_token(path)
    path.touch(mode=0o600)
    with pytest.raises(StartError, match="delete it"):
        auth.load_token(path)


def test_find_token_makes_one_on_loopback_only(tmp_path: Path) -> None:
    settings = Settings(token_file=str(tmp_path / "token"))
    with pytest.raises(OpenBindError, match="set STOKER_TOKEN"):
        auth.find_token(settings, host="0.0.0.0")
    made = auth.find_token(settings, host="127.0.0.1")
    assert auth.find_token(settings) == auth.find_token(settings, host="0.0.0.0") == made
    given = Settings(token="given by the user")
    assert auth.find_token(given, host="0.0.0.0") == given.token


def test_a_token_that_can_be_guessed_is_refused_beyond_loopback(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("x" * 15)
    for short in (Settings(token="x" * 15), Settings(token_file=str(path))):
        with pytest.raises(OpenBindError, match=r"(?s)15 characters.*at least 16.*openssl rand"):
            auth.find_token(short, host="10.0.0.1")
        assert auth.find_token(short, host="127.0.0.1") == auth.find_token(short) == "x" * 15
    path.write_text("x" * 16)
    assert auth.find_token(Settings(token_file=str(path)), host="10.0.0.1") == "x" * 16


def test_a_token_file_of_another_user_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("chosen by another")
    me = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: me + 1000)
    if me != 0:
        with pytest.raises(
            StartError, match=f"(?s)another user.*uid {me}.*chown {me + 1000} {path}"
        ):
            auth.load_token(path)
        return
    assert auth.load_token(path) == "chosen by another", "root may read and change all files"
    os.chown(path, 1001, -1)
    with pytest.raises(StartError, match=f"(?s)another user.*uid 1001.*chown {me + 1000} {path}"):
        auth.load_token(path)


def test_check_compares_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert auth.check("Bearer right", "right")
    assert auth.check("bearer right", "right")
    assert not auth.check("Bearer wrong", "right")
    assert not auth.check("Basic right", "right")
    assert not auth.check(None, "right")
    assert len(compared) == 5


def test_a_private_dir_is_made_private_again(tmp_path: Path) -> None:
    path = auth.private_dir(tmp_path / "a" / "b")
    path.chmod(0o755)
    auth.private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StartError):
        auth.private_dir(tmp_path / "link")


def test_a_service_without_a_token_is_refused() -> None:
    with pytest.raises(OpenBindError):
        Service("gcs", Settings(), token="")


async def test_no_token_and_a_wrong_token_are_told_apart(cluster: Cluster) -> None:
    service = cluster.service()
    service.route("GET", "/v1/who", whoami, reply=dict[str, str], summary="Who am I.")
    await cluster.start(service)
    with pytest.raises(UnauthorizedError, match="not one of the cluster's"):
        await cluster.client(service, token="wrong").call("GET", "/v1/who")
    client = cluster.client(service)
    assert await client.call("GET", "/v1/who", reply=dict[str, str]) == {"principal": "cluster"}
    session = client.session
    async with session.get(f"{service.url}/v1/who", headers={"Authorization": ""}) as reply:
        assert reply.status == 401
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert "no token" not in reply.headers
    async with session.get(f"{service.url}/v1/nothing", headers={"Authorization": "x"}) as reply:
        assert reply.status == 401, "an unknown route must not be told from a known one"


async def test_the_authority_has_the_last_word(cluster: Cluster) -> None:
    class Gcs:
        async def resolve(self, principal: Principal) -> Principal:
            if principal.job_id == "job_over":
                raise UnauthorizedError("job_over has ended")
            return replace(principal, name="alice")

        async def admit(self, principal: Principal, method: str, *where: object) -> None:
            if method != "GET":
                raise ForbiddenError(f"not {principal}'s")

    service = cluster.service(authority=Gcs())
    for method in ("GET", "POST"):
        service.route(
            method, "/v1/who", whoami, roles=JOBS, reply=dict[str, str], summary="Who am I."
        )
    await cluster.start(service)
    client = cluster.client(service, token=service.tokens.job("job_1"))
    assert await client.call("GET", "/v1/who", reply=dict[str, str]) == {"principal": "alice"}
    with pytest.raises(ForbiddenError, match="not job job_1's"):
        await client.call("POST", "/v1/who")
    with pytest.raises(UnauthorizedError, match="has ended"):
        await cluster.client(service, token=service.tokens.job("job_over")).call("GET", "/v1/who")


async def test_a_token_of_another_role_is_told_which_it_takes(cluster: Cluster) -> None:
    service = cluster.service()
    service.route("POST", "/v1/who", whoami, roles=NODES | ADMINS, summary="Who am I.")
    await cluster.start(service)
    viewer = Principal(roles=frozenset({Role.VIEWER}), name="bob")
    client = cluster.client(service, token=service.tokens.user(viewer, issued_at_s=0.0))
    with pytest.raises(ForbiddenError, match=r"(?s)not for viewer bob.*roles admin, node"):
        await client.call("POST", "/v1/who")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json"])
async def test_operational_routes_are_open_on_loopback(cluster: Cluster, path: str) -> None:
    service = await cluster.start(cluster.service())
    assert await cluster.client(service, token="wrong").call("GET", path, raw=True)


async def test_only_the_probes_are_open_beyond_loopback(cluster: Cluster) -> None:
    service = await cluster.start(cluster.service(advertise_host="127.0.0.1"), host="0.0.0.0")
    client = cluster.client(service, token="wrong")
    for probe in ("/healthz", "/readyz", "/errors/unauthorized"):
        assert await client.call("GET", probe, raw=True)
    with pytest.raises(UnauthorizedError):
        await client.call("GET", "/metrics", raw=True)
    with pytest.raises(NotFoundError):
        await client.call("GET", "/errors/..%2fmetrics", raw=True)


@pytest.mark.parametrize(
    ("header", "value", "accepted"),
    [
        ("Host", "localhost", True),
        ("Host", "LOCALHOST:1234", True),
        ("Host", "127.0.0.1:99", True),
        ("Host", "127.9.9.9", True),
        ("Host", "[::1]:80", True),
        ("Host", "head.example:6380", True),
        ("Host", "other.example", True),
        ("Host", "evil.example", False),
        ("Host", "localhost.evil.example", False),
        ("Host", "10.0.0.1", False),
        ("Host", "127.0.0.1.evil.example", False),
        ("Origin", "http://evil.example", False),
        ("Origin", "null", False),
        ("Origin", "http://localhost:9999", False),
        ("Origin", "https://other.example", True),
    ],
)
async def test_host_and_origin_are_checked(
    cluster: Cluster, header: str, value: str, accepted: bool
) -> None:
    service = cluster.service(advertise_host="head.example", allowed_hosts=("other.example",))
    await cluster.start(service)
    session = cluster.client(service).session
    url = f"http://127.0.0.1:{service.port}/healthz"
    async with session.get(url, headers={header: value}) as reply:
        assert reply.status == (200 if accepted else 403)
        if not accepted:
            problem = await reply.json(content_type=None)
            assert (problem["code"], problem["field"]) == (ForbiddenError.code, header)


async def test_any_address_but_no_other_name_reaches_a_wildcard_bind(cluster: Cluster) -> None:
    service = await cluster.start(cluster.service(advertise_host="127.0.0.1"), host="0.0.0.0")
    session = cluster.client(service).session
    statuses = {}
    for host in ("10.1.2.3:80", "evil.example"):
        async with session.get(f"{service.url}/healthz", headers={"Host": host}) as reply:
            statuses[host] = reply.status
    assert statuses == {"10.1.2.3:80": 200, "evil.example": 403}


async def test_same_origin_is_accepted(cluster: Cluster) -> None:
    service = cluster.service()

    async def touch(req: Request) -> Empty:
        return Empty()

    service.route("POST", "/v1/touch", touch, reply=Empty, summary="Touch.")
    await cluster.start(service)
    session = cluster.client(service).session
    async with session.post(f"{service.url}/v1/touch", headers={"Origin": service.url}) as reply:
        assert reply.status == 200
