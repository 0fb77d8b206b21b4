"""Folders of checkpoints as ``stoker train checkpoints`` lists them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from click.testing import CliRunner

from stoker.cli.views.training import train
from stoker_train.sharded.checkpoints.full_state import save_full
from stoker_train.sharded.checkpoints.layout import checkpoints_in

if TYPE_CHECKING:
    from pathlib import Path


def test_checkpoints_are_listed_and_verified(tmp_path: Path) -> None:
    for step in (3, 6):
        save_full(tmp_path, step, {"weight": torch.ones(step)}, meta={"plan": "data 4, ZeRO-3"})
    runner = CliRunner()
    found = runner.invoke(train, ["checkpoints", str(tmp_path), "--verify"])
    assert found.exit_code == 0 and found.output.count("whole") == 2, found.output
    assert "data 4, ZeRO-3" in found.output
    (checkpoints_in(tmp_path)[0].path / "__0_0.distcp").unlink()
    found = runner.invoke(train, ["checkpoints", str(tmp_path), "--verify", "--json"])
    listed = json.loads(found.output)
    assert found.exit_code == 1
    assert [(one["step"], one["problem"]) for one in listed] == [
        (3, "__0_0.distcp is missing"),
        (6, ""),
    ]
    one = checkpoints_in(tmp_path)[1].path
    found = runner.invoke(train, ["checkpoints", str(one), "--verify"])
    assert found.exit_code == 0 and found.output.count("whole") == 1, found.output
    found = runner.invoke(train, ["checkpoints", str(tmp_path / "none")])
    assert found.exit_code != 0 and "is not there" in str(found.exception or found.output)
