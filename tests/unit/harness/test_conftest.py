"""One failing test must not make those after it fail: the rules of tests/conftest.py at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[3]
MODULE = """
import weakref
import pytest

MADE, HELD = [], []

class Thing:
    pass

@pytest.fixture(scope="module")
def number():
    MADE.append(1)
    return len(MADE)

def test_fails(number):
    thing = Thing()
    HELD.append(weakref.ref(thing))
    assert number == 2

def test_gets_a_new_fixture(number):
    assert number == 2
    assert HELD[0]() is None, "the traceback keeps nothing"

def test_shares_it(number):
    assert number == 2
"""


def test_a_failure_ends_its_modules_fixtures_and_lets_go_what_it_held(tmp_path: Path) -> None:
    module = tmp_path / "test_module.py"
    module.write_text(MODULE)
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    options += ["-c", str(REPO / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(module)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "assert 1 == 2" in done.stdout
