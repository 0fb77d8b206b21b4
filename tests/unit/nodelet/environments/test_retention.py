"""Unpacked packages and venvs: those used least recently leave, none that is in use or being built."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import time
import zipfile
from typing import TYPE_CHECKING, Any

from stoker_nodelet.environments import user_folders
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.environments.retention import EnvironmentRetention
from stoker_nodelet.environments.user_folders import Folders, UserFolders
from stoker_nodelet.unix_users import UnixUsers
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MIB = 1 << 20
DAY_S = 86_400.0


def make(root: Path, name: str, *, unused_s: float) -> Path:
    """An environment of 1 MiB that was used so long ago."""
    path = root / name
    path.mkdir(parents=True)
    (path / "file").write_bytes(os.urandom(MIB))
    used_s = time.time() - unused_s
    os.utime(path, (used_s, used_s))
    return path


def test_what_was_not_used_for_so_long_leaves_unless_a_worker_has_it(tmp_path: Path) -> None:
    young = make(tmp_path, "packages/young", unused_s=DAY_S / 2)
    old = make(tmp_path, "packages/old", unused_s=2 * DAY_S)
    venv = make(tmp_path, "venvs/old", unused_s=3 * DAY_S)
    held = make(tmp_path, "venvs/held", unused_s=4 * DAY_S)
    retention = EnvironmentRetention(tmp_path, keep_s=DAY_S, max_bytes=0)
    assert retention.sweep({held}) == [venv, old]
    assert young.exists() and held.exists() and not old.exists() and not venv.exists()
    assert retention.count == 2 and retention.nbytes >= 2 * MIB
    assert EnvironmentRetention(tmp_path, DAY_S, 0).sweep(()) == [], "it was used until now"


def test_what_conda_made_for_a_venv_counts_with_it_and_leaves_with_it(tmp_path: Path) -> None:
    venv = make(tmp_path, "venvs/old", unused_s=2 * DAY_S)
    below = make(tmp_path, "venvs/old.conda", unused_s=3 * DAY_S)
    kept = make(tmp_path, "venvs/held", unused_s=2 * DAY_S)
    kept_below = make(tmp_path, "venvs/held.conda", unused_s=3 * DAY_S)
    retention = EnvironmentRetention(tmp_path, keep_s=DAY_S, max_bytes=0)
    assert retention.sweep({kept}) == [venv]
    assert not below.exists() and kept_below.exists()
    assert retention.count == 1 and retention.nbytes >= 2 * MIB


def test_beyond_the_limit_those_leave_that_were_used_least_recently(tmp_path: Path) -> None:
    names = [make(tmp_path, f"packages/{n}", unused_s=n * DAY_S) for n in (3, 1, 2, 4)]
    fresh = make(tmp_path, "packages/fresh", unused_s=0.0)
    retention = EnvironmentRetention(tmp_path, keep_s=0.0, max_bytes=int(3.5 * MIB))
    assert retention.sweep({names[3]}) == [names[0], names[2]]
    assert names[1].exists() and names[3].exists() and fresh.exists()
    assert EnvironmentRetention(tmp_path, 0.0, 0).sweep(()) == [], "0 is no limit"
    small = EnvironmentRetention(tmp_path, keep_s=0.0, max_bytes=1)
    assert fresh not in small.sweep(()), "somebody may be about to use it"


async def test_a_package_is_unpacked_again_after_it_has_left_and_stays_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_folders, "SWEEP_S", 0.01)
    downloads: list[str] = []

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("module.py", "x = 1")
    name = hashlib.sha256(content.getvalue()).hexdigest()

    async def download(package: str) -> bytes:
        downloads.append(package)
        return content.getvalue()

    root, keys, gone = tmp_path / "env", set[str](), list[str]()
    async with Background("test") as background:
        unused: Any = None
        folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
        retention = EnvironmentRetention(root, keep_s=0.01, max_bytes=0, fresh_s=0.0)
        environments = Environments(root, download, background, folders, retention)
        wanted = RuntimeEnv(py_modules=(name,))
        made = await environments.prepare(wanted, "job_1")
        environments.track(made)
        keys.add(made.key)
        users = UserFolders(tmp_path, UnixUsers("n_1"), Folders(folders, environments), unused)
        sweeps = asyncio.ensure_future(users.sweep_environments(lambda: keys, gone.append))
        folder = root / "packages" / name
        async with asyncio.timeout(40):
            while retention.count != 1:  # noqa: ASYNC110  a sweep in a thread has no event
                await asyncio.sleep(0.01)
            assert folder.exists()
            keys.clear()
            while not gone:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not folder.exists()
        sweeps.cancel()
        await environments.prepare(wanted, "job_1")
        assert folder.exists() and downloads == [name] * 2
        assert gone == [str(folder / "bin" / "python")]
