"""A service may have as many files open as the system lets it, whatever its shell's soft limit is."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from stoker_wire.process.files import open_files
from stoker_wire.process.files.open_files import open_files_limit, raise_open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    soft, hard = resource.getrlimit(FILES)
    resource.setrlimit(FILES, (min(1024, hard), hard))
    yield hard
    resource.setrlimit(FILES, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_one(hard: int) -> None:
    raise_open_files()
    assert resource.getrlimit(FILES) == (min(hard, open_files.MOST), hard)
    assert open_files_limit() == min(hard, open_files.MOST)


def test_no_further_than_is_of_use(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST", 1030)
    raise_open_files()
    assert resource.getrlimit(FILES) == (min(hard, 1030), hard)


def test_a_limit_that_is_higher_already_stays(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST", 16)
    raise_open_files()
    assert resource.getrlimit(FILES) == (min(1024, hard), hard)
