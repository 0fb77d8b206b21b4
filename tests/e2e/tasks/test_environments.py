"""Environments of tasks on real workers: uv, setup commands, and what each worker runs first."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.exceptions import RuntimeEnvSetupError
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=2):
        yield


def wheel(folder: Path) -> Path:
    """A wheel of one module, ``tiny_uv``."""
    path = folder / "tiny_uv-1.0-py3-none-any.whl"
    info = "tiny_uv-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_uv.py", "VALUE = 42\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-uv\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"tiny_uv.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return path


@stoker.remote(max_retries=0)
def read_tiny() -> int:
    tiny_uv = importlib.import_module("tiny_uv")

    value: int = tiny_uv.VALUE
    return value


def test_uv_installs_requirements_and_projects(tmp_path: Path) -> None:
    built = wheel(tmp_path)
    env = {"uv": [f"tiny-uv @ {built.as_uri()}"]}
    assert stoker.get(read_tiny.options(runtime_env=env).remote(), timeout=60) == 42
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["tiny-uv @ {built.as_uri()}"]\n'
    )
    of_project = {"uv": str(project)}
    assert stoker.get(read_tiny.options(runtime_env=of_project).remote(), timeout=60) == 42


def test_a_requirement_that_uv_cannot_find_is_said_in_its_words(tmp_path: Path) -> None:
    env = {"uv": [str(tmp_path / "missing-1.0-py3-none-any.whl")]}
    with pytest.raises(RuntimeEnvSetupError, match=r"uv pip install[^\n]*missing-1.0"):
        stoker.get(read_tiny.options(runtime_env=env).remote(), timeout=60)


def test_a_setup_command_is_run_once_and_kept_with_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {"setup": f'echo "$GREETING" >> {log}; echo done > made', "env_vars": {"GREETING": "hi"}}

    @stoker.remote(runtime_env=env, max_retries=0)
    def made() -> str:
        return (Path(sys.prefix) / "made").read_text()

    assert stoker.get([made.remote(), made.remote()], timeout=60) == ["done\n", "done\n"]
    assert log.read_text() == "hi\n"


def test_a_setup_command_that_fails_fails_the_task_with_its_output() -> None:
    @stoker.remote(runtime_env={"setup": "echo no such luck; exit 3"}, max_retries=0)
    def never() -> None: ...

    with pytest.raises(RuntimeEnvSetupError, match="exit code 3") as failure:
        stoker.get(never.remote(), timeout=60)
    assert "no such luck" in str(failure.value)


def test_a_worker_runs_its_setup_before_its_first_call_and_once() -> None:
    def prepare() -> None:
        import builtins

        builtins.prepared = getattr(builtins, "prepared", 0) + 1  # type: ignore[attr-defined]

    def prepared() -> int:
        import builtins

        return getattr(builtins, "prepared", 0)

    class Prepared:
        def __init__(self) -> None:
            self.seen = prepared()

        def get(self) -> int:
            return self.seen

    env = {"worker_process_setup": prepare}
    task = stoker.remote(runtime_env=env)(prepared)
    assert stoker.get([task.remote() for _ in range(5)], timeout=60) == [1] * 5
    assert stoker.get(stoker.remote(prepared).remote(), timeout=60) == 0
    actor = stoker.remote(runtime_env=env)(Prepared).remote()
    assert stoker.get(actor.get.remote(), timeout=60) == 1


def test_a_worker_setup_that_fails_fails_each_call_with_its_reason() -> None:
    task = stoker.remote(runtime_env={"worker_process_setup": "math:no_such"}, max_retries=0)(abs)
    with pytest.raises(RuntimeEnvSetupError, match="math:no_such failed"):
        stoker.get(task.remote(1), timeout=60)
