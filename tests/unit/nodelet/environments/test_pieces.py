"""Packages in pieces on a node: assembled whole, what is there is not fetched again, and nothing leaves."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import time
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.environments import environments
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.environments.retention import EnvironmentRetention
from stoker_wire.data.piece_lists import MARK, write_list
from stoker_wire.errors import NotFoundError, RuntimeEnvSetupError, UnavailableError
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DAY_S = 86_400.0


def archive(files: dict[str, str], mode: int = 0o644) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for name, text in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | mode) << 16
            made.writestr(info, text)
    return content.getvalue()


@dataclass
class Gcs:
    """Packages by their hash, and which were fetched."""

    kept: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    is_away: bool = False

    def put(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        self.kept[name] = content
        return name

    def put_list(self, *contents: bytes) -> str:
        return self.put(write_list(tuple(self.put(one) for one in contents)))

    async def download(self, package: str) -> bytes:
        if self.is_away:
            raise UnavailableError("the gcs is away")
        self.fetched.append(package)
        if package not in self.kept:
            raise NotFoundError("there is no such package")
        return self.kept[package]


@contextlib.asynccontextmanager
async def built(root: Path, gcs: Gcs, **more: int) -> AsyncIterator[Environments]:
    async with Background("test") as background:
        folders = JobFolders(root / "jobs", keep_s=0.0)
        retention = EnvironmentRetention(root / "env", DAY_S, 0)
        yield Environments(root / "env", gcs.download, background, folders, retention, **more)


async def unpacked(made: Environments, package: str) -> Path:
    await made.prepare(RuntimeEnv(py_modules=(package,)), "job_1")
    return made.root / "packages" / package


async def test_a_change_of_a_file_costs_its_piece(tmp_path: Path) -> None:
    gcs = Gcs()
    same, old, new = (
        archive({"a/x": "1", "b": "2"}),
        archive({"run": "3"}, 0o755),
        archive({"c": "4"}),
    )
    first, second = gcs.put_list(same, old), gcs.put_list(same, new)
    async with built(tmp_path, gcs) as made:
        folder = await unpacked(made, first)
        assert (folder / "a/x").read_text() == "1"
        assert os.access(folder / "run", os.X_OK) and not os.access(folder / "b", os.X_OK)
        gcs.fetched.clear()
        folder = await unpacked(made, second)
        assert gcs.fetched == [second, gcs.put(new)]
        assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"], "run is gone"
        env = await made.prepare(RuntimeEnv(working_dir=second), "job_1")
        assert sorted(os.listdir(env.cwd)) == ["a", "b", "c"]
        (piece,) = (made.root / "pieces" / second).glob(gcs.put(same))
        assert piece.stat().st_nlink == 2


async def test_a_piece_that_was_changed_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    gcs = Gcs()
    same = archive({"a": "1"})
    first, second = gcs.put_list(same), gcs.put_list(same, archive({"b": "2"}))
    async with built(tmp_path, gcs) as made:
        await unpacked(made, first)
        (made.root / "pieces" / first / gcs.put(same)).write_bytes(b"noise")
        assert ((await unpacked(made, second)) / "a").read_text() == "1"
        assert gcs.fetched.count(gcs.put(same)) == 2


async def test_what_cannot_be_had_is_named_and_fits_later(tmp_path: Path) -> None:
    gcs = Gcs()
    piece, other = archive({"a": "1"}), archive({"b": "2"})
    package = gcs.put_list(piece, other)
    name = gcs.put(piece)
    async with built(tmp_path, gcs) as made:
        del gcs.kept[name]
        with pytest.raises(RuntimeEnvSetupError, match=f"(?s)is not in this cluster.*{name}"):
            await unpacked(made, package)
        gcs.kept[name] = b"noise"
        with pytest.raises(RuntimeEnvSetupError, match="is not what it is named by"):
            await unpacked(made, package)
        gcs.is_away = True
        with pytest.raises(UnavailableError):
            await unpacked(made, package)
        assert not list((made.root / "packages").iterdir())
        gcs.is_away = False
        gcs.put(piece)
        assert ((await unpacked(made, package)) / "a").exists()


async def test_the_limits_are_of_all_pieces_together_and_none_leaves_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_MAX_MEMBERS", 3)
    gcs = Gcs()
    two, more = archive({"a": "1" * 40, "b": "2" * 40}), archive({"c": "3" * 40, "d": "4"})
    large = archive({"c": "3" * 40})
    for package, reason in (
        (gcs.put_list(two, more), "has 4 files, more than 3"),
        (gcs.put_list(two, large), "STOKER_PACKAGE_MAX_BYTES"),
        (gcs.put_list(two, archive({"../out": "x"})), "leaves the package"),
        (gcs.put_list(two, archive({"a/x": "x"})), "cannot be unpacked"),
        (gcs.put_list(two, gcs.kept[gcs.put_list(two)]), "is not a zip archive"),
        (gcs.put(MARK + b"short"), "list of pieces is broken"),
    ):
        async with built(tmp_path, gcs, max_unpacked_bytes=100) as made:
            with pytest.raises(RuntimeEnvSetupError, match=reason):
                await unpacked(made, package)
            assert not list((made.root / "packages").iterdir())


async def test_pieces_stay_while_their_package_is_used_and_leave_with_time(tmp_path: Path) -> None:
    gcs = Gcs()
    package = gcs.put_list(archive({"a": "1"}), archive({"b": "2"}))
    async with built(tmp_path, gcs) as made:
        folder = await unpacked(made, package)
        pieces = made.root / "pieces" / package
        for path in (folder, pieces):
            os.utime(path, (time.time() - 2 * DAY_S,) * 2)
        assert made.retention.sweep({folder}) == [] and made.retention.count == 1
        for path in (folder, pieces):
            os.utime(path, (time.time() - 2 * DAY_S,) * 2)
        assert set(made.retention.sweep(())) == {folder, pieces} and made.retention.count == 0
        assert (await unpacked(made, package)).is_dir()
