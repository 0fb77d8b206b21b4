"""Hopper's attention without a GPU: its own kernels, emulated (see ``_gluon``), against fp64; and its code.

No GPU has run them yet. What is shown here: right results under any order of partitions, programs and
copies; no race, no deadlock, the same bits; and machine code that loads by TMA, moves registers between warps
and keeps a product outstanding in its loop. ``tests/gpu/test_hopper_gpu.py`` is for the day there is one.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_kernels.ops.attention import hopper, reference
from stoker_kernels.ops.attention.reference import Options
from stoker_kernels.runtime.device import Device
from stoker_kernels.runtime.dry_run import DryRun

if TYPE_CHECKING:
    from types import ModuleType

Tensors = tuple[torch.Tensor, ...]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def kernels(interpreter: None) -> ModuleType:
    """The launchers, whose kernels are loaded only now: Triton is interpreted in this folder."""
    from stoker_kernels.ops.attention.hopper import launchers

    return launchers


def emulate(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, resident: int = 3
) -> None:
    """Have the launchers' Gluon kernels run in the emulation; Triton's are interpreted."""
    from stoker_kernels.runtime.launch import is_interpreted
    from stoker_kernels.runtime.launch import launch as real_launch
    from tests.kernels.aot import _gluon

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, on: Any, **config: Any) -> None:
        if is_interpreted(kernel):
            real_launch(kernel, grid, *args, on=on, **config)
        else:
            _gluon.run(kernel, grid, *args, seed=seed, resident=resident, **config)

    monkeypatch.setattr(kernels, "launch", launch)


def inputs(
    seed: int, rows: int, columns: int, head_dim: int, dtype: torch.dtype, group: int = 1
) -> Tensors:
    """Return q, k, v, dout of one sequence and one key head, in the memory that models have."""
    torch.manual_seed(seed)
    shapes = [(rows, group), (columns, 1), (columns, 1), (rows, group)]
    return tuple(
        torch.randn(1, length, heads, head_dim).to(dtype).transpose(1, 2)
        for length, heads in shapes
    )


def all_of(module: Any, given: Tensors, options: Options, dlse: torch.Tensor | None) -> Tensors:
    """Return out, lse, dq, dk, dv."""
    q, k, v, dout = given
    out, lse = module.attention_fwd(q, k, v, options)
    return out, lse, *module.attention_bwd(dout, dlse, q, k, v, out, lse, options)


CASES = [  # rows, columns, head_dim, group, causal
    pytest.param(300, 300, 64, 1, True, id="causal"),
    pytest.param(130, 333, 128, 1, True, id="more keys"),
    pytest.param(333, 130, 64, 1, True, id="rows without keys"),
    pytest.param(200, 260, 128, 1, False, id="full"),
    pytest.param(150, 150, 64, 3, True, id="grouped"),
    pytest.param(1, 1, 64, 1, True, id="one token"),
    pytest.param(1, 200, 128, 2, True, id="one query"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "head_dim", "group", "causal"), CASES)
def test_matches_fp64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, rows: int, columns: int,
    head_dim: int, group: int, causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    emulate(kernels, monkeypatch, seed)
    given = inputs(seed, rows, columns, head_dim, dtype, group)
    options = Options(scale=head_dim**-0.5, causal=causal)
    dlse = torch.randn(1, group, rows)
    ours = all_of(kernels, given, options, dlse)
    exact = all_of(reference, tuple(t.double() for t in given), options, dlse.double())
    relative = 2e-6 if dtype == torch.float32 else 1e-2
    for name, result, oracle in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=True):
        empty = oracle == float("-inf")
        assert torch.equal(result == float("-inf"), empty), name
        error = (result.double() - oracle)[~empty]
        assert error.isfinite().all(), name
        # Of terms of about 1 that may cancel, as dP and its mean do for a single token.
        size = oracle[~empty].square().mean().sqrt().clamp_min(0.25)
        assert error.square().mean().sqrt() <= relative * size, name
        assert error.abs().max() <= 20 * relative * size, name


def test_any_order_gives_the_same_bits(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Five tiles of keys add to the same rows of dq, all programs at once or one after another."""
    given = inputs(seed, 600, 600, 64, torch.float32)
    options = Options(scale=0.125, causal=False)
    results = []
    for trial, resident in enumerate((1, 2, 5, 5)):
        emulate(kernels, monkeypatch, seed + trial, resident)
        results.append(all_of(kernels, given, options, None))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


FAULTS = [  # module, what is taken out of the kernels, by what it is replaced, what is found
    pytest.param("forward", "mbarrier.wait(k_empty.index(slot), given_back)", "pass",
                 "overwritten before|more arrivals", id="load before given back"),
    pytest.param("forward", "mbarrier.wait(v_full.index(slot_before), ((it - 1) // STAGES) & 1)",
                 "pass", "read before", id="values read before they are there"),
    pytest.param("forward", "warpgroup_mma_wait(1, [scores])", "warpgroup_mma_wait(2, [scores])",
                 "outstanding is used", id="scores read too early"),
    pytest.param("forward", "mbarrier.arrive(v_empty.index(slot_before))", "pass", "deadlock",
                 id="values never given back"),
    pytest.param("forward", "((it - 1) // STAGES) & 1)", "(it // STAGES) & 1)",
                 "deadlock|read before|overwritten", id="the wrong phase"),
    pytest.param("forward", "fence_async_shared()\n    barrier()", "barrier()", "without fence",
                 id="a store without a fence"),
    pytest.param("backward", "mbarrier.wait(mine, it & 1)", "pass", "bits|more arrivals|deadlock",
                 id="dq added out of turn"),
    pytest.param("backward", "n_tiles - 1 - ticket % n_tiles", "ticket % n_tiles", "deadlock",
                 id="tickets against the order of turns"),
    pytest.param("backward", "warpgroup_mma_wait(\n        1, [dv", "warpgroup_mma_wait(\n        3, [dv",
                 "outstanding is used", id="dv read too early"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "taken", "put", "found"), FAULTS)
