"""What the GPU code is made of, without a GPU: no spills, tensor cores, wide loads, no fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_NBYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}


@pytest.fixture(scope="module", params=["80", "90"])
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, int]]]:
    """Resource usage of every kernel for one architecture, compiled from nothing."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install --no-deps 'triton==3.7.*'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_codegen.py")), request.param],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    yield json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_kernels_fit_the_machine(report: dict[str, dict[str, int]]) -> None:
    assert len(report) == 25
    for case, used in report.items():
        assert used["spill_nbytes"] == 0, (case, used)
        assert used["shared_nbytes"] <= SHARED_LIMIT_NBYTES[case.split()[-1]], (case, used)
        assert used["fp64"] == 0, (case, used)


@pytest.mark.timeout(300)
def test_loads_are_16_bytes_wide(report: dict[str, dict[str, int]]) -> None:
    for case, used in report.items():
        assert used["wide_loads"] > 0, (case, used)


@pytest.mark.timeout(300)
def test_attention_uses_the_tensor_cores(report: dict[str, dict[str, int]]) -> None:
    for case, used in report.items():
        if case.startswith("attention") and "bf16" in case:
            wanted = "wgmma" if case.endswith("sm_90") else "mma"
            # One product of two in the forward, three in dQ, four in dK/dV: at least one each.
            products = {"fwd": 2, "bwd_dq": 3, "bwd_dkv": 4}[case.split()[0].split("_", 1)[1]]
            assert used[wanted] >= products, (case, used)


@pytest.mark.timeout(300)
def test_fp32_products_are_exact(report: dict[str, dict[str, int]]) -> None:
    """No TF32 behind the caller's back."""
    for case, used in report.items():
        if case.startswith("attention") and "fp32" in case:
            assert used["wgmma"] == used["mma"] == 0, (case, used)
