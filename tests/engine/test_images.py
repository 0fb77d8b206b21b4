"""Workers in containers, on a real engine: the image has this Python's packages, and files of its own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import RuntimeEnvSetupError
from stoker.jobs import JobSubmissionClient
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.events import payload_as
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild
from tests.e2e._cluster import embedded, head, run_driver
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.api.init import ClusterInfo

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("wire", "nodelet", "sdk", "gcs", "scheduler", "kernels")
WAIT_S = 120.0
MARK = "/etc/stoker-test-image"
DOCKERFILE = f"""
FROM python:3.11-slim
ENV PYTHONPATH=/opt/site ONLY_IN_IMAGE=yes PYTHONDONTWRITEBYTECODE=1
RUN echo here > {MARK} && ln -sf /bin/true /usr/local/bin/only-in-image
WORKDIR /srv
"""
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def docker(*args: str, **options: Any) -> str:
    """Run the engine's command; return what it says."""
    done = subprocess.run(
        ["docker", *args], capture_output=True, text=True, check=False, timeout=300, **options
    )
    assert done.returncode == 0, f"docker {args}: {done.stderr}"
    return done.stdout.strip()


def copy_packages(target: Path) -> None:
    """Copy Stoker and what it needs, as they are installed here."""
    names, seen = ["stoker"], set[str]()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        for line in found.requires or ():
            match = re.match(r"[A-Za-z0-9._-]+", line)
            if match and "extra ==" not in line and _is_installed(match[0]):
                names.append(match[0])
        for file in found.files or () if name != "stoker" else ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target / file)
    for folder in SOURCES:
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPO / folder, target, ignore=left_out, dirs_exist_ok=True)


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with marks of its own, and no Stoker."""
    name = f"stoker-test-bare:{secrets.token_hex(4)}"
    docker("build", "-q", "-t", name, "-", input=DOCKERFILE)
    yield name
    docker("rmi", "-f", name)


@pytest.fixture(scope="module")
def image(bare: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with Stoker."""
    context = tmp_path_factory.mktemp("image")
    copy_packages(context / "site")
    (context / "Dockerfile").write_text(f"FROM {bare}\nCOPY site /opt/site\n")
    name = bare.replace("bare", "image")
    docker("build", "-q", "-t", name, str(context))
    yield name
    docker("rmi", "-f", name)


@pytest.fixture(scope="module", autouse=True)
def cluster(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """A cluster; it ends before its image is removed, and leaves no container."""
    assert image
    with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=4) as info:
        yield info
    assert containers() == []


def containers() -> list[str]:
    """Return the containers of nodes of this test, in whatever state."""
    return docker("ps", "-a", "-q", "--filter", "label=stoker.io/node-id").split()


def remote(function: Any, image: str, **options: Any) -> Any:
    env = {"image_uri": image, **options.pop("runtime_env", {})}
    return stoker.remote(function).options(runtime_env=env, **options)


def test_a_task_has_the_files_and_variables_of_its_image(image: str) -> None:
    def seen(given: str) -> tuple[str, str, str | None, str, str, bool]:
        variables = os.environ["ONLY_IN_IMAGE"], os.environ["MODE"]
        tool = shutil.which("only-in-image")
        return (given, *variables, tool, os.getcwd(), os.path.exists(MARK))

    task = remote(seen, image, runtime_env={"env_vars": {"MODE": "fast"}})
    expected = ("x", "yes", "fast", "/usr/local/bin/only-in-image", "/srv", True)
    assert stoker.get(task.remote("x"), timeout=WAIT_S) == expected
    assert not Path(MARK).exists()


def test_what_a_task_starts_is_in_its_image_too(image: str) -> None:
    def outer() -> tuple[bool, bool]:
        @stoker.remote
        def inner() -> bool:
            return os.path.exists(MARK)

        below = inner.options(runtime_env={"env_vars": {"A": "1"}}).remote()
        return os.path.exists(MARK), stoker.get(below, timeout=WAIT_S)

    assert stoker.get(remote(outer, image).remote(), timeout=WAIT_S) == (True, True)


def test_a_large_value_is_shared_memory_both_ways(image: str) -> None:
    data = os.urandom(8 << 20)

    def back(ref: bytes) -> tuple[int, bytes]:
        return len(ref), ref[::-1]

    size, reverse = stoker.get(remote(back, image).remote(stoker.put(data)), timeout=WAIT_S)
    assert (size, reverse) == (len(data), data[::-1])


