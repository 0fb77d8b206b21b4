"""Where workers find modules: where the driver does, in its order, whichever way Python was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stoker_wire.process.search_path import OWN, merged_path, portable_path
from tests.e2e.conftest import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import colorsys, json, os, sys
sys.path.append(os.path.abspath("appended"))
import stoker
stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)

@stoker.remote
def see():
    import colorsys
    flags = sys.flags.no_user_site, sys.warnoptions, sys._xoptions.get("utf8")
    return colorsys.__file__, sys.path, flags

there = stoker.get(see.remote(), timeout=60)
flags = sys.flags.no_user_site, sys.warnoptions, sys._xoptions.get("utf8")
print(json.dumps([(colorsys.__file__, sys.path, flags), there]))
"""


@pytest.mark.parametrize("how", ["-m pkg.main", "pkg/main.py", "-c"])
def test_workers_search_where_the_driver_searches(tmp_path: Path, how: str) -> None:
    (tmp_path / "pkg").mkdir()
    for name, text in (("__init__", ""), ("colorsys", "mine = 1"), ("main", PROGRAM)):
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    arguments = ["-c", PROGRAM] if how == "-c" else how.split()
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-s", "-X", "utf8", "-W", "error::FutureWarning", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "STOKER_SESSION_ROOT": str(tmp_path / "s"),
            "PYTHONPATH": path.rstrip(":"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    driver, worker = json.loads(done.stdout)
    driver[1] = [entry or str(tmp_path) for entry in driver[1]]
    assert worker == driver
    assert driver[1][-1] == str(tmp_path / "appended")


def test_what_is_said_of_a_path_and_what_a_worker_makes_of_it() -> None:
    own = {"/lib", "/lib/site"}
    said = portable_path(["", "sub", "/pp", "/lib", "/lib/site", "/late", "/pp"], own, "/home")
    assert said == ("/home", "/home/sub", "/pp", OWN, "/late", "/pp")
    base = ["/head", "/pp", "/lib", "/lib/site", "/pth"]
    merged = ["/home", "/home/sub", "/pp", "/lib", "/lib/site", "/pth", "/late"]
    assert merged_path(said, base, ["/head", "/pp"]) == merged
    assert merged_path(said, merged, ["/head", "/pp"]) == merged, "taken over twice"
    assert merged_path(["/a", "/lib"], base, []) == ["/a", *base], "of a driver that does not say"


def test_workers_get_the_flags_of_the_driver_but_those_that_keep_them_from_working() -> None:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from stoker.local.cluster import _interpreter_flags
print(*_interpreter_flags())
"""
    flags = ["-s", "-S", "-W", "error::FutureWarning", "-X", "tracemalloc=1", "-X", "utf8"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["-s", "-Werror::FutureWarning", "-X", "utf8"]
