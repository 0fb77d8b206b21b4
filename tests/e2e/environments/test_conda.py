"""Environments of conda under real workers. A stand-in makes them: what conda itself does is not tested."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import RuntimeEnvSetupError
from tests.e2e._cluster import embedded
from tests.e2e.environments import fake_conda

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def envs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster whose node has the stand-in; the folder of the environments that have names."""
    folder, envs = tmp_path_factory.mktemp("bin"), tmp_path_factory.mktemp("envs")
    tool = folder / "micromamba"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_conda.__file__} "$@"\n')
    tool.chmod(0o755)
    fake_conda.make(envs / "mine", "named")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("FAKE_CONDA_ENVS", str(envs))
        with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=2):
            yield envs


@stoker.remote(max_retries=0)
def seen() -> tuple[Any, str, str | None]:
    value = importlib.import_module("from_conda").VALUE
    return value, os.environ["CONDA_PREFIX"], shutil.which("conda-tool")


def files(folder: Path) -> list[Path]:
    return [one for one in sorted(folder.rglob("*")) if "__pycache__" not in one.parts]


def get(conda: Any, **more: Any) -> tuple[Any, str, str | None]:
    env = {"conda": conda, **more}
    found: tuple[Any, str, str | None] = stoker.get(
        seen.options(runtime_env=env).remote(), timeout=120
    )
    return found


def test_an_environment_that_has_a_name_is_used_and_not_written_to(envs: Path) -> None:
    before = files(envs)
    where = str(envs / "mine")
    assert get("mine") == get(where) == ("named", where, f"{where}/bin/conda-tool")
    assert files(envs) == before


def test_an_environment_is_made_of_a_mapping_and_of_the_same_file_once(tmp_path: Path) -> None:
    value, prefix, tool = get({"dependencies": ["python", "x"]})
    assert value == ["python", "x"]
    assert tool == f"{prefix}/bin/conda-tool"
    assert Path(prefix).parent.suffix == ".conda"
    file = tmp_path / "environment.yml"
    file.write_text('{"dependencies": ["python", "x"]}')
    assert get(str(file)) == (value, prefix, tool)


def test_a_setup_command_finds_its_programs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    get("mine", setup=f'conda-tool > {log}; echo "$CONDA_PREFIX" >> {log}')
    assert log.read_text().startswith("found\n/")


@pytest.mark.parametrize(
    ("conda", "message"),
    [
        ("other", r"no environment 'other'[^\n]*\n.*there are: mine"),
        ("/nowhere", "/nowhere has no Python"),
        ({"dependencies": ["python", "nosuch"]}, r"conda env create failed.*\n.*does not exist"),
        ({"dependencies": ["zlib"]}, r"has no Python[^\n]*\nadd python=3"),
    ],
)
def test_what_cannot_be_had_names_the_fix(conda: Any, message: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match=message):
        get(conda)
