"""The example that fine-tunes with LoRA under ZeRO learns, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[4] / "examples/finetune_lora.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_learns_from_packed_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--zero", "3", "--steps", "60"],
        env={**os.environ, "STOKER_SESSION_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32768 numbers trained, 105664 frozen" in done.stdout
    assert "60 steps of data 2, ZeRO-3" in done.stdout
