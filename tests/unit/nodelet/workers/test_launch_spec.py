"""The shell of a driver: what it runs is what the user wrote, and a single command stands in its place."""

from __future__ import annotations

import os
import subprocess

import pytest

from stoker_nodelet.workers.launch_spec import shell_script

PATH = os.environ["PATH"]


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


@pytest.mark.parametrize(
    ("entrypoint", "is_single"),
    [
        ("sleep 1", True),
        ("sleep 1 > /dev/null 2>&1", True),
        ("sh -c 'a; b' \"$(echo '&&')\"", True),
        ("sh -c 'a; b && (c)'", True),
        ("sleep 1 &", False),
        ("sleep 1 | cat", False),
        ("A=1 sleep 1", False),
        ("echo 'a\\nb'", False),
        ("if true; then sleep 1; fi", False),
        ("sleep 1\nsleep 2", False),
        ("no-such-program", False),
        ("", False),
    ],
)
def test_a_single_program_takes_the_place_of_its_shell(entrypoint: str, is_single: bool) -> None:
    expected = f"exec {entrypoint}" if is_single else entrypoint
    assert shell_script(entrypoint, PATH) == expected


def test_what_the_shell_cannot_read_is_told_by_the_shell() -> None:
    script = shell_script("echo 'never closed", PATH)
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "quoted string" in done.stderr
