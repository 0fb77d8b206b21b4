"""The secret is rotated while a driver runs outside: it goes on, by connections that the gateway keeps."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import UnauthorizedError
from stoker_wire.http.auth import load_secrets
from stoker_wire.messages.control import Whoami
from tests.e2e._cluster import cli
from tests.e2e.gateway._outside import TOKEN, outside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.gateway._outside import Outside

LIMIT_S = 120.0
LOOP = """
    import os, sys
    import stoker
    stoker.init()

    @stoker.remote(max_retries=0)
    def add(x, y): return x + y

    @stoker.remote(num_cpus=0)
    class Counter:
        def __init__(self): self.calls = 0
        def call(self): self.calls += 1; return self.calls

    counter = Counter.remote()
    stoker.get(counter.call.remote())
    print("UP", flush=True)
    calls = 1
    while not os.path.exists(sys.argv[1]):
        assert stoker.get(add.remote(calls, 1)) == calls + 1
        calls += 1
        assert stoker.get(counter.call.remote()) == calls
    assert stoker.get(stoker.remote(lambda: 7).remote()) == 7, "a new lease and a new connection"
    print("DONE", flush=True)
"""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with outside(tmp_path_factory.mktemp("gateway"), num_cpus=2) as made:
        yield made


def test_a_driver_outside_goes_on_when_the_secret_is_rotated(
    cluster: Outside, tmp_path: Path
) -> None:
    info = cluster.cluster.wait_ready()
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(LOOP))
    driver = cluster.start(sys.executable, "-u", str(script), str(tmp_path / "stop"))
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "UP"
        where = ("--token-file", info.token_file, "--address", info.gcs_url)
        for step in ((), ("--finish",)):
            done = cli(cluster.cluster, "token", "rotate", *step, *where, STOKER_TOKEN="")
            assert done.returncode == 0, done.stderr
        with pytest.raises(UnauthorizedError):
            HttpClient(cluster.gateway.url, token=TOKEN).call("GET", "/v1/whoami", reply=Whoami)
        (secret,) = load_secrets(Path(info.token_file))
        me = HttpClient(cluster.gateway.url, token=secret).call("GET", "/v1/whoami", reply=Whoami)
        assert me.name == "cluster"
        (tmp_path / "stop").touch()
        out, err = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, err
        assert out.splitlines()[-1] == "DONE"
    finally:
        driver.kill()
        driver.communicate()
