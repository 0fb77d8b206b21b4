"""One failing test must not make those after it fail: the rules of tests/conftest.py at work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiers.slow import KEPT, read, slow_tests

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


def test_slow_tests_are_left_out_of_a_whole_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_long(): pass\ndef test_short(): pass\n"
    )
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    options += ["-c", str(REPO / "pyproject.toml"), "--rootdir", str(tmp_path)]
    options += ["-o", f"pythonpath={REPO}"]

    def outcome(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        return done.stdout + done.stderr

    assert "1 passed, 1 deselected" in outcome("-o", f"testpaths={folder}")
    assert "2 passed" in outcome("-o", f"testpaths={folder}", "--slow")
    assert "2 passed" in outcome(str(folder / "test_one.py"))


def test_what_is_listed_as_slow_is_there() -> None:
    for one in slow_tests() | read(KEPT):
        file, _, name = one.partition("::")
        text = (REPO / file).read_text(encoding="utf-8")
        assert f"def {name.rpartition('::')[2]}(" in text, (
            f"{one} is gone: mend the lists of tests/tiers"
        )
    assert not read(KEPT) & slow_tests()
