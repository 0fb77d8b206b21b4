"""Virtual environments: made, filled by pip or uv, and finished by a setup command.

Each is built in a folder beside its own and renamed when it is whole, so that one that failed or was
interrupted is never used. Called by ``environments``, which builds each once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_nodelet.environments import conda
from stoker_nodelet.environments.retention import CONDA_SUFFIX
from stoker_nodelet.unix_users import UnixUser, give_folder
from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.http.auth import SECRETS
from stoker_wire.messages.common import RuntimeEnv

_PIP_S = 600.0
_PIP_LINES = 20
_WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
"""Done by the user whose folder it is in: root would follow a link there."""
_ERROR = re.compile(r"(ERROR|error): ")
_LOCKED = "locked.txt"
_PREFIX_FILE = "conda_prefix"
"""Has the folder of the environment of conda that is below."""


@dataclass(frozen=True, slots=True)
class VenvBuild:
    """One venv at ``path`` that sees our own packages behind its own.

    ``project`` has the files of ``wanted.uv_project``; ``prefix`` is what commands begin with that run
    code of packages.
    """

    path: Path
    wanted: RuntimeEnv
    project: Path | None = None
    prefix: tuple[str, ...] = ()
    user: UnixUser | None = None

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")

    async def run(self) -> None:
        """Build it; RuntimeEnvSetupError with the words of what failed."""
        uv = find_uv() if self.wanted.uv or self.project else ""
        await self._remove()
        try:
            base = await self._conda()
            await self._make(base)
            if self.wanted.pip:
                await self._pip()
            if uv:
                await self._uv(uv)
            if self.wanted.setup:
                await self._setup()
        except RuntimeEnvSetupError:
            await self._remove()
            raise
        # Only the interpreter is run from it, and that finds its own prefix: the rename is safe.
        self._partial.rename(self.path)

    async def _remove(self) -> None:
        """Remove what a build has left that was not finished."""
        for folder in (self._partial, conda_folder(self.path)):
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _make(self, base: conda.CondaEnvironment | None) -> None:
        partial = self._partial
        self._make_folder(partial)
        python = sys.executable if base is None else base.python
        await self._run([python, "-m", "venv", "--without-pip", str(partial)], "venv")
        ours = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
        behind = dict.fromkeys((*(base.packages if base is not None else ()), *ours))
        lines = "".join(f"import site; site.addsitedir({entry!r})\n" for entry in behind)
        site = next((partial / "lib").glob("python*/site-packages"))
        await self._write(site / "_stoker_parent.pth", lines)
        if base is not None:
            await self._write(partial / _PREFIX_FILE, str(base.prefix))

    async def _conda(self) -> conda.CondaEnvironment | None:
        """Find or make the environment of conda below this one, if there is to be one."""
        if self.wanted.conda:
            return await conda.find(self.wanted.conda, self._run)
        if not self.wanted.conda_file:
            return None
        # Beside, for it cannot be moved: its programs and libraries name their folder.
        folder = conda_folder(self.path)
        self._make_folder(folder)
        file = folder / "environment.yml"
        await self._write(file, self.wanted.conda_file)
        return await conda.create(file, folder / "env", self._run)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        if self.user is not None:
            give_folder(folder, self.user)

    async def _write(self, file: Path, text: str) -> None:
        await self._run([sys.executable, "-c", _WRITE, str(file), text], "venv")

    async def _run(
        self, command: list[str], what: str, env: Mapping[str, str] | None = None
    ) -> str:
        return await run_command(
            command, what, self.user, self.prefix, env, conda.CONDA_S if env else _PIP_S
        )

    @property
    def _python(self) -> str:
        return str(self._partial / "bin" / "python")

    async def _pip(self) -> None:
        requirements = self.wanted.pip
        command = [sys.executable, "-m", "pip", "--python", self._python, "install"]
        command += ["--disable-pip-version-check", "--no-input", *requirements]
        await run_command(command, "pip install " + " ".join(requirements), self.user, self.prefix)

    async def _uv(self, uv: str) -> None:
        install = [uv, "pip", "install", "--no-progress", "--color=never", "--python", self._python]
        if self.project is None:
            what = "uv pip install " + " ".join(self.wanted.uv)
            await run_command([*install, *self.wanted.uv], what, self.user, self.prefix)
            return
        project = str(self.project / "pyproject.toml")
        if not (self.project / "uv.lock").is_file():
            what = "uv pip install -r pyproject.toml"
            await run_command([*install, "-r", project], what, self.user, self.prefix)
            return
        # What is locked, by its hashes; the project itself is the working_dir or a py_module.
        locked = str(self._partial / _LOCKED)
        export = [
            uv,
            "export",
            "--frozen",
            "--no-emit-project",
            "--no-dev",
            "--color=never",
            "--quiet",
        ]
        export += ["--python", sys.executable, "--project", str(self.project), "-o", locked]
        await run_command(export, "uv export of the project's uv.lock", self.user, self.prefix)
        what = "uv pip install of the project's uv.lock"
        await run_command(
            [*install, "--require-hashes", "-r", locked], what, self.user, self.prefix
        )

    async def _setup(self) -> None:
        partial = self._partial
        more = conda_variables(partial, self.user)
        path = more.pop("PATH", os.environ.get("PATH", os.defpath))
        env = {
            **more,
            **self.wanted.env_vars,
            "VIRTUAL_ENV": str(partial),
            "PATH": os.pathsep.join((str(partial / "bin"), path)),
        }
        command = ["/bin/sh", "-c", f'cd "$VIRTUAL_ENV" && {{ {self.wanted.setup}\n}}']
        await run_command(command, "runtime_env.setup", self.user, self.prefix, env)


def conda_folder(venv: Path) -> Path:
    """Return the folder of the environment of conda that was made for a virtual environment."""
    return venv.with_name(f"{venv.name}{CONDA_SUFFIX}")


def conda_variables(venv: Path, user: UnixUser | None) -> dict[str, str]:
    """Return the variables by which programs find the environment of conda below a virtual one, if any."""
    try:
        prefix = (venv / _PREFIX_FILE).read_text()
    except OSError:
        return {}
    given = os.environ if user is None else user.environ()
    path = os.pathsep.join((f"{prefix}/bin", given.get("PATH", os.defpath)))
    return {"CONDA_PREFIX": prefix, "PATH": path}


def find_uv() -> str:
    """Return the path of this node's uv; RuntimeEnvSetupError if it has none."""
    beside = str(Path(sys.executable).parent)
    uv = shutil.which("uv", path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))
    if uv is None:
        raise RuntimeEnvSetupError(
            "runtime_env.uv: this node has no uv\n"
            "install it there with `pip install uv` into the Python of the nodelet, or give pip="
        )
    return uv


async def run_command(
    command: list[str],
    what: str,
    user: UnixUser | None = None,
    prefix: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = _PIP_S,
) -> str:
    """Run a command, as ``user``, with more variables; return what it said.

    RuntimeEnvSetupError has its last lines.
    """
    options: dict[str, Any] = {}
    if env is not None:
        own = {name: value for name, value in os.environ.items() if name not in SECRETS}
        options["env"] = {**(own if user is None else user.environ()), **env}
    if user is not None:
        command = user.command(command)
        options = {"env": user.environ(), "cwd": "/", **options}
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except (TimeoutError, asyncio.CancelledError) as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        await process.wait()
        if isinstance(error, TimeoutError):
            raise RuntimeEnvSetupError(f"{what} was not done within {timeout_s:g} s") from None
        raise
    text = output.decode(errors="replace")
    if process.returncode != 0:
        lines = text.splitlines()[-_PIP_LINES:]
        errors = [line for line in lines if _ERROR.match(line)] or lines
        why = _ERROR.sub("", errors[-1]) if errors else "it said nothing"
        raise RuntimeEnvSetupError(
            "\n".join((f"{what} failed (exit code {process.returncode})", why, *lines))
        )
    return text
