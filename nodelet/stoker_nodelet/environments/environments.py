"""Runtime environments on this node's disk: packages unpacked once, one venv per ``pip`` list.

Builds are shared: requests for the same thing at the same time wait for the same build, and a finished
build stays until it was not used for long (``retention``). Failures are RuntimeEnvSetupError with the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.environments.job_folders import JobFolders, copy_private
from stoker_nodelet.environments.retention import EnvironmentRetention, touch
from stoker_nodelet.environments.venvs import VenvBuild
from stoker_nodelet.unix_users import UnixUser, give_tree
from stoker_wire.constraints import variables
from stoker_wire.errors import BadRequestError, NotFoundError, RuntimeEnvSetupError, StokerError
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.messages.common import RuntimeEnv

SWEEP_S = 60.0
"""Between two looks at the limits."""
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_MEMBERS = 100_000
_MEMBER = b"PK\1\2"
"""Before each entry of an archive's table of contents, which zipfile reads as a whole."""
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
"""Compressions that are read: of others a few bytes can ask for gigabytes of memory to begin with."""
_MAX_MARKS = 4 * _MAX_MEMBERS
"""How often these bytes may occur: they may be in a member, too, that is a zip itself."""

Download = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Environment:
    """A runtime environment as paths and variables; workers of the same ``key`` share it."""

    key: str = ""
    python: str = sys.executable
    preload: tuple[str, ...] = ()
    env_vars: dict[str, str] = field(default_factory=dict)
    sys_path: tuple[str, ...] = ()
    cwd: str = ""
    process_setup: str = ""
    """What its workers run first, which no worker of another environment may have run."""
    user: UnixUser | None = None
    """The Unix user of its workers, if it is another than the nodelet's."""

    @property
    def applicable_after_fork(self) -> bool:
        """Return whether a worker that was forked without it can still apply it."""
        return self.python == sys.executable and not self.preload and self.user is None

    def keyed(self) -> Environment:
        """Return this environment with the key that follows from its other fields."""
        env_vars = sorted(self.env_vars.items())
        fields: tuple[object, ...] = (
            self.python,
            self.preload,
            env_vars,
            self.sys_path,
            self.cwd,
        )
        if self.process_setup:
            fields += (self.process_setup,)
        if self.user is not None:
            fields += (self.user.uid,)
        return replace(self, key=hashlib.sha256(repr(fields).encode()).hexdigest()[:16])

    def with_variables(self, more: dict[str, str]) -> Environment:
        """Return this environment with ``more`` variables; its own take precedence."""
        return replace(self, env_vars={**more, **self.env_vars}).keyed() if more else self


