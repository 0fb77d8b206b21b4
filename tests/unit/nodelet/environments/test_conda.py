"""Conda's words, and those about a node without it or with another Python."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.environments import conda
from stoker_wire.errors import RuntimeEnvSetupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def answering(*outputs: str) -> conda.Run:
    """Commands that say these, one after the other."""
    rest = iter(outputs)

    async def run(command: list[str], what: str, env: Mapping[str, str] | None = None) -> str:
        return next(rest)

    return run


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program ``mamba``, the only one on the PATH."""
    path = tmp_path / "programs" / "mamba"
    path.parent.mkdir()
    path.touch(0o755)
    for name in ("MAMBA_EXE", "CONDA_EXE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def env(folder: Path) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    return folder


def test_the_tool_is_found_on_the_path_or_by_its_variable(
    tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conda.find_conda() == str(tool)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeEnvSetupError, match="install micromamba"):
        conda.find_conda()
    monkeypatch.setenv("CONDA_EXE", str(tool))
    assert conda.find_conda() == str(tool)


async def test_an_environment_is_found_in_what_conda_lists(tool: Path, tmp_path: Path) -> None:
    prefix = env(tmp_path / "envs" / "mine")
    listed = f'WARNING: old\n{{"envs": ["/base", "{prefix}"]}}\n'
    facts = f'["{sys.implementation.cache_tag}", "3.11.0", "/p", "/p"]'
    found = await conda.find("mine", answering(listed, facts))
    assert found == conda.CondaEnvironment(prefix, ("/p",))
    assert found.python == str(prefix / "bin" / "python")
    with pytest.raises(RuntimeEnvSetupError, match="there are: base, mine"):
        await conda.find("other", answering(listed))


@pytest.mark.parametrize("output", ["", "what?", '{"envs": 3}', '{"other": []}', "}{"])
async def test_a_list_that_is_none_is_said_to_be_none(tool: Path, output: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match="not understood"):
        await conda.find("mine", answering(output))


async def test_another_python_is_refused_with_the_one_that_is_needed(tmp_path: Path) -> None:
    prefix = env(tmp_path / "mine")
    with pytest.raises(RuntimeEnvSetupError, match=r"its Python is 2\.7\.18.*\nadd python=3"):
        await conda.find(str(prefix), answering('["cpython-27", "2.7.18", "/p", "/q"]'))
    for noise in ("", "Segmentation fault", "[1]"):
        with pytest.raises(RuntimeEnvSetupError, match="does not answer"):
            await conda.find(str(prefix), answering(noise))
