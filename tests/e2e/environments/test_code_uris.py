"""Code from URIs on real workers: fetched by the driver, pinned, and the same for tasks and for jobs."""

from __future__ import annotations

import importlib
import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.exceptions import RuntimeEnvSetupError
from stoker.jobs import JobState, JobSubmissionClient
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.api.init import ClusterInfo

JOB_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=2) as info:
        yield info


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit, with ``fetched.py`` and a file of data."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "fetched.py").write_text("VALUE = 1\n")
    (folder / "data.txt").write_text("data")
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    own = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", *own, "-C", str(folder), *arguments], check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "change")


@stoker.remote(max_retries=0)
def fetched_value() -> int:
    value: int = importlib.import_module("fetched").VALUE
    return value


@stoker.remote(max_retries=0)
def here() -> list[str]:
    return sorted(path.name for path in Path.cwd().iterdir() if path.suffix)


def test_a_repository_is_the_working_dir_and_stays_the_commit_that_it_was(
    cluster: ClusterInfo, repository: Path
) -> None:
    env = {"working_dir": f"git+{repository.as_uri()}"}
    assert stoker.get(fetched_value.options(runtime_env=env).remote(), timeout=60) == 1
    (repository / "fetched.py").write_text("VALUE = 2\n")
    commit(repository)
    assert stoker.get(fetched_value.options(runtime_env=env).remote(), timeout=60) == 1
    assert stoker.get(here.options(runtime_env=env).remote(), timeout=60) == [
        "data.txt",
        "fetched.py",
    ]
    narrowed = env | {"excludes": ["*.txt"]}
    assert stoker.get(here.options(runtime_env=narrowed).remote(), timeout=60) == ["fetched.py"]


def test_an_archive_is_a_module(cluster: ClusterInfo, tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("code-1.0/fetched.py", "VALUE = 3")
    env = {"py_modules": [archive.as_uri()]}
    assert stoker.get(fetched_value.options(runtime_env=env).remote(), timeout=60) == 3


def test_a_job_is_submitted_with_a_repository(cluster: ClusterInfo, repository: Path) -> None:
    client = JobSubmissionClient(cluster.address, cluster.token)
    job_id = client.submit_job(
        entrypoint="python -c 'import fetched; print(fetched.VALUE, open(\"data.txt\").read())'",
        runtime_env={"working_dir": f"git+{repository.as_uri()}"},
    )
    job = client.wait(job_id, timeout_s=JOB_S)
    assert job.state is JobState.SUCCEEDED, client.get_job_logs(job_id)
    assert "1 data" in client.get_job_logs(job_id)


def test_what_cannot_be_fetched_is_an_error_of_the_call(
    cluster: ClusterInfo, tmp_path: Path
) -> None:
    env = {"working_dir": f"git+{(tmp_path / 'none').as_uri()}"}
    with pytest.raises(RuntimeEnvSetupError, match="cannot be fetched by git"):
        fetched_value.options(runtime_env=env).remote()
