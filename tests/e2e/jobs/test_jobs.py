"""Jobs end to end: submitted by CLI, client and plain HTTP; environments, logs, ends, and what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import ConflictError
from stoker.jobs import JobState, JobSubmissionClient
from tests.e2e._cluster import environment, head, http
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

END_S = 40.0
PYTHON = sys.executable
GONE_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("j"), num_cpus=2) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> JobSubmissionClient:
    return JobSubmissionClient(cluster.info.gcs_url, cluster.info.token)


def script(folder: Path, text: str, name: str = "main.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def cli(cluster: LocalCluster, *args: str, timeout_s: float = 90) -> Any:
    return subprocess.run(
        [PYTHON, "-m", "stoker.cli", *args],
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_job_runs_its_driver_with_its_folder_and_variables(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    script(
        tmp_path,
        """
        import os, stoker
        import helper

        stoker.init()

        @stoker.remote
        def where():
            import helper
            return helper.NAME, os.environ["COLOUR"], os.path.exists("main.py")

        print("driver", helper.NAME, os.environ["COLOUR"], os.path.exists("main.py"))
        print("task", *stoker.get(where.remote()))
        """,
    )
    env = {"working_dir": str(tmp_path), "env_vars": {"COLOUR": "blue"}}
    job_id = client.submit_job(entrypoint=f"{PYTHON} main.py", runtime_env=env, name="first")
    job = client.wait(job_id, timeout_s=END_S)
    logs = client.get_job_logs(job_id)
    assert (job.state, job.exit_code) == (JobState.SUCCEEDED, 0), (job.message, logs)
    assert "driver helper blue True" in logs
    assert "task helper blue True" in logs
    assert job.submitted
    assert job.name == "first"


def test_a_folder_is_uploaded_once(client: JobSubmissionClient, tmp_path: Path) -> None:
    script(tmp_path, "print('here')")
    (tmp_path / "data.bin").write_bytes(os.urandom(200_000))
    sent: list[str] = []
    call = client.http.call

    def watched(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(f"{method} {path}")
        return call(method, path, *args, **kwargs)

    client.http.call = watched  # type: ignore[method-assign]
    env = {"working_dir": str(tmp_path)}
    first = client.submit_job(entrypoint=f"{PYTHON} main.py", runtime_env=env)
    assert any(line.startswith("PUT /v1/packages/") for line in sent)
    sent.clear()
    os.utime(tmp_path / "main.py")
    second = client.submit_job(entrypoint=f"{PYTHON} main.py", runtime_env=env)
    assert not any("packages" in line for line in sent)
    for job_id in (first, second):
        assert client.wait(job_id, timeout_s=END_S).state is JobState.SUCCEEDED


def test_py_modules_are_importable_in_driver_and_tasks(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    package = tmp_path / "lib" / "colours"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("RED = 'red'\n")
    program = (
        "import stoker, colours; stoker.init(); "
        "print('got', colours.RED, "
        "stoker.get(stoker.remote(lambda: __import__('colours').RED).remote()))"
    )
    job_id = client.submit_job(
        entrypoint=f'{PYTHON} -c "{program}"', runtime_env={"py_modules": [str(package)]}
    )
    job = client.wait(job_id, timeout_s=END_S)
    assert job.state is JobState.SUCCEEDED, client.get_job_logs(job_id)
    assert "got red red" in client.get_job_logs(job_id)


def test_a_pip_requirement_is_installed_for_the_job_alone(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    wheel = tmp_path / "tinycolour-1.0-py3-none-any.whl"
    info = "tinycolour-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinycolour.py", "GREEN = 'green'\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinycolour\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    program = "import tinycolour; print('got', tinycolour.GREEN)"
    job_id = client.submit_job(
        entrypoint=f'python -c "{program}"', runtime_env={"pip": [str(wheel)]}
    )
    job = client.wait(job_id, timeout_s=90)
    assert job.state is JobState.SUCCEEDED, (job.message, client.get_job_logs(job_id))
    assert "got green" in client.get_job_logs(job_id)
    with pytest.raises(ModuleNotFoundError):
        __import__("tinycolour")


def test_an_environment_that_cannot_be_made_fails_the_job_with_the_reason(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    job_id = client.submit_job(
        entrypoint="python -c 1", runtime_env={"pip": [str(tmp_path / "missing-1.0.whl")]}
    )
    job = client.wait(job_id, timeout_s=90)
    assert job.state is JobState.FAILED
    first = job.message.splitlines()[0]
    assert "missing-1.0.whl" in first and "exit code 1" in first, "pip's own words come first"


def test_a_package_that_is_not_there_fails_its_job_and_stops_no_other(
    client: JobSubmissionClient,
) -> None:
    job_id = client.submit_job(entrypoint="true", runtime_env={"working_dir": "ab" * 32})
    job = client.wait(job_id, timeout_s=END_S)
    assert job.state is JobState.FAILED
    assert f"package {'ab' * 6}… is not in this cluster" in job.message
    assert "ab" * 32 in job.message
    other = client.wait(client.submit_job(entrypoint="true"), timeout_s=END_S)
    assert other.state is JobState.SUCCEEDED


def test_explain_says_which_environment_is_being_installed_where(
    cluster: LocalCluster, client: JobSubmissionClient, tmp_path: Path
) -> None:
    project, may_end = tmp_path / "slowpkg", tmp_path / "may-end"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (project / "backend.py").write_text(
        "import pathlib, time\n"
        "def build_wheel(*args, **kwargs):\n"
        f"    while not pathlib.Path({str(may_end)!r}).exists():\n"
        "        time.sleep(0.05)\n"
        "    raise SystemExit('the backend gave up')\n"
    )
    job_id = client.submit_job(
        entrypoint="true", runtime_env={"pip": [f"slowpkg @ file://{project}"]}
    )

    def summary() -> str:
        told = http(cluster).call("GET", f"/v1/jobs/{job_id}/explain", reply=dict[str, Any])
        return str(told["summary"])

    until(lambda: "is being installed on node n_" in summary(), END_S, "it is being installed")
    assert "pip (slowpkg @ file://" in summary() and "since " in summary()
    other = client.wait(client.submit_job(entrypoint="true"), timeout_s=END_S)
    assert other.state is JobState.SUCCEEDED, "others do not wait for it"
    may_end.touch()
    job = client.wait(job_id, timeout_s=90)
    assert job.state is JobState.FAILED and "slowpkg" in job.message


@pytest.mark.parametrize("code", [0, 1, 42])
def test_the_exit_code_of_the_driver_is_the_jobs(client: JobSubmissionClient, code: int) -> None:
    entrypoint = f"{PYTHON} -c \"import sys; print('bye'); sys.exit({code})\""
    job = client.wait(client.submit_job(entrypoint=entrypoint), timeout_s=END_S)
    assert job.state is (JobState.FAILED if code else JobState.SUCCEEDED)
    assert job.exit_code == code
    assert code == 0 or "bye" in job.message


def test_the_cli_follows_a_job_and_ends_with_its_code(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    script(tmp_path, "import sys; print('working'); sys.exit(7)")
    done = cli(cluster, "job", "submit", "--working-dir", str(tmp_path), "--", PYTHON, "main.py")
    assert done.returncode == 7, done.stderr
    assert "working" in done.stdout
    job_id = json.loads(cli(cluster, "job", "list", "--json").stdout)
    listed = job_id["items"] if isinstance(job_id, dict) else job_id
    assert any(job["exit_code"] == 7 for job in listed)


def test_a_job_is_submitted_and_read_with_nothing_but_http(cluster: LocalCluster) -> None:
    def ask(method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            cluster.info.gcs_url + path,
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={
                "Authorization": f"Bearer {cluster.info.token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=END_S) as reply:
            return json.loads(reply.read())

    job = ask("POST", "/v1/jobs", {"entrypoint": "echo over http"})
    assert job["state"] == "PENDING"
    job = ask("GET", f"/v1/jobs/{job['job_id']}?wait_s=30")
    assert (job["state"], job["exit_code"]) == ("SUCCEEDED", 0)


def test_a_wrong_submission_names_the_field(cluster: LocalCluster) -> None:
    request = urllib.request.Request(
        f"{cluster.info.gcs_url}/v1/jobs",
        method="POST",
        data=b'{"entrypoint": 5}',
        headers={
            "Authorization": f"Bearer {cluster.info.token}",
            "Content-Type": "application/json",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=END_S)
    problem = json.loads(raised.value.read())
    raised.value.close()
    assert (problem["status"], problem["field"]) == (400, "entrypoint")


def test_output_is_seen_while_the_job_runs(client: JobSubmissionClient, tmp_path: Path) -> None:
    go = tmp_path / "go"
    path = script(
        tmp_path,
        f"""
        import os, time
        print("first", flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        print("second", flush=True)
        """,
    )
    job_id = client.submit_job(entrypoint=f"{PYTHON} {path}")
    seen = []
    for line in client.tail_job_logs(job_id):
        seen.append(line.text)
        if line.text == "first":
            assert not client.get_job_status(job_id).terminal
            go.touch()
    assert seen == ["first", "second"]


def test_a_job_id_of_ones_own_is_taken_once(client: JobSubmissionClient) -> None:
    client.submit_job(entrypoint="true", job_id="job_mine")
    with pytest.raises(ConflictError, match="job_mine"):
        client.submit_job(entrypoint="true", job_id="job_mine")
    client.wait("job_mine", timeout_s=END_S)


def test_a_job_that_ignores_sigterm_is_stopped_all_the_same(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
        print("pids", os.getpid(), child.pid, flush=True)
        time.sleep(60)
        """,
    )
    job_id = client.submit_job(entrypoint=f"exec {PYTHON} {path}")
    text = next(line.text for line in client.tail_job_logs(job_id) if "pids" in line.text)
    pids = [int(word) for word in text.split()[1:]]
    client.stop_job(job_id)
    job = client.wait(job_id, timeout_s=END_S)
    assert job.state is JobState.STOPPED
    until(lambda: not any(alive(pid) for pid in pids), 40, f"{pids} are gone")
    assert client.stop_job(job_id).state is JobState.STOPPED


