"""What is installed is locked: locks/ against pyproject.toml, and every command that installs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from types import ModuleType

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
ROOTS = {
    "base": PROJECT["project"]["dependencies"],
    "build": PROJECT["build-system"]["requires"],
    **EXTRAS,
    **PROJECT["dependency-groups"],
}
BUILDS = ("torch-cpu", "torch-cuda")
"""Sets of which one is installed, beside train."""
ALONE = set(PROJECT["dependency-groups"])
"""Sets that are installed beside no other."""


@cache
def lock(name: str) -> dict[str, tuple[str, str]]:
    """Return version and marker of each package of a set."""
    lines = (REPO / f"locks/{name}.txt").read_text().replace("\\\n", "").splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            pin = re.fullmatch(
                r"(\S+)==(\S+)(?: ; (.*?))? +(?:--hash=sha256:[0-9a-f]{64} *)+", line
            )
            assert pin, f"locks/{name}.txt: not a version with hashes: {line[:60]}"
            assert pin[1] not in found, f"locks/{name}.txt: {pin[1]} twice"
            found[pin[1]] = (pin[2], pin[3] or "")
    return found


def test_there_is_a_lock_for_every_set_and_no_other() -> None:
    assert {path.stem for path in (REPO / "locks").iterdir()} == {*ROOTS, *BUILDS}


@pytest.mark.parametrize("name", ROOTS)
def test_the_lock_has_what_the_project_asks_for(name: str) -> None:
    locked = lock(name) if name in ALONE else {**lock("base"), **lock(name)}
    if name == "train":
        locked |= lock("torch-cuda")
        assert lock("torch-cpu").keys() == {"torch"}
        assert lock("torch-cpu")["torch"][0] == locked["torch"][0] + "+cpu"
    for text in ROOTS[name]:
        wanted = Requirement(text)
        version, _ = locked.get(canonicalize_name(wanted.name), ("", ""))
        assert version and version in wanted.specifier, f"{text}: run make lock"


def test_sets_of_one_environment_agree() -> None:
    versions: dict[str, str] = {}
    for name in sorted({*ROOTS, "torch-cuda"} - ALONE):
        for package, (version, _) in lock(name).items():
            assert versions.setdefault(package, version) == version, f"{package}: run make lock"


@pytest.mark.parametrize("name", ["base", "build", *EXTRAS, *BUILDS])
def test_the_lock_has_all_that_its_packages_depend_on(name: str) -> None:
    """Nothing is resolved when it is installed, so that a gap would be an import that fails."""
    locked = {**lock("base"), **lock(name)}
    if name in BUILDS:
        locked |= lock("train")
    looked_at = 0
    for package, (version, _) in lock(name).items():
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        looked_at += 1
        for text in installed.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                got, _ = locked.get(canonicalize_name(needed.name), ("", ""))
                assert got, f"{package} needs {text}: run make lock"
                assert needed.specifier.contains(got, prereleases=True), f"{package}: {text}"
    assert looked_at or name not in ("base", "dev")


def test_every_command_that_installs_checks_hashes_or_fetches_nothing() -> None:
    files = [
        REPO / "Dockerfile",
        REPO / "Makefile",
        *(path for path in (REPO / "scripts").iterdir() if path.is_file()),
        REPO / ".ci/run",
    ]
    commands = 0
    for path in files:
        # A command, or the list of its arguments, on one line.
        text = re.sub(r"(\\|,|\[)\n\s*", r"\1 ", path.read_text())
        for line in text.splitlines():
            if re.search(r"\bpip\b.*\b(install|wheel|download)\b", line) and line[0] not in "#":
                commands += 1
                # The CPU build of torch that is none of the lock's comes from where its user says.
                own = '--no-deps --only-binary :all: "$version"' in line
                safe = "--require-hashes" in line or "--no-index" in line or own
                assert safe, f"{path.relative_to(REPO)}: {line.strip()}"
    assert commands >= 5


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The script that installs, beside a wheel and a lock with its hash."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts/install", tmp_path / "scripts")
    (tmp_path / "locks").mkdir()
    add(tmp_path, "base", "tiny", "1.0")
    return tmp_path


def add(tree: Path, name: str, package: str, version: str) -> Path:
    """Make a wheel and a set that is its lock."""
    wheel = tree / f"{package}-{version}-py3-none-any.whl"
    info = f"{package}-{version}.dist-info"
    files = {
        f"{package}.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tree / f"locks/{name}.txt").write_text(f"{package}=={version} --hash=sha256:{digest}\n")
    return wheel


def change(wheel: Path) -> None:
    """Add a file to a wheel, which changes its hash."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("evil.py", "")


