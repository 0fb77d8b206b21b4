"""Calls by HTTP through the gateway of a head: functions, actors, references, roles, the command line."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

import stoker
from stoker.launch import LocalCluster, spawn_local
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.control import CreateToken, Page, Token
from stoker_wire.messages.work import Job
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 40.0
TOKEN = "the-token-of-a-head-with-calls"
NAMESPACE = "team"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Caller:
    """A client that knows HTTP and nothing of Stoker, with one connection for all its requests."""

    def __init__(self, url: str, token: str) -> None:
        self._token = token
        self._line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request; a body other than bytes goes as JSON."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        own = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        self._line.request(method, path, data, {**own, **headers})
        answer = self._line.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())

    def call(self, function: str, *args: Any, **more: Any) -> Answer:
        """Call a function."""
        body = {"function": function, "args": args, "namespace": NAMESPACE, **more}
        return self.send("POST", "/v1/calls", body)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("calls")
    with session_root(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_TOKEN", TOKEN)
        made = spawn_local(embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            info = made.wait_ready()
            stoker.init(info.gcs_url, token=TOKEN, namespace=NAMESPACE, log_to_driver=False)
            try:
                _register()
                yield made
            finally:
                stoker.shutdown()
        finally:
            made.stop()


def _register() -> None:
    def square(x: int) -> int:
        """Return the square."""
        return x * x

    def raw(count: int) -> bytes:
        return bytes(range(count))

    def written() -> bytes:
        return b'{"result": 1}'

    def thing() -> object:
        return {"deep": [object()]}

    def fail() -> None:
        raise ValueError("on purpose")

    def wait_for(path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return "seen"

    def length(data: Any) -> list[Any]:
        return [type(data).__name__, len(data)]

    async def later(x: int) -> int:
        return x + 1

    def count(n: int) -> Iterator[int]:
        yield from range(n)

    for function in (raw, written, thing, fail, wait_for, length, later, count):
        stoker.register(function)
    stoker.register(stoker.remote(num_cpus=0.5)(square))


@pytest.fixture
def connect(cluster: LocalCluster) -> Iterator[Callable[..., Caller]]:
    """Makes clients by tokens, of the gateway unless a URL is given; all are closed at the end."""
    made: list[Caller] = []

    def open_one(token: str = TOKEN, url: str = "") -> Caller:
        made.append(Caller(url or cluster.info.gateway_url, token))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


@pytest.fixture
def caller(connect: Callable[..., Caller]) -> Caller:
    return connect()


def test_a_function_is_called_with_json_by_its_name_and_version(caller: Caller) -> None:
    assert caller.call("square", 7).json == {"result": 49}
    assert caller.call("square", kwargs={"x": 8}, version="1").json == {"result": 64}
    assert caller.call("later", 1).json == {"result": 2}
    assert caller.call("count", 3).json == {"result": [0, 1, 2]}
    raw = caller.call("raw", 4)
    assert (raw.body, raw.headers["Content-Type"]) == (b"\0\1\2\3", "application/octet-stream")


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"nope", 400, None),
        ({"callee": "square"}, 400, "callee"),
        ({}, 400, "function"),
        ({"function": "square", "actor": "a", "method": "m"}, 400, "function"),
        ({"function": "squar"}, 404, "function"),
        ({"function": "square", "version": "9"}, 404, "version"),
        ({"function": "square", "args": []}, 400, "args"),
        ({"function": "square", "args": 3}, 400, "args"),
        ({"function": "square", "args": [1], "timeout_s": 0}, 400, "timeout_s"),
        ({"function": "square", "args": [{"$ref": "o_0"}]}, 404, "args.0"),
        ({"function": "thing"}, 400, "result"),
        ({"actor": "nobody", "method": "m"}, 404, "actor"),
        ({"actor": "nobody"}, 400, "method"),
    ],
)
def test_a_wrong_call_is_refused_with_its_field(
    caller: Caller, body: Any, status: int, field: str | None
) -> None:
    if isinstance(body, dict):
        body = {**body, "namespace": NAMESPACE}
    answer = caller.send("POST", "/v1/calls", body)
    assert (answer.status, answer.json.get("field")) == (status, field), answer


def test_a_body_that_is_too_large_is_refused(caller: Caller) -> None:
    line = caller._line
    line.putrequest("POST", "/v1/calls")
    line.putheader("Authorization", f"Bearer {TOKEN}")
    line.putheader("Content-Length", str(1 << 40))
    line.endheaders()
    assert line.getresponse().status == 413


def test_what_a_function_raised_comes_with_its_traceback(caller: Caller) -> None:
    answer = caller.call("fail")
    assert answer.status == 500
    assert answer.json["code"] == "task_failed"
    assert "ValueError: on purpose" in answer.json["detail"]


def test_one_connection_serves_calls_and_all_else_in_turn(
    cluster: LocalCluster, caller: Caller
) -> None:
    theirs = {"Authorization": f"Bearer {_token(cluster, 'in-turn', 'user').secret}"}
    for i in range(4):
        assert caller.call("square", i).json == {"result": i * i}
        assert caller.send("GET", "/v1/whoami").json["role"] == "admin"
        assert caller.send("GET", "/v1/refs", **theirs).json == {"items": []}
        assert caller.send("GET", "/v1/whoami", **theirs).json["name"] == "in-turn"


def test_large_requests_are_whole_when_the_connection_changes_hands(
    cluster: LocalCluster,
) -> None:
    place = urlsplit(cluster.info.gateway_url)
    head = f"Host: {place.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n"
    body = json.dumps({"function": "length", "args": ["x" * 300_000], "namespace": NAMESPACE})
    with socket.create_connection((place.hostname, place.port), timeout=WAIT_S) as line:  # type: ignore[arg-type]
        answers = line.makefile("rb")
        for path, text in (("/v1/calls", body), ("/v1/whoami", ""), ("/v1/calls", body)) * 2:
            method = "POST" if text else "GET"
            sent = f"{method} {path} HTTP/1.1\r\n{head}Content-Length: {len(text)}\r\n\r\n{text}"
            line.sendall(sent.encode())  # more than one read of a socket takes
            said = _read_answer(answers)
            assert said == {"result": ["str", 300_000]} if text else said["role"] == "admin"


def _read_answer(answers: Any) -> Any:
    assert answers.readline().split()[1] == b"200"
    length = 0
    while (field := answers.readline()) != b"\r\n":
        name, _, text = field.partition(b":")
        if name.lower() == b"content-length":
            length = int(text)
    return json.loads(answers.read(length))


def test_a_call_is_cancelled_at_its_deadline(caller: Caller, tmp_path: Path) -> None:
    answer = caller.call("wait_for", str(tmp_path / "never"), timeout_s=0.2)
    assert (answer.status, answer.json["field"]) == (504, "timeout_s")
    assert caller.call("square", 2).json == {"result": 4}, "nothing is left that runs"


def test_a_method_of_an_actor_is_called_by_the_actors_name(caller: Caller) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self, by: int = 1) -> int:
            self.count += by
            return self.count

        def _hidden(self) -> None: ...

    actor: Any = stoker.remote(Counter).options(name="counter").remote()
    stoker.get(actor.ready())
    body = {"actor": "counter", "namespace": NAMESPACE, "method": "add"}
    assert caller.send("POST", "/v1/calls", {**body, "args": [2]}).json == {"result": 2}
    by_id = {"actor": actor.actor_id, "method": "add", "kwargs": {"by": 3}}
    assert caller.send("POST", "/v1/calls", by_id).json == {"result": 5}
    hidden = caller.send("POST", "/v1/calls", {**body, "method": "_hidden"})
    assert (hidden.status, hidden.json["field"]) == (404, "method")
    wrong = caller.send("POST", "/v1/calls", {**body, "args": [1, 2]})
    assert (wrong.status, wrong.json["field"]) == (400, "args")
    killed = caller.send("POST", f"/v1/actors/{actor.actor_id}/kill", {})
    assert killed.json["state"] == "DEAD", "by the same connection, from the gcs"
    until(lambda: caller.send("POST", "/v1/calls", body).status == 404, WAIT_S, "it is unknown")


def test_a_reference_is_waited_for_read_in_parts_passed_on_and_freed(
    caller: Caller, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    begun = caller.call("wait_for", str(flag), **{"async": True})
    assert begun.status == 202
    ref = begun.json["ref"]
    assert caller.send("GET", f"/v1/refs/{ref}").json["state"] == "PENDING"
    assert caller.send("GET", f"/v1/refs/{ref}/value").status == 504
    put = caller.send("POST", "/v1/refs?ttl_s=600", bytes(range(10))).json
    assert put["state"] == "READY"
    waited = caller.send("POST", "/v1/refs/wait", {"refs": [ref, put["ref"]], "timeout_s": 9})
    assert [one["ref"] for one in waited.json["ready"]] == [put["ref"]]
    assert [one["ref"] for one in waited.json["pending"]] == [ref]
    flag.touch()
    assert caller.send("GET", f"/v1/refs/{ref}/value?wait_s=30").json == "seen"
    part = caller.send("GET", f"/v1/refs/{put['ref']}/value", Range="bytes=2-4")
    assert (part.status, part.body) == (206, b"\2\3\4")
    assert part.headers["Content-Range"] == "bytes 2-4/10"
    last = caller.send("GET", f"/v1/refs/{put['ref']}/value", Range="bytes=-3")
    assert last.body == b"\7\x08\x09"
    assert caller.send("GET", f"/v1/refs/{put['ref']}/value", Range="bytes=10-").status == 416
    assert caller.call("length", {"$ref": put["ref"]}).json == {"result": ["bytes", 10]}
    assert caller.call("length", data={"$ref": ref}).status == 400
    assert caller.call("length", kwargs={"data": {"$ref": ref}}).json == {"result": ["str", 4]}
    assert caller.send("DELETE", f"/v1/refs/{put['ref']}").status == 204
    gone = caller.send("GET", f"/v1/refs/{put['ref']}")
    assert (gone.status, gone.json["field"]) == (404, "ref")


def test_json_and_large_values_keep_what_they_are(caller: Caller) -> None:
    ref = caller.send("POST", "/v1/refs", {"a": [1, None, "x"]}).json["ref"]
    assert caller.send("GET", f"/v1/refs/{ref}/value").json == {"a": [1, None, "x"]}
    data = os.urandom(3_000_000)
    ref = caller.send("POST", "/v1/refs", data).json["ref"]
    assert caller.call("length", {"$ref": ref}).json == {"result": ["bytes", len(data)]}
    assert caller.send("GET", f"/v1/refs/{ref}/value").body == data
    bad = caller.send("POST", "/v1/refs", b"{", **{"Content-Type": "application/json"})
    assert (bad.status, bad.json["field"]) == (400, "body")


def test_a_call_is_cancelled_by_its_reference_or_task(caller: Caller, tmp_path: Path) -> None:
    for name in ("ref", "task_id"):
        begun = caller.call("wait_for", str(tmp_path / "never"), **{"async": True}).json
        stopped = caller.send("POST", "/v1/calls/cancel", {name: begun[name]})
        assert stopped.status == 200
        ended = caller.send("GET", f"/v1/refs/{begun['ref']}?wait_s=30").json
        assert (ended["state"], ended["error"]["code"]) == ("FAILED", "task_cancelled")
    unknown = caller.send("POST", "/v1/calls/cancel", {"task_id": "t_0"})
    assert (unknown.status, unknown.json["field"]) == (404, "task_id")


def test_tasks_are_followed_to_their_end(
    caller: Caller, connect: Callable[..., Caller], tmp_path: Path
) -> None:
    line = connect()._line
    auth = {"Authorization": f"Bearer {TOKEN}"}
    line.request("GET", "/v1/tasks?watch=true&name=wait_for", headers=auth)
    stream = line.getresponse()
    flag = tmp_path / "flag"
    task_id = caller.call("wait_for", str(flag), **{"async": True}).json["task_id"]
    states = []
    while not states or states[-1] != "FINISHED":
        text = stream.readline()
        record = json.loads(text) if text.strip() else {}
        if record.get("task_id") == task_id:
            states.append(record["state"])
            flag.touch()
    assert len(states) >= 2, "it was seen before it had ended"
    stream.close()


def test_a_value_ends_with_its_time(caller: Caller) -> None:
    ref = caller.call("square", 3, **{"async": True, "ttl_s": 0.1}).json["ref"]
    until(lambda: caller.send("GET", f"/v1/refs/{ref}").status == 404, WAIT_S, "it has ended")


def test_a_repeated_call_happens_once(caller: Caller) -> None:
    body = {"function": "square", "args": [3], "namespace": NAMESPACE, "async": True}
    key = {"Idempotency-Key": "once"}
    first = caller.send("POST", "/v1/calls", body, **key)
    again = caller.send("POST", "/v1/calls", body, **key)
    assert first.json["ref"] == again.json["ref"]


def test_versions_stay_what_they_are_until_they_are_replaced(caller: Caller) -> None:
    stoker.register(lambda: "one", "word")
    with pytest.raises(stoker.exceptions.ConflictError, match="version"):
        stoker.register(lambda: "two", "word")
    stoker.register(lambda: "two", "word", version="2")
    assert caller.call("word", version="1").json == {"result": "one"}
    assert caller.call("word").json == {"result": "two"}, "the version registered last"
    listed = caller.send("GET", f"/v1/calls/functions?namespace={NAMESPACE}&name=word").json
    assert sorted(one["version"] for one in listed["items"]) == ["1", "2"]
    stoker.register(lambda: "three", "word", version="2", replace=True)
    until(lambda: caller.call("word").json == {"result": "three"}, WAIT_S, "it is replaced")
    stoker.unregister("word", version="2")
    until(lambda: caller.call("word").json == {"result": "one"}, WAIT_S, "the other is the last")
    with pytest.raises(stoker.exceptions.NotFoundError, match="word"):
        stoker.unregister("word", version="2")


def test_what_cannot_be_called_from_outside_is_not_registered() -> None:
    held = stoker.put(1)
    with pytest.raises(stoker.exceptions.BadRequestError, match="ObjectRef"):
        stoker.register(lambda: held, "holds")
    with pytest.raises(stoker.exceptions.WrongTypeError, match="function"):
        stoker.register(3)  # type: ignore[arg-type]
    with pytest.raises(stoker.exceptions.BadRequestError, match="version"):
        stoker.register(lambda: 1, "x", version="")


def _token(cluster: LocalCluster, name: str, role: str, **more: Any) -> Token:
    body = CreateToken(name=name, role=role, **more)  # type: ignore[arg-type]
    client = HttpClient(cluster.info.gcs_url, token=TOKEN)
    return client.call("POST", "/v1/tokens", body, reply=Token)


def test_what_a_token_holds_is_its_own_and_ends_with_it(
    cluster: LocalCluster, connect: Callable[..., Caller]
) -> None:
    alice = _token(cluster, "alice", "user", namespaces=(NAMESPACE,))
    bob = _token(cluster, "bob", "user")
    hers, his = (connect(one.secret) for one in (alice, bob))
    assert hers.call("square", 3).json == {"result": 9}
    foreign = his.call("square", 3)
    assert (foreign.status, foreign.json["field"]) == (403, "namespace")
    ref = hers.send("POST", "/v1/refs", b"mine").json["ref"]
    assert his.send("GET", f"/v1/refs/{ref}").status == 404
    gcs = HttpClient(cluster.info.gcs_url, token=TOKEN)
    (job,) = [one for one in gcs.items("/v1/jobs", Page[Job]) if one.user == "alice"]
    assert "alice" in job.entrypoint
    (process,) = [one for one in _callers(cluster) if job.pid == one.pid]
    gcs.call("DELETE", f"/v1/tokens/{alice.token_id}")
    until(lambda: not process.is_running(), WAIT_S, "its caller has ended")
    until(lambda: connect(alice.secret).call("square", 3).status == 401, WAIT_S, "it is refused")


def _callers(cluster: LocalCluster) -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process(cluster.pid).children(recursive=True)
        if "stoker.gateway.calls" in " ".join(one.cmdline())
    ]


def test_a_viewer_and_who_has_no_token_call_nothing(
    cluster: LocalCluster, connect: Callable[..., Caller]
) -> None:
    viewer = _token(cluster, "carol", "viewer")
    assert connect(viewer.secret).call("square", 3).status == 403
    assert connect("none").call("square", 3).status == 401
    assert connect("nonsense").call("square", 3).status == 401


def test_the_gcs_says_what_answers_calls(
    cluster: LocalCluster, connect: Callable[..., Caller]
) -> None:
    answer = connect(url=cluster.info.gcs_url).call("square", 3)
    assert answer.status == 404
    assert "--gateway-port" in answer.json["detail"]


def test_a_document_has_the_routes_of_calls_and_another_those_of_the_gcs(caller: Caller) -> None:
    calls = caller.send("GET", "/v1/calls/openapi.json").json
    assert calls["info"]["title"] == "Stoker gateway"
    assert calls["paths"]["/v1/calls"]["post"]["operationId"] == "call"
    assert all(path.startswith(("/v1/calls", "/v1/refs")) for path in calls["paths"])
    rest = caller.send("GET", "/openapi.json").json
    assert rest["info"]["title"] == "Stoker gcs"
    assert not set(rest["paths"]) & set(calls["paths"])


def test_a_driver_that_is_given_the_gateways_address_on_loopback_joins(
    cluster: LocalCluster,
) -> None:
    program = """
        import stoker
        stoker.init()
        print(stoker.get(stoker.remote(lambda: 42).remote()))
    """
    done = _run(cluster, "-c", textwrap.dedent(program), STOKER_ADDRESS=cluster.info.gateway_url)
    assert done.stdout.split() == ["42"], done.stderr


def _run(cluster: LocalCluster, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"STOKER_ADDRESS": cluster.info.gcs_url, "STOKER_TOKEN": TOKEN}
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **own, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_calls_puts_gets_and_frees(cluster: LocalCluster, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = _run(cluster, "-m", "stoker.cli", *words)
        assert done.returncode == 0, done
        return done.stdout.strip()

    file = tmp_path / "data"
    file.write_bytes(b"12345")
    assert run("call", "square", "12", "--namespace", NAMESPACE) == "144"
    assert run("call", "written", "--namespace", NAMESPACE) == '{"result": 1}', "bytes as they are"
    ref = run("object", "put", str(file))
    words = ("call", "length", f'{{"$ref": "{ref}"}}', "--namespace", NAMESPACE)
    assert json.loads(run(*words)) == ["bytes", 5]
    assert run("object", "get", ref) == "12345"
    assert ref in run("object", "list")
    begun = run("call", "wait_for", str(tmp_path / "never"), "--namespace", NAMESPACE, "--async")
    assert "told to stop" in run("cancel", begun)
    assert run("object", "free", ref, begun) == "2 freed"
    missing = _run(cluster, "-m", "stoker.cli", "call", "squar", "1", "--namespace", NAMESPACE)
    assert missing.returncode == 1
    assert "did you mean 'square'" in missing.stderr
