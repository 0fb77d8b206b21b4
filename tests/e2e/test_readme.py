"""Every block of README.md runs as it is written, so that it cannot rot.

The blocks run in the order of the page, each language in a world of its own: python blocks as
programs, lines of ``sh`` blocks one by one against a head that the page itself starts. The rules:

- a block of ``make`` commands, and ``make`` lines, are left out;
- ``job_4c1f…`` stands for the newest job of the cluster;
- ``/tmp/stoker-$UID`` stands for the session root, which is private here;
- ``train.py`` is a program that takes ``--lr``;
- a command that follows for ever is cut when it has shown something.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [
    text for language, text in BLOCKS if language == "sh" and not text.lstrip().startswith("make ")
]
TRAIN = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print("trained with", parser.parse_args().lr)
"""
WAIT_S = 40.0


class Reader:
    """Somebody who types what the page says into a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sessions = folder / "s"
        self.port = ReservedPort()
        self.remembered: list[str] = []
        (folder / "train.py").write_text(TRAIN)
        keep = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        marks = {k: v for k, v in os.environ.items() if k.startswith("STOKER_TEST_")}
        self.environ = {
            **keep,
            **marks,
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STOKER_SESSION_ROOT": str(self.sessions),
            "STOKER_PORT": str(self.port),
        }

    def types(self, line: str) -> str:
        """Run a line in a shell that remembers what was set before; return what it printed."""
        line = line.replace("/tmp/stoker-$UID", str(self.sessions))
        if "job_4c1f…" in line:
            newest = re.findall(r'"job_id": "(job_\w+)"', self.run("stoker list jobs --json"))[-1]
            line = line.replace("job_4c1f…", newest)
        if re.match(r"export |\w+\(\) ", line):
            self.remembered.append(line)
            return ""
        if variable := re.match(r"(\w+)=\$\(", line):
            value = self.run(f"{line}; printf %s ${variable[1]}")
            self.remembered.append(f"{variable[1]}={value}")
            return value
        return self.run(line)

    def run(self, line: str) -> str:
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
                out, err = process.communicate(timeout=WAIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{line}: exit code {process.returncode}\n{out}{err}"
        return out


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Leaves no cluster behind, however far the page got."""
    made = Reader(tmp_path)
    yield made
    made.run("stoker stop")


def lines(block: str) -> list[str]:
    """The commands of a block, without comments."""
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def test_the_page_holds_what_is_run_here() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "python", ""}
    assert (len(PYTHON), len(SHELL)) == (1, 2), "a block was added: it must run here too"
    assert all(target in (ROOT / "Makefile").read_text() for target in ("demo:", "test:", "up:"))


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
        for line in lines(SHELL[0])
    }
    assert said["start --head"].startswith(f"Started a cluster at http://127.0.0.1:{reader.port}")
    assert "Nodes (1 alive, 0 dead)" in said["status"]
    assert said["job submit --working-dir . -- python train.py --lr 0.1"] == "trained with 0.1\n"
    assert "SUCCEEDED" in said["list jobs"]
    assert "is SUCCEEDED" in said["explain job_4c1f…"]
    assert said["logs -f job_4c1f…"] == "trained with 0.1\n"
    assert said["stop"] == f"Stopped the cluster http://127.0.0.1:{reader.port}\n"


def test_curl_does_what_the_page_says(reader: Reader) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    reader.run("stoker start --head")
    said = [reader.types(line) for line in lines(SHELL[1])]
    texts = {line: text for line, text in zip(lines(SHELL[1]), said, strict=True) if text}
    asked = {line.split('"')[1] if '"' in line else line.split()[1]: t for line, t in texts.items()
             if line.startswith("api /") or line.startswith('api "/')}  # fmt: skip
    assert '"state":"ALIVE"' in asked["/v1/nodes"]
    assert asked["/v1/jobs/$JOB/logs?follow=1"] == "hello\n"
    assert '"kind":"job.submitted"' in asked["/v1/events?watch=1&kind=job."]
    assert json.loads(asked["/openapi.json"])["openapi"] == "3.1.0"
