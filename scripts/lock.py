#!/usr/bin/env python3
"""Writes locks/: what is installed, by exact version and by the hash of every file of it.

One file per set of packages: ``base`` is what Stoker depends on, each extra of pyproject.toml what it adds
to that, ``build`` what builds Stoker, ``services``, ``tools`` and ``docs`` what the groups of those names
list. torch has two builds, ``torch-cpu`` and ``torch-cuda``: ``scripts/install`` takes the one that pip can
find.

Versions that are locked stay; what is new in pyproject.toml gets the newest. All sets but those of groups are
resolved as one, so that any of them fit together in one environment.

    make lock                                          # after a change of pyproject.toml
    make lock LOCK_ARGS="--upgrade-package aiohttp"    # or --upgrade, for everything
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
MEANINGS = {
    "base": "what Stoker depends on",
    "build": "what builds Stoker: no build isolation, no package from elsewhere",
    "services": "servers for the tests",
    "torch-cpu": "torch's CPU build: the authors' wheel, and any whose hash is added by hand",
    "torch-cuda": "torch as PyPI has it, and the libraries of CUDA",
    "docs": "what builds the site: make site",
    "tools": "tools of make lock, make sbom and make audit",
}
ALONE = {"services": ["--no-deps"], "docs": [], "tools": []}
"""Sets that are resolved by themselves, and how."""
PYTHONS = " ; python_full_version < '3.15' and sys_platform == 'linux'"
"""What holds for every line, since pyproject.toml says so to uv: left out."""
_CUDA = re.compile(r"(nvidia|cuda)-(?!ml-py$)")

Lock = dict[str, str]
"""Of each package, by its name: its lines, which a fork by Python version makes more than one block."""


def main() -> None:
    """Resolve, and write all sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest of everything")
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    upgrades = ["--upgrade"] if options.upgrade else []
    upgrades += [f"--upgrade-package={name}" for name in options.upgrade_package]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base = project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    roots = {"base": base, "build": project["build-system"]["requires"], **extras}
    locked = {path.stem: parsed(path.read_text()) for path in sorted(LOCKS.glob("*.txt"))}
    known = {
        n: block
        for name, lock in locked.items()
        if name not in (*ALONE, "torch-cpu")
        for n, block in lock.items()
    }

    whole = resolved(
        [r for rs in roots.values() for r in rs], known, "--generate-hashes", *upgrades
    )
    shared = resolved(base, whole)
    sets = {name: resolved([*base, *roots[name]], whole) for name in roots}
    chosen = {
        name: set(lock) - (set() if name == "base" else set(shared)) for name, lock in sets.items()
    }
    chosen["torch-cuda"] = {n for n in chosen["train"] if n == "torch" or _CUDA.match(n)}
    chosen["train"] -= chosen["torch-cuda"]
    written = {name: {n: whole[n] for n in names} for name, names in chosen.items()}
    written["torch-cpu"] = cpu_build(whole["torch"], locked.get("torch-cpu", {}))
    for name, options_ in ALONE.items():
        roots_ = project["dependency-groups"][name]
        written[name] = resolved(
            roots_, locked.get(name, {}), "--generate-hashes", *options_, *upgrades
        )
    for name, lock in written.items():
        write(name, lock)


def resolved(requirements: list[str], versions: Lock, *options: str) -> Lock:
    """Return what ``requirements`` need on any Python that Stoker supports, preferring ``versions``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        # Versions alone: uv would keep the hashes, a wrong one as well.
        output.write_text(re.sub(r" \\\n +--hash=\S+", "", "".join(versions.values())))
        command = [
            str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", "--output-file", str(output),
            "--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet", *options,
        ]  # fmt: skip
        done = subprocess.run(
            command, input="\n".join(requirements), text=True, cwd=ROOT, check=False
        )
        if done.returncode:
            sys.exit(f"error: {' '.join(command[:3])} failed: nothing is written")
        return parsed(output.read_text())


def parsed(text: str) -> Lock:
    """Return the packages of a file."""
    lock: Lock = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if not line[0].isspace():
            name = re.split(r"[=\[ ]", line, maxsplit=1)[0]
            line = line.replace(f"{PYTHONS} \\\n", " \\\n")
        lock[name] = lock.get(name, "") + line
    return lock


def cpu_build(torch: str, locked: Lock) -> Lock:
    """Return torch's CPU build, which PyPI does not have: this machine's wheel of it, and what is locked."""
    requirement = f"{torch.split()[0]}+cpu"
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--dest", folder]
        subprocess.run([*pip, requirement], check=False, capture_output=True)
        hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}
    block = locked.get("torch", "")
    if block.startswith(f"{requirement} "):
        hashes |= set(re.findall(r"sha256:(\S+)", block))
    if not hashes:
        sys.exit(
            f"error: no wheel of {requirement} in a folder of pip's find-links: nothing is written"
        )
    lines = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes))
    return {"torch": f"{requirement}{lines}\n"}


def write(name: str, lock: Lock) -> None:
    """Write one set."""
    meaning = MEANINGS.get(name, f"what the extra {name} adds to base")
    head = f"# {meaning[0].upper()}{meaning[1:]}. Written by make lock; do not edit.\n"
    (LOCKS / f"{name}.txt").write_text(head + "".join(lock[n] for n in sorted(lock)))
    sys.stdout.write(f"locks/{name}.txt: {len(lock)} packages\n")


if __name__ == "__main__":
    main()
