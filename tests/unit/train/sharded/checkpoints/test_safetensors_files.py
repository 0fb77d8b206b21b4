"""A model as ``stoker train export`` writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from stoker.cli.views.training import train
from stoker_train.sharded.checkpoints.full_state import save_full

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_is_exported(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    weight = torch.arange(6.0).view(2, 3)
    save_full(tmp_path / "runs", 3, {"weight": weight, "steps": torch.tensor(5)})
    out = tmp_path / "out" / "one.safetensors"
    arguments = ["export", str(tmp_path / "runs"), str(out), "--dtype", "bf16"]
    found = CliRunner().invoke(train, arguments)
    assert found.exit_code == 0 and str(out) in found.output, found.output
    loaded = files.load_file(out)
    assert torch.equal(loaded["weight"], weight.bfloat16()) and loaded["steps"] == 5
