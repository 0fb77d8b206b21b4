"""Every block of README.md runs as it is written, so that it cannot rot.

The reader has a copy of the repository, an empty HOME and nothing of Stoker on the PATH: the first
block, typed as it stands, makes the environment and installs into it, and all others run with that.
The blocks run in the order of the page. The rules:

- a block of ``make`` commands is left out here; tests/engine runs the one about containers;
- what Stoker depends on is not fetched again, which would take minutes: the new environment finds it
  in that of the tests (and the tool that builds the wheel, where that is there; else pip fetches it);
- ``job_4c1f…`` stands for the newest job of the cluster;
- ``/tmp/stoker-$UID`` stands for the session root, which is private here;
- ``train.py`` is a program that takes ``--lr`` and leaves a model behind;
- a command that follows for ever is cut when it has shown something.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [
    text for language, text in BLOCKS if language == "sh" and not text.lstrip().startswith("make ")
]
TRAIN = """\
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print("trained with", parser.parse_args().lr)
pathlib.Path(os.environ["STOKER_JOB_OUTPUT_DIR"], "model.pt").write_text("weights")
"""
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "tests", "benchmarks", "docs", "runs", "build", "dist", "*.egg-info"
)
WAIT_S = 60.0
INSTALL_S = 300.0
pytestmark = pytest.mark.timeout(INSTALL_S + WAIT_S)


class Reader:
    """Somebody who types what the page says into a shell, in a clone of the repository."""

    def __init__(self, clone: Path, home: Path) -> None:
        self.folder = clone
        self.sessions = home / "s"
        self.port = ReservedPort()
        self.remembered: list[str] = []
        marks = {k: v for k, v in os.environ.items() if k.startswith("STOKER_TEST_")}
        self.environ = {
            **marks,
            "HOME": str(home),
            "PATH": f"{clone.parent / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "STOKER_SESSION_ROOT": str(self.sessions),
            "STOKER_PORT": str(self.port),
        }

    def types(self, line: str, timeout_s: float = WAIT_S) -> str:
        """Run a line in a shell that remembers what was set before; return what it printed."""
        line = line.replace("/tmp/stoker-$UID", str(self.sessions))
        if "job_4c1f…" in line:
            newest = re.findall(r'"job_id": "(job_\w+)"', self.run("stoker list jobs --json"))[-1]
            line = line.replace("job_4c1f…", newest)
        if re.match(r"export |\w+\(\) |\. ", line):
            self.remembered.append(line)
            return ""
        if variable := re.match(r"(\w+)=\$\(", line):
            value = self.run(f"{line}; printf %s ${variable[1]}")
            self.remembered.append(f"{variable[1]}={value}")
            return value
        return self.run(line, timeout_s)

    def run(self, line: str, timeout_s: float = WAIT_S) -> str:
        """Run a line to its end; of one that never ends, return the first thing it says."""
        program = "\n".join(["set -e -o pipefail", *self.remembered, line])
        process = subprocess.Popen(
            ["bash", "-c", program],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                if "watch=1" in line:
                    assert process.stdout is not None
                    return process.stdout.readline()
                out, err = process.communicate(timeout=timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{line}: exit code {process.returncode}\n{out}{err}"
        return out


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which the first block was typed."""
    folder = tmp_path_factory.mktemp("readme")
    made = folder / "clone"
    shutil.copytree(ROOT, made, ignore=LEFT_OUT)
    (made / "train.py").write_text(TRAIN)
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    reader = Reader(made, folder)
    venv, activate, install = lines(SHELL[0])
    reader.types(venv, INSTALL_S)
    reader.types(activate)
    (site,) = (made / ".venv" / "lib").glob("python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "of_the_tests.pth").write_text("\n".join(paths))
    if importlib.util.find_spec("hatchling"):
        reader.environ["PIP_NO_BUILD_ISOLATION"] = "0"  # for pip this means: without isolation
    else:
        passed = ("PIP_", "SSL_", "HTTP", "http", "NO_PROXY", "no_proxy")
        reader.environ |= {k: v for k, v in os.environ.items() if k.startswith(passed)}
    reader.types(install, INSTALL_S)
    assert (made / ".venv" / "bin" / "stoker").exists()
    return made


@pytest.fixture
def reader(clone: Path, tmp_path: Path) -> Iterator[Reader]:
    """Leaves no cluster behind, however far the page got."""
    made = Reader(clone, tmp_path)
    made.types(lines(SHELL[0])[1])
    yield made
    made.run("stoker stop")


def lines(block: str) -> list[str]:
    """The commands of a block, without comments."""
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def test_the_page_holds_what_is_run_here() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "python", ""}
    assert (len(PYTHON), len(SHELL)) == (1, 3), "a block was added: it must run here too"
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo:", "test:", "up:", "down:"):
        assert f"\n{target}" in makefile
    duration = re.search(r"make test .*\((about \d+ minutes on 2 cores)\)", README)
    assert duration is not None
    for page in ("Makefile", "CONTRIBUTING.md"):
        assert duration[1] in (ROOT / page).read_text(), page


