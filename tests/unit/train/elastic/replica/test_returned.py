"""What a loop returns: small, large, and no pickle."""

from __future__ import annotations

import pickle
import re
import threading
from typing import TYPE_CHECKING

from stoker_train.elastic.replica.returned import MAX_NBYTES, returned

if TYPE_CHECKING:
    from pathlib import Path


def test_a_small_value_is_in_the_report(tmp_path: Path) -> None:
    report = returned(3, {"loss": 0.5}, tmp_path / "none")
    assert (report.worker, pickle.loads(report.value), report.problem) == (3, {"loss": 0.5}, "")
    assert not (tmp_path / "none").exists()


def test_a_large_value_is_in_the_file_that_is_named(tmp_path: Path) -> None:
    value = bytes(range(256)) * (MAX_NBYTES // 256)
    for folder in (tmp_path / "new", tmp_path):
        report = returned(0, value, folder)
        assert report.value == b""
        assert "8.0 MiB" in report.problem
        (name,) = re.findall("open\\('(.*)', 'rb'", report.problem)
        with open(name, "rb") as file:
            assert pickle.load(file) == value
        assert [one.name for one in folder.iterdir() if one.is_file()] == ["returned.pickle"]


def test_what_cannot_be_kept_says_what_to_do(tmp_path: Path) -> None:
    assert "cannot be pickled" in returned(0, threading.Lock(), tmp_path).problem
    (tmp_path / "file").write_text("")
    problem = returned(0, b"x" * (MAX_NBYTES + 1), tmp_path / "file").problem
    assert "write it to a file, and return its name" in problem
