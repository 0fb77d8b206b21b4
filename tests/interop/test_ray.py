"""Ray's own job client and command line against a cluster: ``make interop``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray.job_submission", reason="Ray is not installed: make interop")

from ray.job_submission import JobStatus, JobSubmissionClient

from tests.e2e._cluster import head
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("ray"), num_cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> JobSubmissionClient:
    headers = {"Authorization": f"Bearer {cluster.info.token}"}
    return JobSubmissionClient(cluster.info.gcs_url, headers=headers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/told.txt").write_text("packed")
    (tmp_path / "main.py").write_text(
        "import os\nprint(open('inner/told.txt').read(), os.environ['TOLD'])\n"
    )
    return tmp_path


def ended(client: JobSubmissionClient, job_id: str) -> JobStatus:
    def terminal() -> bool:
        return bool(client.get_job_status(job_id).is_terminal())

    until(terminal, 60.0, f"{job_id} ends")
    return client.get_job_status(job_id)


def test_a_job_has_its_folder_variables_metadata_and_resources(
    client: JobSubmissionClient, folder: Path
) -> None:
    job_id = client.submit_job(
        entrypoint="python main.py",
        submission_id="my-run",
        runtime_env={"working_dir": str(folder), "env_vars": {"TOLD": "by variable"}},
        metadata={"team": "a"},
        entrypoint_num_cpus=1,
    )
    assert job_id == "my-run"

    async def tail() -> str:
        return "".join([part async for part in client.tail_job_logs(job_id)])

    assert asyncio.run(tail()) == "packed by variable\n"
    assert ended(client, job_id) is JobStatus.SUCCEEDED
    assert client.get_job_logs(job_id) == "packed by variable\n"
    info = client.get_job_info(job_id)
    assert info.metadata == {"team": "a"}
    assert info.submission_id == "my-run"
    assert info.driver_exit_code == 0
    assert "my-run" in [job.submission_id for job in client.list_jobs()]
    with pytest.raises(RuntimeError, match="there is a job"):
        client.submit_job(entrypoint="true", submission_id="my-run")
    assert client.delete_job(job_id)
    with pytest.raises(RuntimeError, match="404: there is no job"):
        client.get_job_status(job_id)


def test_a_job_that_runs_is_stopped_and_one_that_fails_says_so(client: JobSubmissionClient) -> None:
    job_id = client.submit_job(entrypoint="echo begun; sleep 600")
    until(lambda: client.get_job_logs(job_id) == "begun\n", 60.0, "it has begun")
    with pytest.raises(RuntimeError, match="409"):
        client.delete_job(job_id)
    assert client.stop_job(job_id)
    assert ended(client, job_id) is JobStatus.STOPPED
    assert not client.stop_job(job_id)
    failing = client.submit_job(entrypoint="exit 3")
    assert ended(client, failing) is JobStatus.FAILED
    assert client.get_job_info(failing).driver_exit_code == 3


def test_what_stoker_lacks_is_refused_by_name(client: JobSubmissionClient) -> None:
    with pytest.raises(RuntimeError, match=r"400: runtime_env has no key 'java_jars'"):
        client.submit_job(entrypoint="true", runtime_env={"java_jars": ["a.jar"]})


def test_the_command_line_works(cluster: LocalCluster, folder: Path) -> None:
    def ray(*args: str, code: int = 0) -> str:
        headers = f'{{"Authorization": "Bearer {cluster.info.token}"}}'
        options = ("--address", cluster.info.gcs_url, "--headers", headers)
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ray")), "job", args[0], *options, *args[1:]],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    env = '{"env_vars": {"TOLD": "from the shell"}}'
    submit = ("--submission-id", "cli", "--working-dir", str(folder), "--runtime-env-json", env)
    said = ray("submit", *submit, "--", "python", "main.py")
    assert "packed from the shell" in said
    assert "succeeded" in said
    assert "SUCCEEDED" in ray("status", "cli").upper()
    assert "packed from the shell" in ray("logs", "--follow", "cli")
    assert "cli" in ray("list")
    ray("submit", "--no-wait", "--submission-id", "long", "--", "sleep", "600")
    assert "stopped" in ray("stop", "long")
    assert "deleted" in ray("delete", "long")
