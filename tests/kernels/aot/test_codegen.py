"""What the GPU code is made of, without a GPU: no spills, tensor cores, wide loads, no fp64.

Every op is compiled (see ``_codegen``) for sm_90, and every other one, as the run's seed decides, for sm_80
or sm_100: a run has no time for all. An op is covered by having a workload.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoker_kernels.workloads import workloads

pytestmark = pytest.mark.timeout(
    1900
)  # the first test waits for the compiler, some minutes of one core
ROOT = Path(__file__).parents[3]
COMPILE_S = 1800
ARCH, OTHER_ARCHS = 90, (80, 100)
SHARED_LIMIT_NBYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
REGISTERS_OF_AN_SM = 65536
MATRIX_INSTRUCTION = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
# Kernels with matrix products, and how many each has; the rest are bound by memory.
PRODUCTS = {
    "attention_fwd_kernel": 2,
    "attention_bwd_dq_kernel": 3,
    "attention_bwd_dkv_kernel": 4,
    "attention_bwd_bias_kernel": 2,
    "attention_bwd_table_kernel": 2,
    "fused_dense_fwd_kernel": 1,
    "fused_glu_dense_fwd_kernel": 2,
    "grouped_rows_kernel": 1,
    "grouped_weight_kernel": 1,
    "fp8_gemm_kernel": 1,
}
# Kernels whose loads cannot all be 16 bytes wide, and why.
NARROW: dict[str, str] = {
    "scalars_kernel": "one value per tensor",
    "reduce_kernel": "a tensor's partial sums begin anywhere",
    "onebit_decompress_kernel": "one word of bits serves 32 values",
    "cross_entropy_join_kernel": "three values per part of a row",
    "scan_join_kernel": "one value per tile, from either end",
}
# Of sm_90 in bf16: instructions in all or in the loop, the values that a program does them for, and the most
# to a value. Above 9 or so for 2 bytes read, issuing instructions takes longer than memory.
PER_VALUE = {
    "cross_entropy_fwd_kernel": ("cross_entropy", "loop_instructions", 4 * 2048, 9.0),
    "softmax_fwd_kernel": ("masked_softmax", "instructions", 2048, 28.0),
    "layer_norm_fwd_kernel": ("dropout_add_layer_norm", "instructions", 4096, 32.0),
    "bias_gelu_fwd_kernel": ("bias_gelu_erf", "instructions", 4096, 20.0),
    "select_kernel": (
        "topk_compress",
        "loop_instructions",
        4096,
        25.0,
    ),  # with one round of sending
}

# What make test compiles; the others are for make test-all. Those that PER_VALUE counts are among them.
TYPICAL = frozenset(
    {
        "adamw", "attention", "bias_gelu_erf", "causal_softmax", "cross_entropy",
        "dropout_add_layer_norm", "fp8_linear", "fused_dense", "grouped_gemm", "linear_cross_entropy",
        "masked_softmax", "radix_sort", "rms_norm", "rotary", "topk_compress",
    }
)  # fmt: skip

Report = dict[tuple[str, str, str], dict[str, int]]  # (kernel, workload, arch) -> usage


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, session_seed: int) -> dict[str, Report]:
    """Resource usage of the kernels of every workload that this run asks for, compiled in one process.

    Triton's cache is kept with pytest's: it knows a kernel by all that decides its code, so a run after
    a change compiles what changed.
    """
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install --no-deps 'triton==3.7.*'")
    asked = {
        item.callspec.params["report"]
        for item in request.session.items
        if item.path == request.path
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    chosen = random.Random(session_seed)
    archs = {name: [ARCH] for name in sorted(asked)}
    for name in chosen.sample(list(archs), (len(archs) + 1) // 2):
        archs[name].append(chosen.choice(OTHER_ARCHS))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_codegen.py")), json.dumps(archs)],
        env=environment, capture_output=True, text=True, timeout=COMPILE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Report] = {name: {} for name in asked}
    for case, used in json.loads(done.stdout).items():
        kernel, sized, arch = case.split(" | ")
        found[sized.split()[0]][kernel, sized, arch] = used
    return found


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow)
        for name in workloads()
    ]
)
def report(request: pytest.FixtureRequest, compiled: dict[str, Report]) -> Report:
    """Resource usage of one workload's kernels for every architecture."""
    found = compiled[request.param]
    assert found or not workloads()[request.param].launches, "a workload launched no kernel"
    return found


def test_kernels_fit_the_machine(report: Report) -> None:
    for case, used in report.items():
        kernel, _, arch = case
        assert used["spill_nbytes"] == 0, (case, used)
        assert used["shared_nbytes"] <= SHARED_LIMIT_NBYTES[arch], (case, used)
        assert used["fp64"] == 0, (case, used)
        # A memory-bound kernel hides its waits behind a second program on the same multiprocessor.
        programs = 1 if kernel in PRODUCTS else 2
        assert programs * used["registers"] * used["threads"] <= REGISTERS_OF_AN_SM, (case, used)


def test_exponentials_are_powers_of_two(report: Report) -> None:
    """``primitives.exponential``, but where a kernel takes a few numbers for each tensor."""
    for case, used in report.items():
        if case[0] != "scalars_kernel":
            assert used["slow_exponentials"] == 0, (case, used)


def test_instructions_to_a_value(report: Report) -> None:
    for case, used in report.items():
        kernel, sized, arch = case
        workload, kind, values, most = PER_VALUE.get(kernel, ("", "", 0, 0.0))
        if arch == f"sm_{ARCH}" and sized == f"{workload} bfloat16":
            assert used[kind] * used["threads"] / values <= most, (case, used)


def test_loads_are_16_bytes_wide(report: Report) -> None:
    for case, used in report.items():
        if case[0] not in NARROW:
            assert used["wide_loads"] > 0, (case, used)


def test_products_use_the_tensor_cores_and_fp32_stays_exact(report: Report) -> None:
    """bf16 products on the matrix units, fp32 ones not: no TF32 behind the caller's back."""
    for case, used in report.items():
        kernel, workload, arch = case
        if kernel in PRODUCTS and "bfloat16" in workload:
            assert used[MATRIX_INSTRUCTION[arch]] >= PRODUCTS[kernel], (case, used)
        elif kernel in PRODUCTS:
            assert used["wgmma"] == used["mma"] == used["tcgen05"] == 0, (case, used)
        if kernel == "fp8_gemm_kernel":  # not of values widened to 16 bits, as slow as those
            assert used["wgmma_fp8"] == used["wgmma"], (case, used)


def test_loads_that_run_ahead_stop_where_their_loop_does(report: Report) -> None:
    """A division by a number of tiles that may be 0 made the compiler believe that there are some."""
    for case, used in report.items():
        if case[0] in PRODUCTS:
            assert used["certain_copies"] == 0, (case, used)
