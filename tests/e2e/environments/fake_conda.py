"""A stand-in for conda: it makes environments with venv, and knows those below $FAKE_CONDA_ENVS.

Run as ``micromamba`` on the PATH of a nodelet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    envs = Path(os.environ["FAKE_CONDA_ENVS"])
    if arguments == ["env", "list", "--json"]:
        sys.stderr.write("warning: a newer conda is available\n")
        json.dump({"envs": [str(one) for one in sorted(envs.iterdir())]}, sys.stdout)
        return 0
    if arguments[:3] != ["env", "create", "--prefix"] or arguments[4] != "--file":
        sys.stderr.write(f"error: unknown arguments {arguments}\n")
        return 2
    prefix, file = Path(arguments[3]), Path(arguments[5])
    if "MAMBA_ALWAYS_YES" not in os.environ:
        sys.stderr.write("error: nobody answers\n")
        return 2
    dependencies = json.loads(file.read_text())["dependencies"]
    if "nosuch" in dependencies:
        sys.stderr.write("error: nosuch does not exist\n")
        return 1
    if "python" in dependencies:
        make(prefix, dependencies)
    else:
        (prefix / "bin").mkdir(parents=True)
    return 0


def make(prefix: Path, value: object) -> None:
    """Make an environment whose module ``from_conda`` has a value."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = next((prefix / "lib").glob("python*/site-packages"))
    (site / "from_conda.py").write_text(f"VALUE = {value!r}\n")
    tool = prefix / "bin" / "conda-tool"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
