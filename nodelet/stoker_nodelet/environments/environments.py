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
import time
import zipfile
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.environments.build_reports import BuildReports
from stoker_nodelet.environments.images import Container, Images
from stoker_nodelet.environments.job_folders import JobFolders, copy_private
from stoker_nodelet.environments.pieces import Pieces, read_piece
from stoker_nodelet.environments.retention import PACKAGES, PIECES, EnvironmentRetention, touch
from stoker_nodelet.environments.venvs import VenvBuild, conda_variables
from stoker_nodelet.unix_users import UnixUser, give_tree
from stoker_wire.constraints import variables
from stoker_wire.data.piece_lists import read_list
from stoker_wire.errors import BadRequestError, NotFoundError, RuntimeEnvSetupError, StokerError
from stoker_wire.messages.common import MAX_TEXT, without_passwords
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild
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
    container: Container | None = None
    """Where its workers run, if not beside the nodelet."""

    @property
    def applicable_after_fork(self) -> bool:
        """Return whether a worker that was forked without it can still apply it."""
        starts_alone = self.user is not None or self.container is not None
        return self.python == sys.executable and not self.preload and not starts_alone

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
        if self.container is not None:
            fields += (self.container,)
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
    reports: BuildReports | None = None
    images: Images | None = None
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
        container = await self._container(wanted, job_id) if wanted.image_uri else None
        # What the driver has beside it is not in the files of an image.
        sys_path = list(wanted.sys_path) if container is None else []
        cwd = wanted.cwd or "" if container is None else ""
        for package in reversed(wanted.py_modules):
            sys_path.insert(0, str(await self._package(package)))
        if wanted.working_dir:
            cwd = str(await self._working_dir(job_id, wanted.working_dir))
            sys_path.insert(0, cwd)
        _check_cwd(cwd)
        python, env_vars = sys.executable, dict(wanted.env_vars)
        if _needs_venv(wanted):
            venv = await self._venv(wanted, job_id)
            python = str(venv / "bin" / "python")
            env_vars = {**conda_variables(venv, self.user), **env_vars}
        return Environment(
            python=python,
            preload=wanted.preload,
            env_vars=env_vars,
            sys_path=tuple(dict.fromkeys(sys_path)),
            cwd=cwd,
            user=self.user,
            process_setup=wanted.worker_process_setup,
            container=container,
        ).keyed()

    async def _package(self, package: str) -> Path:
        _check_hash(package)
        path = self.root / PACKAGES / package
        await self._build_once(path, lambda: self._unpack(package, path))
        touch(self._pieces.folder_of(package))
        return path

    @property
    def _pieces(self) -> Pieces:
        return Pieces(self.root / PIECES, self._download)

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
        content = await self._download(package)
        partial = path.with_name(f"{path.name}.partial")
        try:
            pieces = read_list(content)
        except BadRequestError as error:
            raise RuntimeEnvSetupError(
                f"package {_short(package)} cannot be unpacked\n{error.message}"
            ) from None
        archives: Iterable[bytes] = (content,)
        if pieces:
            archives = map(read_piece, await self._pieces.fetch(package, pieces))
        await asyncio.to_thread(_extract_all, archives, partial, package, self.max_unpacked_bytes)
        if self.user is not None:
            await asyncio.to_thread(give_tree, partial, self.user)
        partial.rename(path)

    async def _download(self, package: str) -> bytes:
        try:
            content = await self.download(package)
        except NotFoundError:
            raise RuntimeEnvSetupError(
                f"package {_short(package)} is not in this cluster\n"
                f"upload it first (PUT /v1/packages/{package}), or name a folder"
            ) from None
        await asyncio.to_thread(_check_content, content, package)
        return content

    async def _venv(self, wanted: RuntimeEnv, job_id: str) -> Path:
        text = "\n".join(wanted.pip) + f"\n{sys.version}\n{sys.prefix}"
        if wanted.uv or wanted.uv_project:
            text += "\n" + "\n".join(("uv", *wanted.uv, wanted.uv_project or ""))
        if wanted.conda or wanted.conda_file:
            text += f"\nconda\n{wanted.conda}\n{wanted.conda_file}"
        if wanted.setup:
            text += f"\nsetup\n{wanted.setup}\n{sorted(wanted.env_vars.items())}"
        project = await self._package(wanted.uv_project) if wanted.uv_project else None
        path = self.root / "venvs" / hashlib.sha256(text.encode()).hexdigest()[:16]
        build = VenvBuild(path, wanted, project, self.prefix, self.user)
        what = wanted.installs
        await self._build_once(path, lambda: self._reported(path.name, what, build.run, job_id))
        return path

    async def _container(self, wanted: RuntimeEnv, job_id: str) -> Container:
        if self.user is not None or self.images is None:
            raise RuntimeEnvSetupError(
                "runtime_env.image_uri: jobs that run as another Unix user run in no images\n"
                "leave image_uri out, or use a token without run_as"
            )
        name = wanted.image_uri
        key = hashlib.sha256(name.encode()).hexdigest()[:16]
        return await self.images.prepare(
            wanted, lambda pull: self._reported(key, f"image ({name})", pull, job_id)
        )

    async def _reported(
        self, key: str, what: str, build: Callable[[], Awaitable[object]], job_id: str
    ) -> None:
        """Run a build; the event log tells when it begins and how it ends."""
        began_s = time.monotonic()

        def report(state: BuildState, message: str = "") -> None:
            if self.reports is not None:
                one = EnvironmentBuild(
                    node_id=self.reports.node_id,
                    job_id=job_id,
                    key=key,
                    what=what[:MAX_TEXT],
                    state=state,
                    took_s=0.0 if state is BuildState.INSTALLING else time.monotonic() - began_s,
                    message=without_passwords(message)[:MAX_TEXT],
                )
                self.reports.add(one)

        report(BuildState.INSTALLING)
        try:
            await build()
        except StokerError as error:
            report(BuildState.FAILED, error.message)
            raise
        report(BuildState.READY)

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


