"""Sessions of browsers: begun with a token or a link, by a cookie; what changes something needs more."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.http.auth import load_token
from stoker_wire.http.dashboard.sessions import CSRF_HEADER
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.common import Role
from stoker_wire.messages.control import CreateToken, PersonRole, Token
from tests.e2e._cluster import head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cookie(self) -> str:
        return self.headers["Set-Cookie"].partition(";")[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("s"), num_cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> str:
    return load_token(cluster.session_dir / "token")


def ask(
    cluster: LocalCluster, method: str, path: str, body: object = None, **headers: str
) -> Answer:
    where = urlsplit(cluster.info.gcs_url)
    connection = http.client.HTTPConnection(where.netloc, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = None if body is None else json.dumps(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, body=sent, headers={**given, **kind})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def log_in(cluster: LocalCluster, token: str) -> tuple[str, str]:
    """Return the cookie of a new session, and its CSRF token."""
    answer = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {token}")
    assert answer.status == 200, answer.body
    return answer.cookie, answer.json["csrf"]


def token_of(cluster: LocalCluster, admin: str, name: str, role: PersonRole) -> Token:
    client = HttpClient(cluster.info.gcs_url, token=admin)
    return client.call("POST", "/v1/tokens", CreateToken(name=name, role=role), reply=Token)


def test_the_page_is_for_everyone_and_nothing_else_is(cluster: LocalCluster) -> None:
    page = ask(cluster, "GET", "/", Accept_Encoding="gzip")
    assert page.status == 200 and page.headers["Content-Type"].startswith("text/html")
    assert page.headers["Content-Encoding"] == "gzip"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert ask(cluster, "GET", "/", If_None_Match=page.headers["ETag"]).status == 304
    for path in ("/assets/none.js", "/assets/../routes.py", "/assets/%2e%2e/routes.py"):
        assert ask(cluster, "GET", path).status in (401, 404), path
    for path in ("/v1/nodes", "/v1/session", "/v1/changes"):
        assert ask(cluster, "GET", path).status == 401, path


def test_a_token_becomes_a_session(cluster: LocalCluster, admin: str) -> None:
    begun = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {admin}")
    assert begun.status == 200
    assert begun.json["role"] == "admin" and begun.json["csrf"]
    attributes = begun.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert admin not in begun.headers["Set-Cookie"]
    cookie = begun.cookie
    assert ask(cluster, "GET", "/v1/nodes", Cookie=f"other=1; {cookie}").status == 200
    assert ask(cluster, "GET", "/v1/session", Cookie=cookie).json == begun.json
    ended = ask(
        cluster, "DELETE", "/v1/session", Cookie=cookie, **{CSRF_HEADER: begun.json["csrf"]}
    )
    assert ended.status == 204 and "Max-Age=0" in ended.headers["Set-Cookie"]


@pytest.mark.parametrize("token", ["nonsense", "", "é"])
def test_a_wrong_token_begins_nothing(cluster: LocalCluster, token: str) -> None:
    answer = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {token}")
    assert answer.status == 401 and "Set-Cookie" not in answer.headers
    assert "token" in answer.json["detail"]


def test_what_changes_something_carries_the_csrf_token(cluster: LocalCluster, admin: str) -> None:
    cookie, csrf = log_in(cluster, admin)
    other_cookie, other_csrf = log_in(cluster, admin)
    body = {"name": "carol", "role": "viewer"}
    for wrong in ({}, {CSRF_HEADER: "x"}, {CSRF_HEADER: other_csrf}):
        refused = ask(cluster, "POST", "/v1/tokens", body, Cookie=cookie, **wrong)
        assert refused.status == 403 and CSRF_HEADER in refused.json["detail"]
    made = ask(cluster, "POST", "/v1/tokens", body, Cookie=cookie, **{CSRF_HEADER: csrf})
    assert made.status == 200
    elsewhere = ask(cluster, "GET", "/v1/nodes", Cookie=cookie, Origin="http://evil.example")
    assert elsewhere.status == 403
    socket = ask(
        cluster, "GET", "/v1/jobs/attach", Cookie=other_cookie, Upgrade="websocket", Connection="Upgrade"
    )  # fmt: skip
    assert socket.status == 403


def test_a_session_has_the_role_of_its_token_and_ends_with_it(
    cluster: LocalCluster, admin: str
) -> None:
    token = token_of(cluster, admin, "dora", PersonRole.VIEWER)
    cookie, csrf = log_in(cluster, token.secret)
    refused = ask(
        cluster, "POST", "/v1/tokens", {"name": "x", "role": "admin"}, Cookie=cookie, **{CSRF_HEADER: csrf}
    )  # fmt: skip
    assert refused.status == 403 and "admin" in refused.json["detail"]
    assert ask(cluster, "GET", "/v1/jobs", Cookie=cookie).status == 200
    HttpClient(cluster.info.gcs_url, token=admin).call(
        "DELETE", f"/v1/tokens/{token.token_id}", reply=Token
    )
    assert ask(cluster, "GET", "/v1/jobs", Cookie=cookie).status == 401


def test_a_sessions_cookie_is_no_bearers_token(cluster: LocalCluster, admin: str) -> None:
    cookie, _ = log_in(cluster, admin)
    name, _, token = cookie.partition("=")
    assert ask(cluster, "GET", "/v1/nodes", Authorization=f"Bearer {token}").status == 401
    assert ask(cluster, "GET", "/v1/nodes", Cookie=f"{name}={admin}").status == 401


def test_a_link_begins_a_session_of_whoever_asked_for_it(cluster: LocalCluster, admin: str) -> None:
    token = token_of(cluster, admin, "erin", PersonRole.USER)
    link = ask(cluster, "POST", "/v1/login-links", Authorization=f"Bearer {token.secret}").json
    of_link = link["path"].removeprefix("/#login=")
    assert ask(cluster, "GET", "/v1/jobs", Authorization=f"Bearer {of_link}").status == 401
    begun = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {of_link}").json
    assert (begun["user"], begun["role"]) == ("erin", "user")
    assert begun["expires_at_s"] > link["expires_in_s"]
    again = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {of_link}")
    assert again.status == 401 and "opened before" in again.json["detail"]


def test_processes_of_the_cluster_have_no_sessions(cluster: LocalCluster, admin: str) -> None:
    token = TokenSigner(admin).service(Role.NODE, "n_1")
    answer = ask(cluster, "POST", "/v1/session", Authorization=f"Bearer {token}")
    assert answer.status == 403


def test_changes_are_told_by_kind_and_again_after_a_reconnect(
    cluster: LocalCluster, admin: str
) -> None:
    cookie, _ = log_in(cluster, admin)
    where = urlsplit(cluster.info.gcs_url)
    own = {"Accept": "text/event-stream", "Cookie": cookie}

    def follow(**headers: str) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection(where.netloc, timeout=20)
        connection.request("GET", "/v1/changes", headers={**own, **headers})
        return connection, connection.getresponse()

    def message(response: Any) -> tuple[str, Any]:
        lines: dict[str, str] = {}
        while line := response.readline().decode().strip():
            name, _, value = line.partition(": ")
            lines[name] = value
        return lines["id"], json.loads(lines["data"])

    connection, response = follow()
    seen, first = message(response)
    assert first["payload"]["kinds"] == {} and int(seen) == first["seq"] > 0
    token_of(cluster, admin, "finn", PersonRole.VIEWER)
    seen_after, second = message(response)
    assert second["payload"]["kinds"] == {"token.created": 1}
    connection.close()
    connection, response = follow(**{"Last-Event-ID": seen})
    again, missed = message(response)
    assert (again, missed["payload"]["kinds"]) == (seen_after, {"token.created": 1})
    connection.close()
