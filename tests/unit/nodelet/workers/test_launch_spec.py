"""The shell of a driver: its program alone decides when SIGTERM ends it, and with which exit code."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.workers.launch_spec import shell_script
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

PATH = os.environ["PATH"]
PROGRAM = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(int(sys.argv[2]))

signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("entrypoint", "code", "exit_code"),
    [
        ("{run}", 0, 0),
        ("{run}", 3, 3),
        ("{run} > {output} 2>&1", 0, 0),
        ("{run} 'a;b' \"$(echo '&&')\"", 0, 0),
        ("cd / && {run}", 3, 143),
        ("A=1 {run}; echo more", 0, 143),
        ("if true; then {run}; fi", 0, 143),
        ("echo first\n{run}\necho more", 0, 143),
    ],
)
def test_a_program_has_its_grace_whatever_shell_is_around_it(
    entrypoint: str, code: int, exit_code: int, tmp_path: Path
) -> None:
    began, output = tmp_path / "began", tmp_path / "output"
    run = f"{shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM.strip())} {began} {code}"
    # The program as a file, so that its own text has no part in what the shell is given.
    (tmp_path / "run").write_text(f"#!/bin/sh\nexec {run}\n")
    (tmp_path / "run").chmod(0o755)
    script = shell_script(entrypoint.format(run=tmp_path / "run", output=output), PATH)
    with output.open("a") as out:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", script], stdout=out, stderr=out, start_new_session=True
        )
        until(began.exists, 30.0, "the program runs")
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(30.0) == exit_code
    said = output.read_text()
    assert "saved" in said and "more" not in said


@pytest.mark.parametrize(
    "entrypoint",
    [
        "exit 7",
        "sh -c 'exit 7'",
        "true && exit 7",
        "A=7 sh -c 'exit $A'",
        "# why\nexit 7",
        "(exit 7)",
    ],
)
def test_an_exit_code_is_that_of_the_entrypoint(entrypoint: str) -> None:
    script = shell_script(entrypoint, PATH)
    assert subprocess.run(["/bin/sh", "-c", script], check=False).returncode == 7


def test_what_the_shell_cannot_read_is_told_by_the_shell() -> None:
    script = shell_script("echo 'never closed", PATH)
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "quoted string" in done.stderr