def _needs_venv(wanted: RuntimeEnv) -> bool:
    installs = wanted.pip or wanted.uv or wanted.uv_project or wanted.setup
    return bool(installs or wanted.conda or wanted.conda_file)


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
    _extract_all((content,), target, package, max_bytes)


def _extract_all(archives: Iterable[bytes], target: Path, package: str, max_bytes: int) -> None:
    """Unpack the archives of a package, which together have its limits, into one folder."""
    shutil.rmtree(target, ignore_errors=True)
    is_whole = False
    try:
        target.mkdir(parents=True)
        count = nbytes = 0
        for content in archives:
            members = _members(content, package)
            count += len(members)
            nbytes += sum(member.file_size for member in members)
            _check_limits(package, count, nbytes, max_bytes)
            _extract_members(content, target.resolve(), package)
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


def _members(content: bytes, package: str) -> list[zipfile.ZipInfo]:
    if content.count(_MEMBER) > _MAX_MARKS:
        raise _too_many(package, f"more than {_MAX_MEMBERS} files")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, EOFError) as error:
        raise _no_archive(package, error) from None


def _check_limits(package: str, count: int, nbytes: int, max_bytes: int) -> None:
    if count > _MAX_MEMBERS:
        raise _too_many(package, f"{count} files, more than {_MAX_MEMBERS}")
    if nbytes > max_bytes:
        raise RuntimeEnvSetupError(
            f"package {_short(package)} unpacks to {nbytes >> 20} MiB, more than the "
            f"{max_bytes >> 20} MiB of STOKER_PACKAGE_MAX_BYTES\n"
            f"its full hash is {package}"
        )


def _extract_members(content: bytes, root: Path, package: str) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
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
        raise _no_archive(package, error) from None


def _no_archive(package: str, error: Exception) -> RuntimeEnvSetupError:
    return RuntimeEnvSetupError(
        f"package {_short(package)} is not a zip archive\n{error}\nits full hash is {package}"
    )


def _too_many(package: str, count: str) -> RuntimeEnvSetupError:
    return RuntimeEnvSetupError(
        f"package {_short(package)} has {count}\nits full hash is {package}"
    )
