"""Packages are deterministic, leave out what they should, and fail with the largest files named."""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from typing import TYPE_CHECKING, ClassVar

import pytest

from stoker.runtime.options import packages, uploads
from stoker.runtime.options.packages import Package, pack
from stoker.runtime.options.runtime_env import make_runtime_env
from stoker_wire.errors import BadRequestError, PayloadTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(package: Package) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(package.content)).namelist()


def test_equal_folders_make_equal_packages_whatever_their_times_and_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"train.py": "print(1)", "lib/x.py": "x = 1"})
    second = write(tmp_path / "b", {"lib/x.py": "x = 1", "train.py": "print(1)"})
    os.utime(second / "train.py", (1, 1))
    assert pack(first) == pack(second)
    (second / "train.py").write_text("print(2)")
    assert pack(first).hash != pack(second).hash


def test_the_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    import hashlib

    package = pack(write(tmp_path, {"a.py": "1"}))
    assert package.hash == hashlib.sha256(package.content).hexdigest()


def test_caches_and_version_control_are_left_out_at_any_depth(tmp_path: Path) -> None:
    left_out = (".git/HEAD", "deep/.venv/bin/python", "deep/__pycache__/a.pyc")
    write(tmp_path, {"a.py": "", **dict.fromkeys(left_out, "")})
    assert names(pack(tmp_path)) == ["a.py"]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("*.log", {"a.py", "data/x.bin", "data/deep/y.bin", "out/r.txt"}),
        ("data/", {"a.py", "b.log", "out/r.txt", "out/b.log"}),
        ("/out", {"a.py", "b.log", "data/x.bin", "data/deep/y.bin"}),
        ("data/*.bin", {"a.py", "b.log", "data/deep/y.bin", "out/r.txt", "out/b.log"}),
        ("data/**/*.bin", {"a.py", "b.log", "out/r.txt", "out/b.log"}),
        ("*.log\n!b.log", {"a.py", "b.log", "data/x.bin", "data/deep/y.bin", "out/r.txt", "out/b.log"}),
        ("# no rule\n\n?.py", {"b.log", "data/x.bin", "data/deep/y.bin", "out/r.txt", "out/b.log"}),
        ("[ab].*", {"data/x.bin", "data/deep/y.bin", "out/r.txt"}),
    ],
)  # fmt: skip
def test_ignore_files_speak_the_common_part_of_gits_rules(
    tmp_path: Path, rules: str, kept: set[str]
) -> None:
    write(tmp_path, {"a.py": "", "b.log": "", "data/x.bin": "", "data/deep/y.bin": ""})
    write(tmp_path, {"out/r.txt": "", "out/b.log": "", ".stokerignore": rules})
    assert set(names(pack(tmp_path))) - {".stokerignore"} == kept


def test_stokerignore_has_the_last_word_over_gitignore(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.bin", ".stokerignore": "!w.bin", "w.bin": "1", "v.bin": "2"})
    assert {"w.bin"} == {name for name in names(pack(tmp_path)) if name.endswith(".bin")}


def test_scripts_stay_executable(tmp_path: Path) -> None:
    write(tmp_path, {"run.sh": "#!/bin/sh"})
    (tmp_path / "run.sh").chmod(0o700)
    (info,) = zipfile.ZipFile(io.BytesIO(pack(tmp_path).content)).infolist()
    assert stat.S_IMODE(info.external_attr >> 16) == 0o755


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    write(tmp_path / "real", {"a.py": "1"})
    project = write(tmp_path / "project", {"b.py": "2"})
    (project / "lib").symlink_to(tmp_path / "real")
    (project / "loop").symlink_to(project)
    assert names(pack(project)) == ["b.py", "lib/a.py"]


def test_a_package_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, {"small.py": "1", "weights/big.bin": "x" * 5000, "mid.bin": "x" * 2000})
    with pytest.raises(
        PayloadTooLargeError, match=r"(?s)\.stokerignore.*largest: weights/big\.bin"
    ):
        pack(tmp_path, max_bytes=4096)


def test_what_takes_long_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "NOTICE_BYTES", 2**20)
    monkeypatch.setattr(packages, "IN_PIECES_NBYTES", 2**30)
    monkeypatch.setattr(packages, "_NOTICE_EVERY_S", 0.0)

    class Gcs:
        base_url = "http://head:7600"
        kept: ClassVar[set[str]] = set()

        def exists(self, path: str) -> bool:
            return path in self.kept

        def call(
            self,
            method: str,
            path: str,
            body: bytes,
            timeout_s: float,
            on_sent: Callable[[int], None],
        ) -> None:
            on_sent(len(body) // 2)
            self.kept.add(path)

    (tmp_path / "a").write_bytes(os.urandom(2**20))
    (tmp_path / "b").write_bytes(os.urandom(2**20))
    upload = uploads.uploader(Gcs())  # type: ignore[arg-type]
    for _ in range(2):
        make_runtime_env({"working_dir": tmp_path}, upload)
    said = re.sub(r"in \S+ s", "in T s", capfd.readouterr().err).splitlines()
    packing, uploading = f"stoker: packing {tmp_path}: ", "stoker: uploading to http://head:7600: "
    packed = [
        packing + "2.0 MiB",
        packing + "1.0 MiB of 2.0 MiB (50 %)",
        packing + "2.0 MiB of 2.0 MiB (100 %)",
        packing + "done in T s",
    ]
    half = uploading + "1.0 MiB of 2.0 MiB (50 %)"
    uploaded = [uploading + "2.0 MiB", half, uploading + "done in T s"]
    assert said == packed + uploaded + packed, "what is there is not uploaded again"
    for content in (b"small", b""):
        for name in "ab":
            (tmp_path / name).write_bytes(content)
        make_runtime_env({"working_dir": tmp_path}, upload)
        assert capfd.readouterr().err == ""


def test_a_path_that_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="does not exist"):
        pack(tmp_path / "nothing")


def test_the_limit_is_the_one_that_the_message_promises() -> None:
    assert packages.MAX_BYTES == 512 * 1024 * 1024