def test_a_polite_job_is_stopped_at_once_and_a_pending_one_never_starts(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    mark = tmp_path / "cleaned"
    path = script(
        tmp_path,
        f"""
        import signal, sys, time
        def clean(*_):
            open({str(mark)!r}, "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, clean)
        print("up", flush=True)
        time.sleep(60)
        """,
    )
    job_id = client.submit_job(entrypoint=f"exec {PYTHON} {path}", entrypoint_num_cpus=2)
    next(line for line in client.tail_job_logs(job_id) if line.text == "up")
    waiting = client.submit_job(entrypoint="echo never", entrypoint_num_cpus=2)
    until(lambda: client.get_job(waiting).message, END_S, "the second one says why it waits")
    assert client.get_job_status(waiting) is JobState.PENDING
    assert client.stop_job(waiting).state is JobState.STOPPED
    client.stop_job(job_id)
    assert client.wait(job_id, timeout_s=END_S).state is JobState.STOPPED
    until(mark.exists, 40, "its handler ran")


def test_a_job_writes_into_a_folder_of_its_own(
    cluster: LocalCluster, client: JobSubmissionClient, tmp_path: Path
) -> None:
    script(
        tmp_path,
        """
        import os, stoker
        text = open("data.txt").read()
        print("found", text, os.path.exists("new.txt"))
        with open("data.txt", "r+") as file:  # in place: a link to a shared file would show it
            file.write("spoilt")
        open("new.txt", "w").close()

        stoker.init()
        @stoker.remote
        def seen():
            return open("data.txt").read(), os.path.exists("new.txt")
        print("task", *stoker.get(seen.remote()))
        """,
    )
    (tmp_path / "data.txt").write_text("intact")
    env = {"working_dir": str(tmp_path)}
    said = []
    for _ in range(2):
        job_id = client.submit_job(entrypoint=f"{PYTHON} main.py", runtime_env=env)
        assert client.wait(job_id, timeout_s=END_S).state is JobState.SUCCEEDED
        said.append(client.get_job_logs(job_id).splitlines())
    # All processes of one job share its folder; the next job, of equal content, finds it intact.
    assert said == [["found intact False", "task spoilt True"]] * 2


def test_what_a_job_writes_is_fetched_at_its_end_or_later(
    cluster: LocalCluster, client: JobSubmissionClient, tmp_path: Path
) -> None:
    script(
        tmp_path,
        """
        import os, pathlib, sys, stoker
        stoker.init()

        @stoker.remote
        def save(name):
            path = pathlib.Path(os.environ["STOKER_JOB_OUTPUT_DIR"], name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"w" * 3_000_001)

        stoker.get(save.remote("checkpoints/step_1.pt"))
        out = pathlib.Path(os.environ["STOKER_JOB_OUTPUT_DIR"])
        (out / "empty").touch()
        (out / ("long" * 40)).write_text("name")
        (out / "run.sh").write_text("#!/bin/sh")
        (out / "run.sh").chmod(0o755)
        (out / "last.pt").symlink_to("checkpoints/step_1.pt")
        (out / "stranger").symlink_to("/etc/passwd")
        sys.exit(3)
        """,
    )
    at_end, later = tmp_path / "at-end", tmp_path / "later"
    args = ("--working-dir", str(tmp_path), "--output", str(at_end), "--", PYTHON, "main.py")
    done = cli(cluster, "job", "submit", *args)
    assert done.returncode == 3, done.stderr  # the job's own, fetched all the same
    assert f"output: 5 files in {at_end}" in done.stderr
    job_id = next(word for word in done.stderr.split() if word.startswith("job_"))
    shown = cli(cluster, "job", "output", job_id)
    assert "4 files, 2.9 MiB" in shown.stdout, shown
    assert len(client.download_job_output(job_id, later)) == 5
    for folder in (at_end, later):
        assert (folder / "checkpoints" / "step_1.pt").read_bytes() == b"w" * 3_000_001
        assert (folder / "last.pt").read_bytes() == b"w" * 3_000_001
        assert (folder / ("long" * 40)).read_text() == "name"
        assert os.access(folder / "run.sh", os.X_OK)
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["checkpoints", "empty", "last.pt", "long" * 40, "run.sh"]
        )


def test_output_that_is_not_there_is_an_error_with_the_reason(
    cluster: LocalCluster, client: JobSubmissionClient, tmp_path: Path
) -> None:
    done = cli(cluster, "job", "submit", "--output", str(tmp_path / "none"), "--", "true")
    assert done.returncode == 0, done.stderr
    assert "wrote nothing into $STOKER_JOB_OUTPUT_DIR" in done.stderr
    done = cli(cluster, "job", "output", "job_unknown", "--to", str(tmp_path))
    assert (done.returncode, "job_unknown" in done.stderr) == (1, True), done
    done = cli(cluster, "job", "submit", "--no-wait", "--output", str(tmp_path), "--", "true")
    assert (done.returncode, "stoker job output" in done.stderr) == (2, True), done
