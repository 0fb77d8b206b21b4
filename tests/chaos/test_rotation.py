"""The secret changes under calls on a cluster of two gcs, of which one is away when that begins."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker import kv
from stoker.runtime.net.http import HttpClient
from stoker_migrations.command import upgrade
from stoker_wire.errors import UnauthorizedError
from stoker_wire.http.auth import load_secrets, write_private
from tests.chaos._load import GET_S, Load
from tests.chaos._services import apart
from tests.e2e._cluster import session_root

if TYPE_CHECKING:
    from pathlib import Path

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(
    r'"level": "warning"', r"^this process: stoker[._]", "idle-in-transaction"
)

FORMER = "the secret with which all began"
ENOUGH = {"task": 20, "count": 5}


@stoker.remote(num_cpus=0.1)
def double(number: int) -> int:
    return 2 * number


def _load() -> Load:
    def task(number: int) -> None:
        assert stoker.get(double.remote(number), timeout=GET_S) == 2 * number

    def count(number: int) -> None:
        assert kv.add("count") == number + 1, "each addition counts once"

    return Load(ENOUGH, pause_s=0.05, task=task, count=count)


def test_no_call_is_hurt_and_a_replica_that_was_away_takes_the_new_secret(
    tmp_path: Path, postgres_url: str
) -> None:
    upgrade(postgres_url)
    file = tmp_path / "token"
    write_private(file, f"{FORMER}\n")
    secret = {"STOKER_TOKEN": "", "STOKER_TOKEN_FILE": str(file)}
    with (
        session_root(tmp_path / "s"),
        apart(tmp_path, cpus=4, database_url=postgres_url, replicas=2, **secret) as cluster,
    ):

        def rotate(*options: str) -> subprocess.CompletedProcess[str]:
            command = ("token", "rotate", "--address", cluster.address, "--token-file", str(file))
            return subprocess.run(
                [sys.executable, "-m", "stoker.cli", *command, "--json", *options],
                env=cluster.environ,
                capture_output=True,
                text=True,
                timeout=2 * GET_S,
                check=False,
            )

        stoker.init(cluster.address, token=FORMER, log_to_driver=False, namespace="load")
        try:
            with _load() as load:
                load.goes_on()
                away = cluster.replicas[1]
                away.kill()
                waits = rotate("--timeout", "2s")
                assert waits.returncode != 0 and away.url in waits.stderr, waits.stderr
                load.goes_on()
                away.start()
                rotated = rotate()
                assert rotated.returncode == 0, rotated.stderr
                assert json.loads(rotated.stdout)["step"] == "use"
                load.goes_on()
                finished = rotate("--finish")
                assert finished.returncode == 0, finished.stderr
                load.goes_on()
            assert load.failures == []
        finally:
            stoker.shutdown()
        (signs,) = load_secrets(file)
        for replica in cluster.replicas:
            HttpClient(replica.url, token=signs).call("GET", "/v1/nodes")
            with pytest.raises(UnauthorizedError):
                HttpClient(replica.url, token=FORMER).call("GET", "/v1/nodes")
