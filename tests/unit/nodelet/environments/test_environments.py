"""Environments: packages that cannot be had or unpacked, and commands that fail, with the reason."""

from __future__ import annotations

import hashlib
import io
import stat
import zipfile
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.environments import environments
from stoker_nodelet.environments.environments import Environments, _extract
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.environments.retention import EnvironmentRetention
from stoker_nodelet.environments.venvs import run_command
from stoker_wire.errors import NotFoundError, RuntimeEnvSetupError
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.process.background import Background
from tests.services import mounted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_a_package_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(RuntimeEnvSetupError, match="leaves the package"):
        _extract(content.getvalue(), tmp_path / "in" / "p", "p", 1 << 30)
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_package_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(RuntimeEnvSetupError, match="leaves the package"):
        _extract(content.getvalue(), tmp_path / "p", "p", 1 << 30)


def _broken_package(how: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        if how == "long name":
            archive.writestr("x" * 5000, "x")
        elif how == "file and folder":
            archive.writestr("a", "x")
            archive.writestr("a/b", "x")
        else:
            archive.writestr("a", b"text" * 100)
    raw = bytearray(content.getvalue())
    for start, flags, method in ((raw.find(b"PK\1\2"), 8, 10), (raw.find(b"PK\3\4"), 6, 8)):
        if how == "encrypted":
            raw[start + flags] |= 1
        elif how == "unknown method":
            raw[start + method] = 77
    if how == "noise":
        raw[35:45] = b"\xff" * 10
    return bytes(raw)


@pytest.mark.parametrize(
    "how", ["long name", "file and folder", "encrypted", "unknown method", "noise"]
)
def test_a_package_that_cannot_be_unpacked_fails_its_environment(tmp_path: Path, how: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match="package p "):
        _extract(_broken_package(how), tmp_path / "p", "p", 1 << 30)


def _zip_of(members: int, nbytes: int = 0) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(members):
            archive.writestr(f"{number}", bytes(nbytes))
    return content.getvalue()


def test_a_package_of_too_many_or_too_large_files_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_MAX_MEMBERS", 10)
    monkeypatch.setattr(environments, "_MAX_MARKS", 40)
    _extract(_zip_of(10, nbytes=100), tmp_path / "p", "p", 1000)
    assert len(list((tmp_path / "p").iterdir())) == 10
    for bad, reason in (
        (_zip_of(11), r"p has 11 files, more than 10"),
        (_zip_of(41), r"p has more than 10 files"),
        (_zip_of(10, nbytes=101), r"0 MiB of STOKER_PACKAGE_MAX_BYTES"),
    ):
        with pytest.raises(RuntimeEnvSetupError, match=reason):
            _extract(bad, tmp_path / "bad", "p", 1000)
        assert not (tmp_path / "bad").exists()


def test_a_member_is_never_larger_than_its_archive_says(tmp_path: Path) -> None:
    raw = bytearray(_zip_of(1, nbytes=1 << 20))
    at = raw.find(b"PK\1\2") + 24
    raw[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(RuntimeEnvSetupError):
        _extract(bytes(raw), tmp_path / "p", "p", 1000)


def test_a_package_that_fills_the_disk_is_named_leaves_nothing_and_fits_later(
    tmp_path: Path,
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number in range(4):
            archive.writestr(f"file{number}", bytes(1 << 20))
    with mounted(tmp_path / "disk", 6 << 20) as disk:
        (disk / "others").write_bytes(bytes(3 << 20))
        with pytest.raises(RuntimeEnvSetupError, match=r"(?s)cannot be unpacked.*No space left"):
            _extract(content.getvalue(), disk / "p", "p", 1 << 30)
        assert [path.name for path in disk.iterdir()] == ["others"]
        (disk / "others").unlink()
        _extract(content.getvalue(), disk / "p", "p", 1 << 30)
        assert (disk / "p" / "file3").stat().st_size == 1 << 20


async def test_a_package_that_nobody_uploaded_fails_its_environment(tmp_path: Path) -> None:
    async def download(package: str) -> bytes:
        raise NotFoundError(f"there is no package {package!r}")

    async with Background("test") as background:
        folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
        retention = EnvironmentRetention(tmp_path / "env", 0.0, 0)
        built = Environments(tmp_path / "env", download, background, folders, retention)
        for _ in range(2):
            with pytest.raises(
                RuntimeEnvSetupError, match=r"(?s)a{12}… is not in this cluster.*a{64}"
            ):
                await built.prepare(RuntimeEnv(working_dir="a" * 64), "job_1")


async def test_what_a_lease_sets_is_not_the_environments_to_set(tmp_path: Path) -> None:
    async with Background("test") as background:
        folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
        retention = EnvironmentRetention(tmp_path / "env", 0.0, 0)
        built = Environments(tmp_path / "env", no_download, background, folders, retention)
        free = {"TRITON_CACHE_DIR": "/mine", "STOKER_KERNELS_BACKEND": "triton", "STOKERS": "1"}
        assert (await built.prepare(RuntimeEnv(env_vars=free), "job_1")).env_vars == free
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "STOKER_NODE_ID"):
            with pytest.raises(
                RuntimeEnvSetupError, match=rf"env_vars\.{name}: this variable cannot"
            ):
                await built.prepare(RuntimeEnv(env_vars={"A": "1", name: ""}), "job_1")


async def no_download(package: str) -> bytes:
    raise AssertionError(package)


async def test_a_package_is_unpacked_only_under_its_own_hash(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("module.py", "x = 1")
    name = hashlib.sha256(content.getvalue()).hexdigest()

    async def download(package: str) -> bytes:
        return content.getvalue()

    async with Background("test") as background:
        folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
        retention = EnvironmentRetention(tmp_path / "env", 0.0, 0)
        built = Environments(tmp_path / "env", download, background, folders, retention)
        assert (await built.prepare(RuntimeEnv(py_modules=(name,)), "job_1")).sys_path
        with pytest.raises(RuntimeEnvSetupError, match="not what it is named by"):
            await built.prepare(RuntimeEnv(py_modules=("0" * 64,)), "job_1")
        for other in (name[:16], "../" + name, name.upper(), name + "\n"):
            with pytest.raises(RuntimeEnvSetupError, match="not the hash of a package"):
                await built.prepare(RuntimeEnv(py_modules=(other,)), "job_1")
    assert [one.name for one in (tmp_path / "env" / "packages").iterdir()] == [name]


async def test_a_command_that_fails_is_named_with_its_own_last_words() -> None:
    script = "echo Looking; echo 'ERROR: No matching distribution found for x'; echo Bye; exit 3"
    with pytest.raises(RuntimeEnvSetupError) as raised:
        await run_command(["/bin/sh", "-c", script], "pip install x")
    first, *rest = str(raised.value).splitlines()
    assert first == "pip install x failed (exit code 3)."
    assert rest[0] == "No matching distribution found for x"
    assert rest[1:] == ["Looking", "ERROR: No matching distribution found for x", "Bye"]


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_package_of_another_compression_is_refused_before_it_takes_memory(
    tmp_path: Path, method: int
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        archive.writestr("a", "x")
    with pytest.raises(RuntimeEnvSetupError, match="ZIP_DEFLATED"):
        _extract(content.getvalue(), tmp_path / "p", "p", 1 << 30)
