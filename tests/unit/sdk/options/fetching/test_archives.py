"""Archives become packages; members that lie, lead out or are too much are refused."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.options.fetching.archives import package_of_archive
from stoker_wire.errors import PayloadTooLargeError, RuntimeEnvSetupError

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.runtime.options.packages import Package

MAX = 1 << 20


def zip_of(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        for name, target in (links or {}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, target)
    return path


def tar_of(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


def pack(path: Path, *excludes: str, has_top: bool = True) -> Package:
    return package_of_archive(
        path,
        "the archive",
        zipped=path.suffix == ".zip",
        has_top=has_top,
        excludes=excludes,
        max_bytes=MAX,
    )


def files_of(package: Package) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(package.content)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


FILES = {"top/train.py": "1", "top/run.sh": "2", "top/lib/__init__.py": "3", "top/data/x": "4"}


def test_zip_and_tar_of_equal_files_are_equal_but_for_modes(tmp_path: Path) -> None:
    of_zip = files_of(pack(zip_of(tmp_path / "a.zip", FILES)))
    of_tar = pack(tar_of(tmp_path / "a.tar", FILES))
    assert of_zip == files_of(of_tar)
    assert set(of_zip) == {"train.py", "run.sh", "lib/__init__.py", "data/x"}
    with zipfile.ZipFile(io.BytesIO(of_tar.content)) as archive:
        executable = [i.filename for i in archive.infolist() if (i.external_attr >> 16) & 0o100]
    assert executable == ["run.sh"]
    assert pack(tmp_path / "a.tar") == of_tar


def test_the_folder_of_a_package_stays_and_others_where_nothing_says_it_is_the_top(
    tmp_path: Path,
) -> None:
    package = zip_of(tmp_path / "a.zip", {"lib/__init__.py": "", "lib/x.py": ""})
    assert set(files_of(pack(package))) == {"lib/__init__.py", "lib/x.py"}
    whole = pack(zip_of(tmp_path / "b.zip", {"lib/x.py": ""}), has_top=False)
    assert set(files_of(whole)) == {"lib/x.py"}


def test_excludes_caches_and_virtual_environments_are_left_out(tmp_path: Path) -> None:
    more = {"top/env/pyvenv.cfg": "", "top/env/bin/x": "", "top/__pycache__/y": ""}
    ignored = {"top/.gitignore": "train.py"}  # what is in an archive was wanted there
    made = files_of(pack(zip_of(tmp_path / "a.zip", FILES | more | ignored), "data/", "*.sh"))
    assert set(made) == {"train.py", "lib/__init__.py", ".gitignore"}


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path, kind: str) -> None:
    make = {"zip": zip_of, "tar": tar_of}[kind]
    links = {"a/link.py": "../b/real.py", "a/again.py": "link.py"}
    made = files_of(pack(make(tmp_path / f"x.{kind}", {"b/real.py": "yes"}, links)))
    assert made == {"b/real.py": "yes", "a/link.py": "yes", "a/again.py": "yes"}


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "b", "link", "none"])
def test_a_link_that_leads_elsewhere_is_refused(tmp_path: Path, kind: str, target: str) -> None:
    make = {"zip": zip_of, "tar": tar_of}[kind]
    archive = make(tmp_path / f"x.{kind}", {"b/real.py": ""}, {"link": target})
    with pytest.raises(RuntimeEnvSetupError, match="leads to no file"):
        pack(archive)
    assert set(files_of(pack(archive, "link"))) == {"b/real.py"}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", ".."])
def test_a_member_that_leaves_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match="leaves it"):
        pack(zip_of(tmp_path / "a.zip", {name: ""}))
    with pytest.raises(RuntimeEnvSetupError, match="leaves it"):
        pack(tar_of(tmp_path / "a.tar", {name: ""}))


def test_devices_odd_methods_noise_and_nothing_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("pipe")
        info.type = tarfile.FIFOTYPE
        archive.addfile(info)
    with pytest.raises(RuntimeEnvSetupError, match="no file"):
        pack(tmp_path / "a.tar")
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_LZMA) as zipped:
        zipped.writestr("x", "x" * 100)
    with pytest.raises(RuntimeEnvSetupError, match="ZIP_DEFLATED"):
        pack(tmp_path / "b.zip")
    (tmp_path / "c.zip").write_bytes(b"noise")
    (tmp_path / "c.tar").write_bytes(b"noise" * 1000)
    for name in ("c.zip", "c.tar"):
        with pytest.raises(RuntimeEnvSetupError, match="cannot be unpacked"):
            pack(tmp_path / name)
    with pytest.raises(RuntimeEnvSetupError, match="no files"):
        pack(zip_of(tmp_path / "d.zip", {}))


def test_what_unpacks_to_more_than_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    bomb = tmp_path / "a.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"\0" * (2 * MAX))
    assert bomb.stat().st_size < MAX // 10
    with pytest.raises(PayloadTooLargeError, match=r"1\.0 MiB"):
        pack(bomb)
    assert files_of(pack(zip_of(tmp_path / "b.zip", {"x": "1", "y": "2" * MAX}), "y")) == {"x": "1"}