def test_what_was_installed_is_not_the_repository(reader: Reader) -> None:
    where = reader.run("cd / && python -c 'import stoker; print(stoker.__file__)'")
    assert where.startswith(str(reader.folder / ".venv"))
    assert reader.run("command -v stoker").startswith(str(reader.folder / ".venv"))


@pytest.mark.parametrize("block", PYTHON)
def test_a_program_prints_what_its_comments_say(reader: Reader, block: str) -> None:
    (reader.folder / "program.py").write_text(block)
    said = reader.run("python program.py").splitlines()
    promised = re.findall(r"^print\(.*\)\s+# (.*)$", block, re.MULTILINE)
    assert promised
    assert said == promised


def test_the_command_line_does_what_the_page_says(reader: Reader) -> None:
    said = {
        line.partition(" ")[2].split(" #")[0].strip(): reader.types(line)
        for line in lines(SHELL[1])
    }
    assert said["start --head"].startswith(f"Started a cluster at http://127.0.0.1:{reader.port}")
    assert "Nodes (1 alive, 0 dead)" in said["status"]
    submit = "job submit --working-dir . --output results -- python train.py --lr 0.1"
    assert said[submit] == "trained with 0.1\n"
    assert (reader.folder / "results" / "model.pt").read_text() == "weights"
    assert "SUCCEEDED" in said["list jobs"]
    assert "is SUCCEEDED" in said["explain job_4c1f…"]
    assert said["logs -f job_4c1f…"] == "trained with 0.1\n"
    assert said["stop"] == f"Stopped the cluster http://127.0.0.1:{reader.port}\n"


def test_curl_does_what_the_page_says(reader: Reader) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    reader.run("stoker start --head")
    # A program with a cluster of its own does not take the started one's place.
    reader.run("python -c 'import stoker; stoker.init(port=0); stoker.shutdown()'")
    said = [reader.types(line) for line in lines(SHELL[2])]
    texts = {line: text for line, text in zip(lines(SHELL[2]), said, strict=True) if text}
    asked = {line.split('"')[1] if '"' in line else line.split()[1]: t for line, t in texts.items()
             if line.startswith("api /") or line.startswith('api "/')}  # fmt: skip
    assert '"state":"ALIVE"' in asked["/v1/nodes"]
    assert asked["/v1/jobs/$JOB/logs?follow=1"] == "hello\n"
    assert '"nodes":[]' in asked["/v1/jobs/$JOB/output"]
    assert '"kind":"job.submitted"' in asked["/v1/events?watch=1&kind=job."]
    assert json.loads(asked["/openapi.json"])["openapi"] == "3.1.0"
    assert "\nstoker_" in reader.run("api /metrics"), "as the chapter on metrics says"
