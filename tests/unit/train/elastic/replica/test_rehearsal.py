"""Whose collective has failed: the loop's own, or one of this project."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stoker
from stoker_train.elastic.replica import rehearsal


@pytest.mark.parametrize(
    ("caller", "own"),
    [
        ("/home/me/stoker-jobs/train.py", True),
        ("/home/me/train.py", True),
        (str(Path(stoker.__file__).parent / "collective.py"), False),
        (str(Path(rehearsal.__file__)), False),
    ],
)
def test_a_loop_in_a_folder_of_any_name_is_told_of_its_own_collective(
    caller: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [caller, "/site/torch/distributed/distributed_c10d.py"]
    frames: Any = [SimpleNamespace(filename=one) for one in files]
    monkeypatch.setattr(rehearsal.traceback, "extract_tb", lambda _: frames)  # type: ignore[attr-defined]
    assert rehearsal._is_own_collective(RuntimeError("gloo")) is own
