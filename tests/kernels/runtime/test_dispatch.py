"""The ops as torch sees them: schemas, fakes, compile; the lazy package; the backend switch."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stoker_kernels
from stoker_kernels import cross_entropy, flash_attention, rms_norm
from stoker_kernels.runtime.backend import Backend, backend_for

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "kernels"), "PATH": ""},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_for_type_checkers() -> set[str]:
    tree = ast.parse(inspect.getsource(stoker_kernels))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for statement in imports for alias in statement.names}


def test_import_is_lazy() -> None:
    loaded = "[m for m in ('torch', 'triton', 'numpy') if m in sys.modules]"
    assert run_python(f"import sys, stoker_kernels; print({loaded})") == "[]"
    assert set(stoker_kernels.__all__) <= set(dir(stoker_kernels))
    assert imported_for_type_checkers() == {*stoker_kernels.__all__, "philox"}
    assert all(getattr(stoker_kernels, name) is not None for name in dir(stoker_kernels))
    assert run_python("from stoker_kernels import models, nn; print(nn.Ops().norm)") == "stoker"
    with pytest.raises(AttributeError, match="no attribute 'rms_nrom'"):
        _ = stoker_kernels.rms_nrom


def test_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch, stoker_kernels as k
from stoker_kernels.models.gpt import GPT, GPTConfig
model = GPT(GPTConfig(layers=1, heads=1, dim=32, block_size=8))
optimizer = model.optimizer()
model(torch.zeros(1, 8).long(), torch.zeros(1, 8).long())[1].backward()
optimizer.step()
print("trained")
"""
    assert run_python(code) == "trained"


def test_compiled_kernels_refuse_cpu_tensors() -> None:
    pytest.importorskip("triton", reason="needs triton to be refused by it")
    code = """
import os
os.environ["STOKER_KERNELS_BACKEND"] = "triton"
import torch, stoker_kernels
try:
    stoker_kernels.rms_norm(torch.ones(2, 2), torch.ones(2))
except RuntimeError as error:
    print(error)
"""
    assert "set TRITON_INTERPRET=1 before" in run_python(code)


def test_backend_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    monkeypatch.delenv("STOKER_KERNELS_BACKEND", raising=False)
    assert backend_for(x) is Backend.CPU
    assert backend_for(x.to("meta")) is Backend.REFERENCE
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    assert backend_for(x) is Backend.REFERENCE
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="expected auto, reference or triton"):
        backend_for(x)
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "triton")
    monkeypatch.setattr("stoker_kernels.runtime.backend.HAS_TRITON", False)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        backend_for(x)


def samples(dtype: torch.dtype = torch.float32) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each op with one set of arguments."""
    ops = torch.ops.stoker
    x, w = torch.randn(3, 2, 8).to(dtype), torch.randn(8).to(dtype)
    y, _, rstd = ops.rms_norm_fwd(x, None, w, 1e-6)
    logits, target = torch.randn(4, 9).to(dtype), torch.tensor([1, -100, 3, 8])
    loss, statistics = ops.cross_entropy_fwd(logits, target, -100)
    q, k, v = (torch.randn(2, 5, 3, 32).to(dtype).transpose(1, 2) for _ in range(3))
    out, attention_lse = ops.attention_fwd(q, k, v, 0.2)
    return [
        (ops.rms_norm_fwd.default, (x, None, w, 1e-6)),
        (ops.rms_norm_bwd.default, (y, None, x, w, rstd)),
        (ops.cross_entropy_fwd.default, (logits, target, -100)),
        (ops.cross_entropy_bwd.default, (loss, logits, target, statistics, -100)),
        (ops.attention_fwd.default, (q, k, v, 0.2)),
        (ops.attention_bwd.default, (out, None, q, k, v, out, attention_lse, 0.2)),
    ]


def test_opcheck(backend: str) -> None:
    """Schema, fake and autograd registration of every op, on every backend."""
    for op, arguments in samples():
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fakes_match_shapes_strides_and_dtypes(dtype: torch.dtype) -> None:
    for op, arguments in samples(dtype):
        real = op(*arguments)
        fake = op(
            *torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), arguments)
        )
        for a, b in zip(
            (real,) if isinstance(real, torch.Tensor) else real,
            (fake,) if isinstance(fake, torch.Tensor) else fake,
            strict=True,
        ):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), op


def test_tensors_on_two_devices_are_refused() -> None:
    """One meta tensor among real ones would make the fake answer, with unwritten memory."""
    x, target, w = torch.ones(2, 32), torch.zeros(2, dtype=torch.long), torch.ones(32)
    q = torch.ones(1, 1, 2, 32)
    away, seed = torch.ones(32, device="meta"), torch.zeros(1, dtype=torch.long, device="meta")
    calls = {
        "weight": lambda: stoker_kernels.rms_norm(x, away),
        "residual": lambda: stoker_kernels.rms_norm(x, w, residual=x.to("meta")),
        "bias": lambda: stoker_kernels.layer_norm(x, w, away),
        "bias ": lambda: stoker_kernels.bias_gelu(x, away),
        "target": lambda: stoker_kernels.cross_entropy(x, target.to("meta")),
        "target ": lambda: stoker_kernels.linear_cross_entropy(x, x, target.to("meta")),
        "seed": lambda: stoker_kernels.flash_attention(q, q, q, dropout_p=0.1, seed=seed),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name.strip()} is on meta, x on cpu"):
            call()


def test_norms_refuse_integers() -> None:
    for norm in (stoker_kernels.rms_norm, stoker_kernels.layer_norm):
        with pytest.raises(TypeError, match="must be floating point"):
            norm(torch.ones(2, 4, dtype=torch.long), torch.ones(4))


def norm_loss(x: torch.Tensor) -> torch.Tensor:
    return (rms_norm(x, x[0, 0]) * x).sum()


def entropy_loss(x: torch.Tensor) -> torch.Tensor:
    return cross_entropy(x, torch.arange(6).view(2, 3))


def attention_loss(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 2, 3, 32)
    return flash_attention(q, q * 2, q).square().sum()  # one tensor passed twice


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("function", [norm_loss, entropy_loss, attention_loss])
def test_compiles_whole_and_equals_eager(
    function: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    start = torch.randn(2, 3, 32)
    results = []
    for run in (function, compiled):
        x = start.clone().requires_grad_()
        loss = run(x)
        loss.backward()
        results.append((loss, x.grad))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, torch.ones(4)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_inference_and_autocast(backend: str) -> None:
    x, w = torch.randn(2, 32), torch.ones(32)
    with torch.no_grad():
        assert not rms_norm(x, w).requires_grad
    with torch.inference_mode():
        assert cross_entropy(x, torch.tensor([0, 1])).isfinite()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.nn.functional.linear(x, torch.randn(32, 32))
        assert rms_norm(hidden, w).dtype == torch.bfloat16
        assert cross_entropy(hidden, torch.tensor([0, 1])).dtype == torch.float32
