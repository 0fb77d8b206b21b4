"""Airflow's HTTP operators, run by its local executor, drive jobs and calls: ``make interop``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("airflow.providers.http", reason="airflow is not installed: make interop")

import stoker
from stoker.launch import spawn_local
from tests.services import ReservedPort, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

pytestmark = pytest.mark.filterwarnings("default")
AIRFLOW = str(Path(sys.executable).parent / "airflow")
TOKEN = "the-token-of-a-cluster-for-airflow"
WAIT_S = 90.0
RUN_S = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_TOKEN", TOKEN)
        made = spawn_local(embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            made.wait_ready()
            yield made
        finally:
            made.stop()


@pytest.fixture
def airflow(cluster: LocalCluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of an Airflow whose tasks report to an API server of their own."""
    port = int(cluster.info.gateway_url.rpartition(":")[2])
    connection = {"conn_type": "http", "host": "127.0.0.1", "port": port, "schema": "http"}
    reserved = ReservedPort()
    api = f"http://127.0.0.1:{reserved.number}"
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(Path(__file__).parent / "airflow_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{api}/execution/",
        "AIRFLOW__API_AUTH__JWT_SECRET": "of-this-test-alone-and-long-enough-for-sha-512" * 2,
        "AIRFLOW_CONN_STOKER": json.dumps(connection),
        "STOKER_TEST_FOLDER": str(tmp_path),
    }
    subprocess.run([AIRFLOW, "db", "migrate"], env=env, check=True, capture_output=True)
    words = ("api-server", "--apps", "execution", "--workers", "1", "--host", "127.0.0.1")
    with subprocess.Popen(
        [AIRFLOW, *words, "--port", str(reserved.number)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        try:
            until(lambda: _answers(api), WAIT_S, "Airflow's API server answers")
            yield env
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/execution/health", timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.mark.logs(r"DeprecatedImportWarning")  # Airflow's log, of Airflow's own operators
def test_its_operators_drive_a_graph_of_jobs_and_a_call(
    cluster: LocalCluster, airflow: dict[str, str], tmp_path: Path
) -> None:
    def add_files(folder: str) -> int:
        return sum(int(Path(folder, name).read_text()) for name in ("double", "half"))

    stoker.init(cluster.info.gcs_url, token=TOKEN, namespace="team", log_to_driver=False)
    try:
        stoker.register(add_files)
        done = subprocess.run(
            [AIRFLOW, "dags", "test", "stoker_dag", "--use-executor"],
            env=airflow,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
        assert stoker.kv.get("total") == b"50"
        client = stoker.jobs.JobSubmissionClient(cluster.info.gcs_url, TOKEN)
        names = {job.name for job in client.list_jobs()}
        assert {"double", "halve"} <= names
        assert "prepare" not in names, "it was deleted"
    finally:
        stoker.shutdown()
