"""The engine of a node and its images, with a stand-in for the engine's command."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.environments.images import Container, Images
from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.process.background import Background
from stoker_wire.version import PROTOCOL_TEXT, VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

OURS = f"{VERSION} (protocol {PROTOCOL_TEXT})"
ENGINE = """#!/bin/sh
cd {folder}
echo "$*" >> log
case "$1" in
image) test -e pulled || exit 1; echo sha256:abc ;;
pull) test -e known || {{ echo "Error: no such manifest" >&2; exit 1; }}; touch pulled ;;
info) test ! -e down || {{ echo "cannot connect to the socket" >&2; exit 1; }} ;;
run) cat said ;;
esac
"""


class Engine:
    """A stand-in: files say whether it answers, which image is there, and what that one's Python says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = folder / "docker"
        self.command.write_text(ENGINE.format(folder=folder))
        self.command.chmod(0o755)
        self.set("known")
        self.says(list(sys.version_info[:3]), OURS)

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def says(self, version: list[int], stoker: str, before: str = "") -> None:
        (self.folder / "said").write_text(f"{before}{json.dumps([version, stoker])}\n")

    def calls(self, name: str) -> int:
        lines = (self.folder / "log").read_text().splitlines()
        return sum(line.startswith(f"{name} ") for line in lines)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


async def report(pull: Callable[[], Awaitable[object]]) -> None:
    await pull()


async def prepare(engine: Engine, times: int = 1, **more: Any) -> Container:
    async with Background("test") as background:
        images = Images(background, str(engine.command))
        for _ in range(times):
            container = await images.prepare(RuntimeEnv(image_uri="x/y:1", **more), report)
    return container


async def test_an_image_is_pulled_and_looked_at_once(engine: Engine) -> None:
    assert await prepare(engine, times=3) == Container("sha256:abc")
    assert (engine.calls("pull"), engine.calls("run")) == (1, 1)


async def test_an_image_that_is_here_is_not_pulled(engine: Engine) -> None:
    engine.set("pulled")
    assert await prepare(engine) == Container("sha256:abc")
    assert engine.calls("pull") == 0


async def test_what_a_pull_says_is_told(engine: Engine) -> None:
    (engine.folder / "known").unlink()
    with pytest.raises(RuntimeEnvSetupError, match=r"pull of x/y:1 failed .*\n.*no such manifest"):
        await prepare(engine)


async def test_an_engine_that_does_not_answer_is_not_asked_to_pull(engine: Engine) -> None:
    engine.set("down")
    with pytest.raises(
        RuntimeEnvSetupError,
        match=r"engine of this node does not answer\.\nstart it.*\ncannot conn",
    ):
        await prepare(engine)
    assert engine.calls("pull") == 0


@pytest.mark.parametrize(
    ("version", "stoker", "before", "message"),
    [
        ([2, 7, 18], OURS, "", r"the Python of x/y:1 is 2\.7\.18, and that of this node 3"),
        (
            None,
            "0.0.1 (protocol 1.0)",
            "",
            r"x/y:1 has Stoker 0\.0\.1 \(protocol 1\.0\)\.\ninstall",
        ),
        (None, "", "No module named 'stoker'\n", r"cannot import Stoker\.\n.*No module named"),
    ],
)
async def test_what_an_image_lacks_is_told_with_the_versions(
    engine: Engine, version: list[int] | None, stoker: str, before: str, message: str
) -> None:
    engine.says(version or list(sys.version_info[:3]), stoker, before)
    with pytest.raises(RuntimeEnvSetupError, match=message):
        await prepare(engine)


@pytest.mark.parametrize("said", ["", "what?", "[1]", '{"a": 1}', "[1, 2]"])
async def test_an_image_that_says_something_else_is_told(engine: Engine, said: str) -> None:
    (engine.folder / "said").write_text(said)
    with pytest.raises(RuntimeEnvSetupError, match="does not answer"):
        await prepare(engine)


async def test_what_the_node_would_do_is_refused_beside_an_image(engine: Engine) -> None:
    with pytest.raises(RuntimeEnvSetupError, match=r"runtime_env\.pip: it is not done in images"):
        await prepare(engine, pip=("x",))


async def test_a_node_without_an_engine_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with Background("test") as background:
        with pytest.raises(RuntimeEnvSetupError, match=r"no container engine\.\nput docker or pod"):
            Images(background).engine()
        with pytest.raises(RuntimeEnvSetupError, match="this node has no 'nerdctl'"):
            Images(background, "nerdctl").engine()


async def test_podman_is_found_where_there_is_no_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "podman").touch(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    async with Background("test") as background:
        assert Images(background).engine() == str(tmp_path / "podman")


def test_workers_are_shared_within_an_image_and_its_gpus_alone() -> None:
    containers = [None, Container("a"), Container("b"), Container("a", ("GPU-1",))]
    environments = [Environment(container=one).keyed() for one in containers]
    assert len({one.key for one in environments}) == len(containers)
    assert [one.applicable_after_fork for one in environments] == [True, False, False, False]
