"""The split of folders: all files once, the same for the same names, and a change changes few pieces."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.options import packages
from stoker.runtime.options.packages import pack
from stoker.runtime.options.pieces import LARGE_NBYTES, Member, split
from stoker_wire.data.piece_lists import read_list

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

Sizes = dict[str, int]
any_sizes = st.dictionaries(
    st.text("abc/", min_size=1, max_size=8),
    st.integers(0, 1000) | st.integers(0, 2 * LARGE_NBYTES),
    min_size=1,
    max_size=200,
)


def pieces_of(sizes: Sizes) -> set[tuple[tuple[str, int], ...]]:
    members = (Member(name, nbytes, False, bytes) for name, nbytes in sizes.items())
    return {tuple((one.name, one.nbytes) for one in piece) for piece in split(members)}


@given(any_sizes)
def test_each_file_is_in_one_piece_and_a_large_one_is_alone(sizes: Sizes) -> None:
    pieces = pieces_of(sizes)
    assert sorted(file for piece in pieces for file in piece) == sorted(sizes.items())
    for piece in pieces:
        assert len(piece) == 1 or all(size < LARGE_NBYTES for _, size in piece)


@given(any_sizes, st.data())
def test_a_file_that_changes_comes_or_goes_changes_two_pieces_at_most(
    sizes: Sizes, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(sizes)))
    before = pieces_of(sizes)
    changed = pieces_of(sizes | {name: data.draw(st.integers(0, 2 * LARGE_NBYTES))})
    without = pieces_of({one: size for one, size in sizes.items() if one != name})
    assert len(changed - before) <= 2 and len(before - changed) <= 2
    assert len(without - before) <= 1 and len(before - without) <= 2


def test_bundles_are_neither_too_many_nor_too_large() -> None:
    for nbytes, mean in ((100, 64), (50 << 10, 10), (300 << 10, 1.7)):
        pieces = pieces_of({f"part{one % 9}/file{one}.py": nbytes for one in range(5000)})
        assert 0.8 * mean < 5000 / len(pieces) < 1.25 * mean


def fill(folder: Path, count: int = 40) -> Path:
    for number in range(count):
        path = folder / f"part{number % 4}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(str(number).encode()).digest() * 3200)  # 100 KiB
    return folder


def test_equal_folders_have_equal_pieces_and_a_change_of_one_file_changes_one(
    tmp_path: Path,
) -> None:
    first, second = pack(fill(tmp_path / "a")), pack(fill(tmp_path / "b"))
    assert first == second
    assert read_list(first.content) == tuple(one.hash for one in first.pieces)
    assert len(first.pieces) >= 4
    (tmp_path / "b/part1/file1").write_bytes(os.urandom(102_400))
    changed = pack(tmp_path / "b")
    assert len(set(changed.pieces) - set(first.pieces)) == 1
    (tmp_path / "b/part2/file2").chmod(0o700)
    assert pack(tmp_path / "b").hash != changed.hash


def test_small_folders_and_those_of_too_many_pieces_are_one_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not pack(fill(tmp_path / "small", 9)).pieces
    fill(tmp_path / "large")
    monkeypatch.setattr(packages, "MAX_PIECES", 2)
    assert pack(tmp_path / "large").content.startswith(b"PK")
