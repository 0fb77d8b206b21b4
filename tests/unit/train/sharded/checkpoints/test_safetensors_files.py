"""A model as ``stoker train export`` writes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from stoker.cli.views.training import train
from stoker.exceptions import BadRequestError, NotFoundError
from stoker_train.sharded.checkpoints.full_state import load_full, save_full
from stoker_train.sharded.checkpoints.safetensors_files import export, load

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"


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


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    """Of a whole file and an index, readers would take the one that is left from before."""
    pytest.importorskip("safetensors.torch")
    runs, out = tmp_path / "runs", tmp_path / "out"
    model = torch.nn.Linear(2, 3)
    for step, files, limit_gb in ((1, 1, 5.0), (2, 2, 1e-9), (3, 1, 5.0)):
        save_full(runs, step, {"weight": torch.full((3, 2), float(step)), "bias": torch.zeros(3)})
        written = export(runs, out, max_file_gb=limit_gb)
        assert len(written) == files
        assert {*out.iterdir()} - {*written} == ({out / INDEX} if files > 1 else set())
        load(out, model)
        assert model.weight[0, 0].item() == step
        if files > 1:
            index = json.loads((out / INDEX).read_text())
            assert index["metadata"]["total_size"] == sum(
                one.numel() * one.element_size() for one in load_full(runs)[1].values()
            )
    (out / INDEX).write_text('{"weight_map": {"weight": "lost.safetensors"}}')
    with pytest.raises(NotFoundError, match=r"lost\.safetensors is not there"):
        load(out, model)
    (out / INDEX).write_text("[]")
    with pytest.raises(BadRequestError, match="has no weight_map"):
        load(out, model)