@dataclass(slots=True)
class Environments:
    """The environments under ``root``; ``download`` fetches a package by its hash.

    A working_dir is copied into the job's own folder among ``folders``, where it may be written to. All of
    it is ``user``'s, if that is another than this process's own, and built as that user: a package of pip
    may run code as it is built.
    """

    root: Path
    download: Download
    background: Background
    folders: JobFolders
    retention: EnvironmentRetention
    max_unpacked_bytes: int = 2 << 30
    user: UnixUser | None = None
    prefix: tuple[str, ...] = ()
    """What the commands begin with that build a venv, which runs code of packages."""
    _builds: dict[Path, asyncio.Task[None]] = field(default_factory=dict)
    _folders_of: dict[str, frozenset[Path]] = field(default_factory=dict)
    """Packages and venvs, by the key of the environment that workers have of them."""

    def track(self, environment: Environment) -> None:
        """Remember which folders workers of an environment use."""
        used = [Path(path) for path in environment.sys_path]
        used.append(Path(environment.python).parent.parent)
        ours = frozenset(path for path in used if path.is_relative_to(self.root))
        if ours:
            self._folders_of[environment.key] = ours

    async def sweep(self, keys: Collection[str], forget: Callable[[str], object]) -> None:
        """Enforce the limits: ``keys`` are in use, and ``forget`` hears of pythons that are gone."""
        in_use = self.in_use(keys)
        for path in await asyncio.to_thread(self.retention.sweep, in_use):
            forget(str(path / "bin" / "python"))

    def in_use(self, keys: Collection[str]) -> set[Path]:
        """Return the folders of these environments and of running builds; forget those of all others."""
        self._folders_of = {key: one for key, one in self._folders_of.items() if key in keys}
        return set().union(self._builds, *self._folders_of.values())

    async def prepare(self, wanted: RuntimeEnv, job_id: str) -> Environment:
        """Build ``wanted`` for a job, as far as it is not there; return it."""
        try:
            variables.check(wanted.env_vars)
        except BadRequestError as error:
            raise RuntimeEnvSetupError(error.message) from None
        sys_path = list(wanted.sys_path)
        cwd = wanted.cwd or ""
        for package in reversed(wanted.py_modules):
            sys_path.insert(0, str(await self._package(package)))
        if wanted.working_dir:
            cwd = str(await self._working_dir(job_id, wanted.working_dir))
            sys_path.insert(0, cwd)
        _check_cwd(cwd)
        needs_venv = wanted.pip or wanted.uv or wanted.uv_project or wanted.setup
        python = str(await self._venv(wanted)) if needs_venv else sys.executable
        return Environment(
            python=python,
            preload=wanted.preload,
            env_vars=dict(wanted.env_vars),
            sys_path=tuple(dict.fromkeys(sys_path)),
            cwd=cwd,
            user=self.user,
            process_setup=wanted.worker_process_setup,
        ).keyed()

    async def _package(self, package: str) -> Path:
        _check_hash(package)
        path = self.root / "packages" / package
        await self._build_once(path, lambda: self._unpack(package, path))
        return path

    async def _working_dir(self, job_id: str, package: str) -> Path:
        _check_hash(package)
        path = self.folders.working_dir(job_id, package)

        async def copy() -> None:
            if self.user is not None:  # whose packages may hold links by now: none of it is read
                self.folders.make_folder(job_id)
                await self._unpack(package, path)
                return
            source = await self._package(package)
            self.folders.make_folder(job_id)
            await asyncio.to_thread(copy_private, source, path)

        try:
            if not path.exists():
                await self._build_once(path, copy)
        except OSError as error:
            if isinstance(error, StokerError):  # of the download, which may be retried
                raise
            raise RuntimeEnvSetupError(
                f"working_dir: it cannot be copied to {path} for {job_id}\n{error}"
            ) from None
        return path

    async def _unpack(self, package: str, path: Path) -> None:
        try:
            content = await self.download(package)
        except NotFoundError:
            raise RuntimeEnvSetupError(
                f"package {_short(package)} is not in this cluster\n"
                f"upload it first (PUT /v1/packages/{package}), or name a folder"
            ) from None
        partial = path.with_name(f"{path.name}.partial")
        await asyncio.to_thread(_check_content, content, package)
        await asyncio.to_thread(_extract, content, partial, package, self.max_unpacked_bytes)
        if self.user is not None:
            await asyncio.to_thread(give_tree, partial, self.user)
        partial.rename(path)

    async def _venv(self, wanted: RuntimeEnv) -> Path:
        text = "\n".join(wanted.pip) + f"\n{sys.version}\n{sys.prefix}"
        if wanted.uv or wanted.uv_project:
            text += "\n" + "\n".join(("uv", *wanted.uv, wanted.uv_project or ""))
        if wanted.setup:
            text += f"\nsetup\n{wanted.setup}\n{sorted(wanted.env_vars.items())}"
        project = await self._package(wanted.uv_project) if wanted.uv_project else None
        path = self.root / "venvs" / hashlib.sha256(text.encode()).hexdigest()[:16]
        build = VenvBuild(path, wanted, project, self.prefix, self.user)
        await self._build_once(path, build.run)
        return path / "bin" / "python"

    async def _build_once(self, path: Path, build: Callable[[], Awaitable[None]]) -> None:
        """Wait for the one build of ``path``; a failed one may be tried again."""
        if path not in self._builds:
            if _is_there(path):
                touch(path)
                return

            async def run() -> None:
                try:
                    await build()
                finally:
                    del self._builds[path]

            self._builds[path] = self.background.spawn(
                run(), name=f"build-{path.name}", report=False
            )
        # A caller that gives up must not end the build of the others.
        await asyncio.shield(self._builds[path])


