"""The node's folder of compiled kernels: what it believes is there, what it removes, where it may lie."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker_nodelet.kernels import cache as kernel_cache
from stoker_nodelet.kernels.cache import (
    DYING_S,
    CompiledSet,
    KernelCache,
    filesystem_of,
    open_cache,
)
from stoker_wire.errors import StartError
from stoker_wire.settings import Settings

NOW_S = 1_000_000_000.0


def make_entry(cache: KernelCache, name: str, *, age_s: float, nbytes: int = 1000) -> Path:
    """An entry as Triton writes it, last used ``age_s`` ago."""
    folder = cache.triton_dir / name
    folder.mkdir(parents=True)
    (folder / "k.cubin").write_bytes(bytes(nbytes))
    (folder / "__grp__k.json").write_text("{}")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return folder


def is_found(folder: Path) -> bool:
    """Whether Triton would find the entry."""
    return (folder / "__grp__k.json").exists()


def a_cache(tmp_path: Path, max_bytes: int = 2500) -> KernelCache:
    root = tmp_path / "kernels"
    root.mkdir()
    return KernelCache(root, root / "triton", max_bytes)


def test_the_entries_used_least_recently_go_first_and_not_under_their_readers(
    tmp_path: Path,
) -> None:
    cache = a_cache(tmp_path)
    old, middle, new = (
        make_entry(cache, n, age_s=a) for n, a in [("o", 300), ("m", 200), ("n", 100)]
    )
    assert cache.trim(NOW_S) == 0
    # Nobody finds the oldest any more, but who has found it can still read it.
    assert not is_found(old) and (old / "k.cubin").exists()
    assert is_found(middle) and is_found(new)
    assert cache.trim(NOW_S + DYING_S / 2) == 0 and old.exists()
    assert cache.trim(NOW_S + DYING_S + 1) == 1000 and not old.exists()
    assert is_found(middle) and is_found(new)


def test_what_is_compiled_again_meanwhile_lives(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, max_bytes=0)
    entry = make_entry(cache, "e", age_s=300)
    cache.trim(NOW_S)
    assert not is_found(entry)
    (entry / "__grp__k.json").write_text("{}")
    KernelCache(cache.root, cache.triton_dir, 10_000).trim(NOW_S + DYING_S + 1)
    assert is_found(entry)


def test_a_read_counts_as_use(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, max_bytes=1500)
    read, other = make_entry(cache, "a", age_s=300), make_entry(cache, "b", age_s=200)
    os.utime(read / "k.cubin", (NOW_S, NOW_S - 300))  # the access time of a reader
    cache.trim(NOW_S)
    assert is_found(read) and not is_found(other)


def test_launchers_have_no_group_and_stay(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, max_bytes=0)
    launcher = cache.triton_dir / "launcher"
    launcher.mkdir(parents=True)
    (launcher / "cuda_utils.so").write_bytes(b"x")
    os.utime(launcher, (0, 0))
    cache.trim(NOW_S)
    assert (launcher / "cuda_utils.so").exists()


def test_one_nodelet_trims_at_a_time(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, max_bytes=0)
    entry = make_entry(cache, "e", age_s=300)
    with cache._exclusive() as exclusive:
        assert exclusive
        cache.trim(NOW_S)
        assert is_found(entry)
    cache.trim(NOW_S)
    assert not is_found(entry)


def test_a_cache_that_is_not_ours_is_not_trimmed(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    named = KernelCache(cache.root, tmp_path / "elsewhere", 0)
    entry = make_entry(named, "e", age_s=10**6)
    named.trim(NOW_S)
    assert is_found(entry)


def test_a_set_counts_only_while_all_its_entries_are_found(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    for name, age_s in [("a", 50), ("b", 40), ("c", 30)]:
        make_entry(cache, name, age_s=age_s)
    first = CompiledSet("first", str(cache.triton_dir), ("a", "b"), "v1")
    second = CompiledSet("second", str(cache.triton_dir), ("c",), "v1")
    cache.note("k1", first)
    cache.note("k2", second)
    assert cache.find("k1") == first and cache.find("nothing") is None
    os.utime(cache.root / "sets" / "k2.json", (NOW_S, NOW_S))
    assert cache.names("v1") == ["second", "first"]  # the last used last
    assert cache.names("v2") == []  # other code would have to compile them
    (cache.triton_dir / "b" / "__grp__k.json").unlink()
    assert cache.find("k1") is None
    assert cache.names("v1") == ["second"]
    assert not (cache.root / "sets" / "k1.json").exists()


def test_using_a_set_keeps_its_entries_from_being_trimmed(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, max_bytes=1500)
    used = make_entry(cache, "a", age_s=300)
    other = make_entry(cache, "b", age_s=200)
    cache.note("k", CompiledSet("s", str(cache.triton_dir), ("a",)))
    cache.find("k")
    cache.trim()
    assert is_found(used) and not is_found(other)


def test_tables_that_nobody_can_be_about_to_read_are_removed(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    paths = [cache.table(f"t{number:02}", b"[]") for number in range(20)]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (NOW_S - age, NOW_S - age))
    cache.trim(NOW_S + 3600)
    assert all(path.exists() for path in paths)
    os.utime(cache.table("t00", b"[]"), (NOW_S + 1, NOW_S + 1))
    cache.trim(NOW_S + 25 * 3600)
    assert [path.name for path in paths if not path.exists()] == [
        "t01.json", "t02.json", "t03.json", "t04.json",
    ]  # fmt: skip


def test_a_half_written_note_is_no_set(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    (cache.root / "sets").mkdir()
    (cache.root / "sets" / "k.json").write_text('{"name": "x"')
    assert cache.find("k") is None and cache.names("") == []


def test_those_who_write_the_same_table_at_once_all_get_it_whole(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    with ThreadPoolExecutor(6) as threads:
        for number in range(40):
            content, barrier = bytes(200_000), threading.Barrier(6)

            def write(number: int = number, barrier: threading.Barrier = barrier) -> bytes:
                barrier.wait()
                return cache.table(f"t{number}", bytes(200_000)).read_bytes()

            told = [threads.submit(write) for _ in range(6)]
            assert all(one.result() == content for one in told)
    assert len(list((cache.root / "tuned").iterdir())) == 40


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left")

    cache = a_cache(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        cache.table("t", b"[]")
    assert list((cache.root / "tuned").iterdir()) == []


def test_a_function_that_was_edited_is_no_set(tmp_path: Path) -> None:
    cache = a_cache(tmp_path)
    source = tmp_path / "mine.py"
    source.write_text("")
    made = CompiledSet("s", str(cache.triton_dir), (), "", {str(source): source.stat().st_mtime_ns})
    cache.note("k", made)
    assert cache.find("k") == made
    os.utime(source, (NOW_S, NOW_S))
    assert cache.find("k") is None and cache.names("") == []


def test_notes_are_bounded_and_halves_of_killed_writers_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_NOTES", 2)
    cache = a_cache(tmp_path)
    for age, key in enumerate("abc"):
        cache.note(key, CompiledSet(key, str(cache.triton_dir), ()))
        os.utime(cache.root / "sets" / f"{key}.json", (NOW_S - age, NOW_S - age))
    assert cache.names("") == ["b", "a"] and cache.find("c") is None
    half = cache.root / "sets" / ".k.json.0123"
    half.write_text("{")
    os.utime(half, (NOW_S, NOW_S))
    cache.trim(NOW_S + 3600)
    assert half.exists()
    cache.trim(NOW_S + 25 * 3600)
    assert not half.exists() and cache.find("a") is not None


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:1 - nfs4 server:/home rw
31 30 8:2 / /home/fast\\040disk rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/var/tmp/x", "ext4"), ("/home/me/.triton", "nfs4"), ("/home/fast disk/x", "xfs")],
)
def test_the_file_system_of_a_path_is_that_of_its_deepest_mount(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_a_named_folder_is_used_and_one_that_others_can_write_is_refused(tmp_path: Path) -> None:
    named = tmp_path / "cache"
    cache = open_cache(Settings(kernel_cache_dir=str(named)), tmp_path)
    assert cache.triton_dir == named / "triton" and named.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(named)
    assert open_cache(Settings(kernel_cache_dir=str(tmp_path / "link")), tmp_path).root == named
    named.chmod(0o777)
    with pytest.raises(StartError, match="not ours alone to write\nname a folder on a local disk"):
        open_cache(Settings(kernel_cache_dir=str(named)), tmp_path)


def test_a_cache_that_the_operator_named_is_used_and_the_setting_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert open_cache(Settings(), tmp_path).triton_dir == tmp_path / "triton"
    chosen = open_cache(Settings(kernel_cache_dir=str(tmp_path / "ours")), tmp_path)
    assert chosen.triton_dir == tmp_path / "ours" / "triton"
