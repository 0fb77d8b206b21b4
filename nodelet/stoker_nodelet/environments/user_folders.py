"""The folders of jobs that run as other Unix users than a nodelet that is root.

::

    <run_as_dir>/stoker-users-<node id>/
        <uid>/jobs/<job id>/...             as those of the session (``job_folders``)
        <uid>/runtime_env/packages, venvs   as those of the session (``environments``)
        <uid>/tokens/<worker id>            the token of the driver of a submitted job

The session holds the cluster's secret, so no other user enters it. Folders are root's and can be
entered; what lies in them and is for a user is that user's alone (0700). What a user may write to is
opened without following links, and nothing is made in there by root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker_nodelet.environments.environments import SWEEP_S, Environments
from stoker_nodelet.environments.retention import KINDS
from stoker_nodelet.objects import arena
from stoker_nodelet.unix_users import UnixUser, UnixUsers, make_enterable
from stoker_wire.errors import RuntimeEnvSetupError, StokerError

if TYPE_CHECKING:
    from stoker_nodelet.environments.job_folders import JobFolders
    from stoker_wire.settings import Settings

_PREFIX = "stoker-users-"
_JOBS, _ENVIRONMENTS, _TOKENS = "jobs", "runtime_env", "tokens"


class Folders(NamedTuple):
    """Job folders and environments: of the nodelet's own user, or of another."""

    jobs: JobFolders
    environments: Environments


Make = Callable[[Path, Path, UnixUser], Folders]
"""From the roots of job folders and of environments."""


@dataclass(slots=True)
class UserFolders:
    """The folders of all users of one node, made when the first job of each starts."""

    root: Path
    users: UnixUsers
    own: Folders
    make: Make
    _by_uid: dict[int, Folders] = field(default_factory=dict)

    def of(self, user: UnixUser | None) -> Folders:
        """Return the folders of a user; without one, the nodelet's own."""
        if user is None:
            return self.own
        folders = self._by_uid.get(user.uid)
        if folders is None:
            try:
                folders = self._by_uid[user.uid] = self._of_new(user)
            except OSError as error:
                raise RuntimeEnvSetupError(
                    f"run_as: there is no folder for {user.name!r} on node {self.users.node_id}\n{error}\n"
                    "set STOKER_RUN_AS_DIR of the nodelet to one that all users can enter"
                ) from None
        return folders

    def _of_new(self, user: UnixUser) -> Folders:
        if not self.root.exists():
            arena.create_owned(self.root)
            self.root.chmod(0o711)
        mine = self.root / str(user.uid)
        environments = mine / _ENVIRONMENTS
        kinds = (environments / kind for kind in KINDS)
        for folder in (mine, mine / _JOBS, mine / _TOKENS, environments, *kinds):
            make_enterable(folder)
        return self.make(mine / _JOBS, environments, user)

    def token_file(self, user: UnixUser, worker_id: str) -> Path:
        """Make the file, still empty, in which a driver of a user finds its token; return its path."""
        path = self.root / str(user.uid) / _TOKENS / worker_id
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.fchown(fd, user.uid, user.gid)
        finally:
            os.close(fd)
        return path

    def all(self) -> Iterator[Folders]:
        """Return those of every user that has some, the nodelet's own first."""
        yield self.own
        yield from list(self._by_uid.values())

    def ended(self, job_id: str) -> None:
        """Record a job's end."""
        for folders in self.all():
            folders.jobs.ended(job_id)

    async def sweep_jobs(
        self, in_use: Callable[[], set[str]], has_ended: Callable[[str], Awaitable[bool]]
    ) -> None:
        """Remove for ever the folders of jobs that ended long ago and run nothing here."""
        while True:
            await asyncio.sleep(self.own.jobs.sweep_s)
            with contextlib.suppress(StokerError):  # the gcs is away, and is asked again
                for folders in self.all():
                    await folders.jobs.sweep(in_use(), has_ended)

    async def sweep_environments(
        self, keys: Callable[[], set[str]], forget: Callable[[str], object]
    ) -> None:
        """Enforce the limits of all users' environments for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for folders in self.all():
                await folders.environments.sweep(keys(), forget)

    def jobs_of(self, job_id: str) -> JobFolders:
        """Return the folders among which a job's is, if it has one here."""
        for folders in self.all():
            if job_id in folders.jobs.all_job_ids():
                return folders.jobs
        return self.own.jobs

    def remove(self) -> None:
        """Remove all of it: the node ends."""
        if self._by_uid:
            arena.remove_owned(self.root)


def folder_of(settings: Settings, node_id: str) -> Path:
    """Return where the folders of a node's users are to be."""
    return Path(settings.run_as_dir or arena.SOCKETS).absolute() / f"{_PREFIX}{node_id}"


def sweep(settings: Settings) -> None:
    """Remove what dead nodelets have left there."""
    arena.sweep(folder_of(settings, "").parent, f"{_PREFIX}*")
