"""The gateway: a driver in a network of which one port of the cluster is reached, and nothing else."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http.auth import Credential
from stoker_wire.http.gateway.protocol import AnswerReader, connect_request
from stoker_wire.http.gateway.route import GatewayRoute
from stoker_wire.messages.control import CreateToken, PersonRole, Token, Whoami
from stoker_wire.tls.files import TlsFiles
from tests.e2e.gateway._outside import TOKEN, WAIT_S, Gateway, Outside, outside
from tests.services import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """Two CPUs behind a gateway."""
    with outside(tmp_path_factory.mktemp("gateway"), num_cpus=2) as made:
        yield made


def run(cluster: Outside, script: str, tmp_path: Path, *args: str, **env: str) -> Any:
    """Run a driver outside; return what it printed last, decoded."""
    driver = start(cluster, script, tmp_path, *args, **env)
    out, err = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def start(
    cluster: Outside, script: str, tmp_path: Path, *args: str, **env: str
) -> subprocess.Popen[str]:
    path = tmp_path / "driver.py"
    path.write_text(textwrap.dedent(script))
    return cluster.start(sys.executable, "-u", str(path), *args, **env)


def test_a_driver_outside_has_tasks_actors_and_objects(cluster: Outside, tmp_path: Path) -> None:
    answers = run(
        cluster,
        """
        import json
        import numpy as np
        import stoker
        stoker.init()

        @stoker.remote
        def double(x): return x * 2

        @stoker.remote
        class Counter:
            def __init__(self): self.n = 0
            def add(self, k): self.n += k; return self.n
            def sizes(self, arrays): return [a.nbytes for a in stoker.get(arrays)]

        @stoker.remote(num_returns="streaming")
        def stream(n):
            for at in range(n): yield at

        @stoker.remote
        def make(n): return np.ones(n, dtype=np.uint8)

        counter = Counter.remote()
        mine = [stoker.put(np.zeros(n, dtype=np.uint8)) for n in (10, 3_000_000)]
        theirs = make.remote(3_000_000)
        answers = [
            sum(stoker.get([double.remote(i) for i in range(200)])),
            [stoker.get(counter.add.remote(k)) for k in range(4)],
            stoker.get(counter.sizes.remote([*mine, theirs])),  # the worker asks the driver for two
            [stoker.get(ref) for ref in stream.remote(5)],
            int(stoker.get(theirs).sum()),
            stoker.get_runtime_context().node_id,
        ]
        print(json.dumps(answers))
        """,
        tmp_path,
    )
    assert answers == [
        39800,
        [0, 1, 3, 6],
        [10, 3_000_000, 3_000_000],
        [0, 1, 2, 3, 4],
        3_000_000,
        "",
    ]


def test_what_a_task_prints_comes_to_the_driver(cluster: Outside, tmp_path: Path) -> None:
    driver = start(
        cluster,
        """
        import os, sys, time
        import stoker
        stoker.init()

        @stoker.remote
        def says(): print("a task says this")

        stoker.get(says.remote())
        until = time.monotonic() + 60
        while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
            time.sleep(0.05)
        """,
        tmp_path,
        str(tmp_path / "seen"),
    )
    try:
        assert driver.stdout is not None
        assert any("a task says this" in line for line in driver.stdout)  # else it ends by itself
        (tmp_path / "seen").touch()
        _, err = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, err
    finally:
        driver.kill()
        driver.communicate()


def test_the_rest_of_the_cluster_is_not_reached_from_there(
    cluster: Outside, tmp_path: Path
) -> None:
    info = cluster.cluster.wait_ready()
    found = run(
        cluster,
        """
        import json, socket, sys
        from urllib.parse import urlsplit

        def reached(url):
            parts = urlsplit(url)
            try:
                socket.create_connection((parts.hostname, parts.port), 2).close()
            except OSError:
                return False
            return True

        print(json.dumps([reached(url) for url in sys.argv[1:]]))
        """,
        tmp_path,
        *(info.gcs_url, info.scheduler_url, info.nodelet_url, cluster.gateway.url),
    )
    assert found == [False, False, False, True]


def test_the_command_line_and_curl_use_it_as_the_gcs(cluster: Outside) -> None:
    status = cluster.start(sys.executable, "-m", "stoker.cli", "status")
    out, err = status.communicate(timeout=LIMIT_S)
    assert status.returncode == 0, err
    assert "1 alive" in out
    client = HttpClient(cluster.gateway.url, token=TOKEN)
    assert client.call("GET", "/v1/whoami", reply=Whoami).name == "cluster"
    with pytest.raises(UnauthorizedError):
        HttpClient(cluster.gateway.url, token="x" * 20).call("GET", "/v1/nodes", reply=dict)


def test_an_actor_inside_is_called_by_name_and_calls_what_it_was_given(
    cluster: Outside, tmp_path: Path
) -> None:
    script = """
        import json, sys
        import stoker
        stoker.init(namespace="shared")

        @stoker.remote(num_cpus=0)
        class Board:
            def __init__(self): self.refs = []
            def post(self, refs): self.refs += refs
            def read(self): return stoker.get(self.refs)

        board = Board.options(name="board", get_if_exists=True, lifetime="detached").remote()
        stoker.get(board.post.remote([stoker.put(sys.argv[1])]))
        print(json.dumps(stoker.get(board.read.remote())))
        if sys.argv[2] == "end":
            stoker.kill(board)
    """
    assert run(cluster, script, tmp_path, "a", "end") == ["a"]


def test_a_gateway_that_is_killed_costs_no_call_that_may_be_repeated(
    cluster: Outside, tmp_path: Path
) -> None:
    gateway = Gateway(cluster.network, cluster.cluster.wait_ready().gcs_url)
    (tmp_path / "stop").touch()
    driver = start(
        cluster,
        """
        import sys
        import stoker
        stoker.init()

        @stoker.remote(max_retries=20)
        def double(x):
            return x * 2

        @stoker.remote(max_restarts=-1, max_task_retries=-1)
        class Keeper:
            def double(self, x): return x * 2

        keeper = Keeper.remote()
        while not open(sys.argv[1]).read():
            assert stoker.get([double.remote(i) for i in range(20)]) == [i * 2 for i in range(20)]
            assert stoker.get([keeper.double.remote(i) for i in range(20)]) == [i * 2 for i in range(20)]
            print("round", flush=True)
        """,
        tmp_path,
        str(tmp_path / "stop"),
        STOKER_ADDRESS=gateway.url,
    )
    try:
        assert driver.stdout is not None
        for kills in (True, False):
            for _ in range(3):  # the first may be of before
                assert driver.stdout.readline().strip() == "round"
            if kills:
                gateway.kill()
                gateway.start()
        (tmp_path / "stop").write_text("stop")
        _, err = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, err
    finally:
        driver.kill()
        driver.communicate()
        gateway.stop()


def _connect(cluster: Outside, host: str, port: int, token: str) -> None:
    url = cluster.gateway.url
    GatewayRoute(url, Credential(token), TlsFiles()).open_blocking(host, port, WAIT_S).close()


def test_it_connects_to_the_cluster_only_and_not_to_other_ports_there(cluster: Outside) -> None:
    inner = cluster.network.inner
    with pytest.raises(ForbiddenError, match="no machine of this cluster"):
        _connect(cluster, "127.0.0.1", 6379, TOKEN)
    with pytest.raises(ForbiddenError, match="STOKER_GATEWAY_MIN_PORT"):
        _connect(cluster, inner, 6379, TOKEN)
    nodelet = cluster.cluster.wait_ready().nodelet_url
    _connect(cluster, inner, int(nodelet.rpartition(":")[2]), TOKEN)


@pytest.mark.parametrize("token", ["", "x" * 20])
def test_nobody_without_a_token_is_connected(cluster: Outside, token: str) -> None:
    nodelet = cluster.cluster.wait_ready().nodelet_url
    with pytest.raises(UnauthorizedError):
        _connect(cluster, cluster.network.inner, int(nodelet.rpartition(":")[2]), token)


def test_a_viewer_is_not_connected_and_reads_the_api(cluster: Outside) -> None:
    body = CreateToken(name="vera", role=PersonRole.VIEWER)
    made = cluster.http().call("POST", "/v1/tokens", body, reply=Token)
    client = HttpClient(cluster.gateway.url, token=made.secret)
    assert client.call("GET", "/v1/whoami", reply=Whoami).role == "viewer"
    nodelet = cluster.cluster.wait_ready().nodelet_url
    with pytest.raises(ForbiddenError, match="viewer vera"):
        _connect(cluster, cluster.network.inner, int(nodelet.rpartition(":")[2]), made.secret)


def test_what_a_revoked_token_has_opened_ends(cluster: Outside) -> None:
    made = cluster.http().call("POST", "/v1/tokens", CreateToken(name="rita"), reply=Token)
    port = int(cluster.cluster.wait_ready().nodelet_url.rpartition(":")[2])
    route = GatewayRoute(cluster.gateway.url, Credential(made.secret), TlsFiles())
    with route.open_blocking(cluster.network.inner, port, WAIT_S) as line:
        line.sendall(b"GET /v1/nodes HTTP/1.1\r\n")  # the rest of the request does not come
        cluster.http().call("DELETE", f"/v1/tokens/{made.token_id}", reply=Token)
        began_s = time.monotonic()
        line.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(1) == b""
        assert time.monotonic() - began_s < 8.0, "before the nodelet gives the request up"


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"CONNECT nowhere HTTP/1.1\r\n\r\n",
        b"CONNECT a:b HTTP/1.1\r\n\r\n",
        b"GET /v1/gateway/listen?peer_id=x HTTP/1.1\r\n\r\n",
        b"GET /v1/gateway/accept HTTP/1.1\r\nUpgrade: stoker-gateway\r\nOrigin: http://evil\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 20000 + b"\r\n\r\n",
    ],
)
def test_bad_requests_are_told_so(cluster: Outside, request_: bytes) -> None:
    with socket.create_connection((cluster.network.outer, cluster.gateway.port), WAIT_S) as line:
        line.sendall(request_)
        answer = line.makefile("rb").read()
    status = int(answer.split(b" ")[1])
    assert status in (400, 401, 403, 413), answer
    assert b'"code"' in answer


def test_connections_that_say_nothing_are_few_and_short(cluster: Outside) -> None:
    lines = [
        socket.create_connection((cluster.network.outer, cluster.gateway.port), WAIT_S)
        for _ in range(300)
    ]
    try:
        client = HttpClient(cluster.gateway.url, token=TOKEN)
        assert client.call("GET", "/v1/whoami", reply=Whoami).name == "cluster"
        lines[0].settimeout(WAIT_S)
        assert lines[0].recv(1) == b"", "the oldest went"
    finally:
        for line in lines:
            line.close()


def test_a_request_that_comes_in_pieces_is_read(cluster: Outside) -> None:
    port = int(cluster.cluster.wait_ready().nodelet_url.rpartition(":")[2])
    request = connect_request(cluster.network.inner, port, TOKEN)
    with socket.create_connection((cluster.network.outer, cluster.gateway.port), WAIT_S) as line:
        for at in range(0, len(request), 7):
            line.sendall(request[at : at + 7])
        reader = AnswerReader(cluster.gateway.url)
        while reader.feed(line.recv(10)) is None:
            pass
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"nodelet" in line.makefile("rb").read()


def test_the_port_of_a_driver_is_closed_when_the_driver_has_ended(
    cluster: Outside, tmp_path: Path
) -> None:
    url = run(
        cluster,
        """
        import json
        import stoker
        from stoker.runtime import current
        stoker.init()
        print(json.dumps(current.runtime().channels.address.url))
        """,
        tmp_path,
    )
    host, _, port = url.removeprefix("http://").rpartition(":")
    assert host == cluster.network.inner

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) != 0

    until(is_closed, 40, "its port is closed")