def test_the_emulation_finds_faults(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, module: str, taken: str,
    put: str, found: str,
) -> None:  # fmt: skip
    """Each of the kernels' waits, fences and orders is there for a reason, and its lack is noticed."""
    name = f"hopper_{'fwd' if module == 'forward' else 'bwd'}_kernel"
    monkeypatch.setattr(kernels, name, faulty(module, name, taken, put))
    given = inputs(seed, 600, 600, 64, torch.float32)
    options = Options(scale=0.125, causal=False)
    results, messages = [], []
    for trial in range(3):
        emulate(kernels, monkeypatch, seed + trial, resident=2)
        try:
            results.append(all_of(kernels, given, options, None))
        except AssertionError as fault:
            messages.append(str(fault))
    if any(
        not torch.equal(a, b)
        for again in results[1:]
        for a, b in zip(results[0], again, strict=True)
    ):
        messages.append("not the same bits")
    assert any(re.search(found, message) for message in messages), messages


def faulty(module: str, name: str, taken: str, put: str) -> Any:
    """Return a kernel of a module with one piece of its text replaced everywhere."""
    source = Path(hopper.__file__).with_name(f"{module}.py")
    text = source.read_text()
    assert taken in text, taken
    names: dict[str, Any] = {"__name__": f"faulty_{module}", "__file__": str(source)}
    changed = text.replace(taken, put)
    where = f"<{module} without {taken[:30]}>"
    linecache.cache[where] = (len(changed), None, changed.splitlines(keepends=True), where)
    exec(compile(changed, where, "exec"), names)
    return names[name]


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off until asked for; then on sm_90, for calls that the kernels can run."""
    q, k, v, _ = inputs(0, 32, 48, 64, torch.bfloat16, 2)
    options = Options(scale=0.125)
    device = Device(arch=90, multiprocessors=132)
    monkeypatch.setattr(hopper, "dry_run", lambda: DryRun(device))
    monkeypatch.setattr(hopper, "_has_gluon", lambda: True)
    monkeypatch.delenv(hopper.HOPPER_VARIABLE, raising=False)
    assert not hopper.chosen(q, k, v, options)
    monkeypatch.setenv(hopper.HOPPER_VARIABLE, "1")
    assert hopper.chosen(q, k, v, options)
    narrow = tuple(t[..., :32] for t in (q, k, v))
    unaligned = torch.randn(2 * 32 * 65).bfloat16().as_strided((1, 2, 32, 64), (4160, 2080, 65, 1))
    for given, others in (
        (narrow, options), ((unaligned, k, v), options), ((q.float(), k.float(), v.float()), options),
        ((q, k, v), options._replace(window=7)), ((q, k[:, :, :0], v[:, :, :0]), options),
        ((q, k, v), options._replace(dropout_p=0.5, seed=torch.zeros(1, dtype=torch.int64))),
    ):  # fmt: skip
        assert not hopper.chosen(*given, others)
    monkeypatch.setattr(hopper, "dry_run", lambda: DryRun(Device(arch=80, multiprocessors=108)))
    assert not hopper.chosen(q, k, v, options)
    monkeypatch.setenv(hopper.HOPPER_VARIABLE, "yes")
    with pytest.raises(ValueError, match="STOKER_KERNELS_HOPPER='yes'"):
        hopper.chosen(q, k, v, options)


@pytest.mark.timeout(900)
def test_what_the_code_is_made_of(request: pytest.FixtureRequest) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install --no-deps 'triton==3.7.*'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "STOKER_KERNELS_HOPPER": "1", "PYTHONPATH": str(ROOT / "kernels"),
        "TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton")),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_hopper.py"))],
        env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, dict[str, int]] = json.loads(done.stdout)
    names = {case.split(" | ")[0] for case in report}
    assert names == {"hopper_fwd_kernel", "hopper_statistics_kernel", "hopper_bwd_kernel"}
    for case, used in report.items():
        assert used["spill_nbytes"] == used["spills"] == 0, (case, used)
        assert used["shared_nbytes"] <= 227 * 1024, (case, used)
        assert used["registers"] * used["threads"] <= 65536, (case, used)
        if case.startswith("hopper_statistics"):
            continue
        assert used["tma_loads"] >= 4 and used["tma_stores"] >= 1, (case, used)
        assert used["register_moves"] >= 3 and used["mma"] == 0 < used["wgmma"], (case, used)
        assert used["loops_with_outstanding"] >= 1, (case, used)
        # More of them than in PTX: ptxas did not find registers enough, or an order, and made products wait.
        assert used["waits_in_code"] == used["waits"], (case, used)
        assert used["slow_exponentials"] == used["fp64"] == 0, (case, used)