def install(tree: Path, name: str = "base") -> subprocess.CompletedProcess[str]:
    """Install a set of the tree into a folder of it."""
    environ = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tree),
        "PIP_TARGET": str(tree / "installed"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return subprocess.run(
        [tree / "scripts/install", sys.executable, name], env=environ, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_file_of_the_lock_is_installed_and_a_changed_one_is_refused(tree: Path) -> None:
    done = install(tree)
    assert done.returncode == 0, done.stderr
    assert (tree / "installed/tiny.py").exists()
    shutil.rmtree(tree / "installed")
    change(tree / "tiny-1.0-py3-none-any.whl")
    done = install(tree)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tree / "installed").exists()


@pytest.mark.parametrize("offered", [True, False])
def test_the_cpu_build_of_torch_is_taken_where_there_is_one(tree: Path, offered: bool) -> None:
    add(tree, "train", "tiny", "1.0")
    add(tree, "torch-cuda", "torch", "2.0")
    cpu = add(tree, "torch-cpu", "torch", "2.0+cpu")
    if not offered:
        cpu.unlink()
    done = install(tree, "train")
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr
    build = "2.0+cpu" if offered else "2.0"
    assert [path.name for path in tree.glob("installed/torch-*")] == [f"torch-{build}.dist-info"]


def test_another_cpu_build_is_taken_and_said_to_be_unchecked(tree: Path) -> None:
    add(tree, "train", "tiny", "1.0")
    add(tree, "torch-cuda", "torch", "2.0")
    change(add(tree, "torch-cpu", "torch", "2.0+cpu"))
    done = install(tree, "train")
    assert done.returncode == 0, done.stderr
    assert (
        "torch==2.0+cpu that pip finds is none of locks/torch-cpu.txt: not checked" in done.stderr
    )
    assert [path.name for path in tree.glob("installed/torch-*")] == ["torch-2.0+cpu.dist-info"]


def test_a_set_without_a_lock_is_named(tree: Path) -> None:
    done = install(tree, "unknown")
    assert done.returncode == 1
    assert "there is no locks/unknown.txt" in done.stderr


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    """The script of make audit."""
    spec = importlib.util.spec_from_file_location("audit", REPO / "scripts/audit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


CLEAN = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
FOUND = {"name": "tiny", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "failures", "status", "says"),
    [
        ([CLEAN], [], 0, "clean: no known vulnerability in 1 packages"),
        ([CLEAN, FOUND], [], 1, "tiny 1.0: CVE-1, fixed in: 1.1"),
        ([SKIPPED, FOUND], ["base.txt: no reply"], 1, "vulnerable"),
        ([CLEAN, SKIPPED], [], 3, "does not know 1 of 2 packages"),
        ([CLEAN], ["base.txt: no reply"], 3, "does not answer"),
        ([], [], 3, "no verdict"),
    ],
)
def test_an_audit_passes_only_when_all_was_asked_about(
    audit: ModuleType, packages: list[dict], failures: list[str], status: int, says: str
) -> None:
    made = audit.Audit(failures=failures)
    made.add({"dependencies": packages})
    code, text = made.verdict()
    assert code == status
    assert says in text
