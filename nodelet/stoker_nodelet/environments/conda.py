"""Environments of conda: found by name, or made from a file, by the conda, mamba or micromamba of the node.

Workers do not run one's Python itself: a virtual environment lies on top of it, in which our own packages
come last. So an environment that has a name is read, and never written to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_wire.errors import RuntimeEnvSetupError

CONDA_S = 1800.0
"""The deadline of the making of an environment, which may be large."""
_TOOLS = ("micromamba", "mamba", "conda")
_VARIABLES = ("MAMBA_EXE", "CONDA_EXE")
_YES = {"CONDA_ALWAYS_YES": "true", "MAMBA_ALWAYS_YES": "true"}
"""Nobody is there to be asked."""
_FACTS = (
    "import json, sys, sysconfig; paths = sysconfig.get_paths(); print(json.dumps("
    "[sys.implementation.cache_tag, sys.version.split()[0], paths['purelib'], paths['platlib']]))"
)

Run = Callable[[list[str], str, Mapping[str, str] | None], Awaitable[str]]
"""Runs a command, named in words, with more variables; returns what it said."""


@dataclass(frozen=True, slots=True)
class CondaEnvironment:
    """An environment that is there: its folder, its Python, and where that finds packages."""

    prefix: Path
    packages: tuple[str, ...]

    @property
    def python(self) -> str:
        """Return the path of its Python."""
        return str(self.prefix / "bin" / "python")


def find_conda() -> str:
    """Return the path of this node's conda; RuntimeEnvSetupError if it has none."""
    found = [shutil.which(tool) for tool in _TOOLS]
    found += [shutil.which(os.environ.get(name, "")) for name in _VARIABLES]
    conda = next((path for path in found if path), None)
    if conda is None:
        raise RuntimeEnvSetupError(
            "runtime_env.conda: this node has no conda\n"
            "install micromamba, mamba or conda there and put it on the PATH of the nodelet, or give pip="
        )
    return conda


async def find(name: str, run: Run) -> CondaEnvironment:
    """Return the environment of that name, or in that folder, which is there already."""
    if os.path.isabs(name):
        return await _checked(Path(name), run)
    output = await run([find_conda(), "env", "list", "--json"], "conda env list", _YES)
    known = _prefixes(output)
    for prefix in known:
        if prefix.name == name:
            return await _checked(prefix, run)
    names = ", ".join(sorted(one.name for one in known)) or "none"
    raise RuntimeEnvSetupError(
        f"runtime_env.conda: this node has no environment {name!r}\n"
        f"make it on each node, or give its environment.yml; there are: {names}"
    )


async def create(file: Path, prefix: Path, run: Run) -> CondaEnvironment:
    """Make the environment of an ``environment.yml`` in the folder ``prefix``."""
    command = [find_conda(), "env", "create", "--prefix", str(prefix), "--file", str(file)]
    await run(command, "conda env create", _YES)
    return await _checked(prefix, run)


async def _checked(prefix: Path, run: Run) -> CondaEnvironment:
    """Return an environment whose Python can import what this one has compiled."""
    python = prefix / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise RuntimeEnvSetupError(
            f"runtime_env.conda: {prefix} has no Python\n"
            f"add python={sys.version_info.major}.{sys.version_info.minor} to its dependencies"
        )
    output = await run([str(python), "-c", _FACTS], f"the Python of {prefix}", None)
    try:
        tag, version, purelib, platlib = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeEnvSetupError(
            f"the Python of {prefix} does not answer\n{output[-500:]}"
        ) from None
    if tag != sys.implementation.cache_tag:
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise RuntimeEnvSetupError(
            f"runtime_env.conda: its Python is {version}, and that of this node {ours}\n"
            f"add python={ours} to its dependencies: workers import Stoker from the node"
        )
    return CondaEnvironment(prefix, tuple(dict.fromkeys((purelib, platlib))))


def _prefixes(output: str) -> list[Path]:
    """Return the folders that ``conda env list --json`` names, whatever was said before it."""
    try:
        listed: Any = json.loads(output[output.index("{") : output.rindex("}") + 1])
        return [Path(one) for one in listed["envs"]]
    except (ValueError, KeyError, TypeError):
        raise RuntimeEnvSetupError(
            f"conda env list said what is not understood\n{output[-500:]}"
        ) from None
