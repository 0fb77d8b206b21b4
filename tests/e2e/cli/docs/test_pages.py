"""Every page of the documentation runs as it is written: Python in one process, commands in one shell.

All pages share a cluster, each has a job and an empty folder of its own. What ``print(...)  # VALUE``
promises must come, in that order. :mod:`tests.e2e.cli.docs._blocks` says what a block that is not executed
carries.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import environment, head
from tests.e2e.cli.docs._blocks import PYTHON, SHELL, Block, blocks_of, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

WAIT_S = 90.0
RUN = {
    page: blocks
    for page, text in pages().items()
    if not page.startswith("docs/errors/")
    and (blocks := [block for block in blocks_of(page, text) if block.is_run])
}
PROMISE = re.compile(r"^print\(.*\)  # ((?!\.\.\.).+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", "1")
        with head(tmp_path_factory.mktemp("docs"), num_cpus=8, num_gpus=2) as started:
            yield started


def run(command: list[str], folder: Path, cluster: LocalCluster) -> str:
    """Run a program of a page to its end; return what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(cluster, HOME=str(folder), PATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def program_of(blocks: list[Block]) -> str:
    """Return the Python of a page as one program."""
    text = "\n\n".join(f"{block.first}\n{block.text}" for block in blocks)
    if "stoker.init(" not in text:
        text = f"import stoker\n\nstoker.init()\n{text}"
    return text


@pytest.mark.parametrize("page", RUN)
def test_a_page_does_what_it_says(page: str, cluster: LocalCluster, tmp_path: Path) -> None:
    python = [block for block in RUN[page] if block.language in PYTHON]
    shell = [block for block in RUN[page] if block.language in SHELL]
    if python:
        program = program_of(python)
        (tmp_path / "page.py").write_text(program)
        said = iter(run([sys.executable, "page.py"], tmp_path, cluster).splitlines())
        for promised in PROMISE.findall(program):
            assert promised in said, f"{page} promises {promised!r}"
    if shell:
        script = "\n".join(["set -e -o pipefail", *(block.commands for block in shell)])
        run(["bash", "-c", script], tmp_path, cluster)


def test_pages_are_run() -> None:
    assert "docs/tutorial.md" in RUN
    assert len(RUN) > 10
