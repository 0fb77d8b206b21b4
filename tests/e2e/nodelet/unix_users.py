"""Unix users for tests that run as root, and a Python that all of them can run."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def account(*command: str) -> None:
    """Change the user database, which others may be changing, too."""

    def done() -> bool:
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode in (0, 1, 10), made.stderr
        return made.returncode == 0

    until(done, 20.0, " ".join(command), interval_s=0.2)


@contextlib.contextmanager
def user(name: str, folder: Path, group: str) -> Iterator[pwd.struct_passwd]:
    """A user with a home and one more group, for as long as the block runs."""
    name = f"stk-{name}-{os.getpid()}"
    home = folder / "homes" / name
    home.parent.mkdir(exist_ok=True)
    options = ("--system", "--no-log-init", "--user-group", "--groups", group)
    account("useradd", *options, "--create-home", "--home-dir", str(home), name)
    try:
        home.chmod(0o700)
        yield pwd.getpwnam(name)
    finally:
        account("userdel", name)


def readable_python(folder: Path) -> str:
    """An interpreter with our packages that every user can run: this one's home may be closed to them."""

    def runs(python: str) -> bool:
        if not os.path.exists(python):
            return False
        probe = [python, "-c", "import stoker, encodings.idna"]
        try:
            return not subprocess.run(
                probe, user=65534, group=65534, extra_groups=(), cwd="/", capture_output=True
            ).returncode
        except PermissionError:
            return False

    if runs(sys.executable):
        return sys.executable
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(system):
        pytest.skip(f"other users can run neither {sys.executable} nor {system}")
    venv = folder / "python"
    subprocess.run([system, "-m", "venv", "--without-pip", "--copies", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
    )
    python = str(venv / "bin" / "python")
    if not runs(python):
        pytest.skip("other users cannot read the packages of this environment")
    return python


def processes(*query: str) -> list[int]:
    """The processes that pgrep finds."""
    found = subprocess.run(["pgrep", *query], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]