def test_an_actor_keeps_its_state_and_code_comes_with_its_folder(
    image: str, tmp_path: Path
) -> None:
    (tmp_path / "code_of_mine.py").write_text("STEP = 5\n")

    class Counter:
        def __init__(self) -> None:
            import code_of_mine  # type: ignore[import-not-found]

            self.total, self.step = 0, code_of_mine.STEP

        def add(self) -> tuple[int, bool, bool]:
            self.total += self.step
            return self.total, os.path.exists(MARK), os.path.exists("code_of_mine.py")

    actor = remote(Counter, image, runtime_env={"working_dir": str(tmp_path)}).remote()
    assert stoker.get(actor.add.remote(), timeout=WAIT_S) == (5, True, True)
    assert stoker.get(actor.add.remote(), timeout=WAIT_S) == (10, True, True)
    stoker.kill(actor)


def test_a_killed_worker_is_replaced_and_its_pid_is_the_hosts(image: str) -> None:
    def pid_of_first_try() -> int:
        before = stoker.kv.get("tried")
        if before is None:
            stoker.kv.put("tried", str(os.getpid()).encode())
            signal.pause()
        return int(before)

    ref = remote(pid_of_first_try, image, max_retries=2).remote()
    pid = int(until(lambda: stoker.kv.get("tried"), WAIT_S, "the first try"))
    os.kill(pid, signal.SIGKILL)
    assert stoker.get(ref, timeout=WAIT_S) == pid


def test_a_killed_container_takes_its_workers_along_and_is_started_again(image: str) -> None:
    def value(n: int) -> int:
        return n

    assert stoker.get(remote(value, image).remote(1), timeout=WAIT_S) == 1
    before = containers()
    assert before
    docker("kill", *before)
    assert stoker.get(remote(value, image, max_retries=3).remote(2), timeout=WAIT_S) == 2
    assert not set(containers()) & set(before)


def test_a_submitted_driver_runs_in_its_image(image: str, cluster: ClusterInfo) -> None:
    client = JobSubmissionClient(cluster.address, cluster.token)
    program = 'import stoker; stoker.init(); print(stoker.nodes()[0]["node_id"])'
    line = f"only-in-image && cat {MARK} && python3 -c '{program}'"
    job_id = client.submit_job(entrypoint=line, runtime_env={"image_uri": image})
    assert client.wait(job_id, timeout_s=WAIT_S).state == "SUCCEEDED", client.get_job_logs(job_id)
    assert client.get_job_logs(job_id).split() == ["here", cluster.node_id]


def test_a_killed_node_leaves_no_container(image: str, tmp_path: Path) -> None:
    others = set(containers())
    program = f'''
        import stoker, os
        stoker.init(log_to_driver=False)
        task = stoker.remote(runtime_env={{"image_uri": "{image}"}})(os.path.exists)
        print(stoker.get(task.remote("{MARK}")), stoker.nodes()[0]["pid"], flush=True)
        '''
    with head(tmp_path, num_cpus=2) as made:
        done = run_driver(made, program)
        assert done.stdout.startswith("True"), done.stderr
        assert set(containers()) - others
        os.kill(int(done.stdout.split()[1]), signal.SIGKILL)
        until(lambda: not set(containers()) - others, WAIT_S, "the end of the container")


def test_what_is_no_image_for_workers_says_why(bare: str, cluster: ClusterInfo) -> None:
    def nothing() -> None:
        return

    with pytest.raises(RuntimeEnvSetupError, match=r"cannot import Stoker\.\ninstall Stoker"):
        stoker.get(remote(nothing, bare).remote(), timeout=WAIT_S)
    missing = f"localhost/stoker-no-such-image:{secrets.token_hex(4)}"
    with pytest.raises(RuntimeEnvSetupError, match=f"pull of {missing} failed"):
        stoker.get(remote(nothing, missing).remote(), timeout=WAIT_S)
    http = HttpClient(cluster.address, token=cluster.token)

    def reported() -> bool:
        query = {"kind": "environment.", "limit": 1000}
        page: Page[Event] = http.call("GET", "/v1/events", reply=Page[Event], query=query)
        found = [payload_as(event, EnvironmentBuild) for event in page.items]
        states = [one.state for one in found if one and one.what == f"image ({missing})"]
        return states == [BuildState.INSTALLING, BuildState.FAILED]

    until(reported, WAIT_S, "both events")