def _short(package: str) -> str:
    """Return enough of a package's 64 digits to know it by."""
    return package if len(package) <= 16 else f"{package[:12]}…"


def _check_hash(package: str) -> None:
    if not _HASH.fullmatch(package):
        raise RuntimeEnvSetupError(f"this is not the hash of a package\n{package!r}")


def _check_content(content: bytes, package: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != package:
        raise RuntimeEnvSetupError(
            f"package {_short(package)} is not what it is named by\nthe SHA-256 of what came is {digest}"
        )


def _check_cwd(cwd: str) -> None:
    if cwd and not os.path.isdir(cwd):
        raise RuntimeEnvSetupError(f"cwd: {cwd} is not a directory on this node")


def _is_there(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.exists()


def _extract(content: bytes, target: Path, package: str, max_bytes: int) -> None:
    """Unpack a zip archive; members that would leave ``target`` or are links are refused."""
    shutil.rmtree(target, ignore_errors=True)
    is_whole = False
    try:
        target.mkdir(parents=True)
        _extract_members(content, target.resolve(), package, max_bytes)
        is_whole = True
    except RuntimeEnvSetupError:
        raise
    except Exception as error:
        # zipfile raises errors of many kinds: of the disk, of encryption, of unknown methods, of noise.
        # Each is the fault of the package or of this disk, and no reason to retry for ever.
        why = f"{error}" or type(error).__name__
        raise RuntimeEnvSetupError(
            f"package {_short(package)} cannot be unpacked\n{why}\nits full hash is {package}"
        ) from error
    finally:
        if not is_whole:  # what is there of it would keep a full disk full
            shutil.rmtree(target, ignore_errors=True)


def _extract_members(content: bytes, root: Path, package: str, max_bytes: int) -> None:
    if content.count(_MEMBER) > _MAX_MARKS:
        raise _too_many(package, f"more than {_MAX_MEMBERS} files")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise _too_many(package, f"{len(members)} files, more than {_MAX_MEMBERS}")
            nbytes = sum(member.file_size for member in members)
            if nbytes > max_bytes:
                raise RuntimeEnvSetupError(
                    f"package {_short(package)} unpacks to {nbytes >> 20} MiB, more than the "
                    f"{max_bytes >> 20} MiB of STOKER_PACKAGE_MAX_BYTES\n"
                    f"its full hash is {package}"
                )
            for member in members:
                where = (root / member.filename).resolve()
                mode = member.external_attr >> 16
                if not where.is_relative_to(root) or stat.S_ISLNK(mode):
                    raise RuntimeEnvSetupError(
                        f"package {_short(package)} has a member that leaves it\n"
                        f"member {member.filename!r} leaves the package {package}"
                    )
                if member.compress_type not in _METHODS:
                    raise RuntimeEnvSetupError(
                        f"package {_short(package)} is compressed by a method that is not taken\n"
                        f"member {member.filename!r} of the package {package}; write it with ZIP_DEFLATED"
                    )
                archive.extract(member, root)
                if mode & 0o111 and not member.is_dir():
                    where.chmod(0o700)
    except (zipfile.BadZipFile, EOFError) as error:
        raise RuntimeEnvSetupError(
            f"package {_short(package)} is not a zip archive\n{error}\nits full hash is {package}"
        ) from None


def _too_many(package: str, count: str) -> RuntimeEnvSetupError:
    return RuntimeEnvSetupError(
        f"package {_short(package)} has {count}\nits full hash is {package}"
    )
