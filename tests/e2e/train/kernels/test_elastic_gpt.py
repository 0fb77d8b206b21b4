"""The elastic example: the same steps on the same samples as the example that it was made of."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("numpy") is None:
    pytest.skip("needs torch: pip install stoker[train]", allow_module_level=True)

RUN_S = 200.0
pytestmark = pytest.mark.timeout(2 * RUN_S + 40.0)

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
TINY = [
    *("--layers", "1", "--heads", "1", "--dim", "32", "--batch", "8", "--block", "32"),
    *("--steps", "8", "--warmup", "2"),
]


def _train(example: str, out: Path, *options: str) -> dict[str, list[float]]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *TINY, "--out", str(out), *options],
        env={**os.environ, "STOKER_SESSION_ROOT": str(out.parent), "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    metrics: dict[str, list[float]] = json.loads((out / "metrics.json").read_text())
    return metrics


def test_an_elastic_job_has_the_curve_of_a_fixed_one(tmp_path: Path) -> None:
    fixed = _train("train_gpt.py", tmp_path / "fixed", "--workers", "1")
    elastic = _train("elastic_gpt.py", tmp_path / "elastic", "--max-replicas", "2")
    assert len(elastic["losses"]) == 8
    assert elastic["losses"] == pytest.approx(fixed["losses"], abs=1e-3)
    assert elastic["validation_loss"] == pytest.approx(fixed["validation_loss"], abs=1e-3)
