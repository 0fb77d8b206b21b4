"""Hopper's attention on a real GPU: against fp64 and against the kernels that run elsewhere; repeatability.

Run with ``pytest -m gpu tests/gpu/test_hopper_gpu.py``, or by ``scripts/on-gpu``, which does it last: until
these kernels have run once, one of them may wait for ever. Speed: ``python -m benchmarks.kernels.hopper``.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels import flash_attention  # noqa: E402
from stoker_kernels.ops.attention import hopper, reference  # noqa: E402
from stoker_kernels.ops.attention.reference import Options  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(90),
]


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the CUDA path needs triton")
    monkeypatch.setenv(hopper.HOPPER_VARIABLE, "1")
    q = torch.empty(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    if not hopper.chosen(q, q, q, Options(scale=1.0)):
        pytest.skip("these kernels are for sm_90 and Triton 3.6 or 3.7")
    torch.manual_seed(0)


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def gradients(
    inputs: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    own = leaves(*inputs)
    out, lse = flash_attention(*own, causal=causal, return_lse=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    return [out, *(t.grad for t in own)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1024, 1024), (300, 777), (777, 300), (1, 513)])
def test_matches_fp64_and_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], head_dim: int, causal: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    rows, columns = lengths
    kv = (2, 2, columns, head_dim)
    inputs = [gpu(2, 8, rows, head_dim, dtype=dtype), gpu(*kv, dtype=dtype), gpu(*kv, dtype=dtype)]
    dout, dlse = gpu(2, 8, rows, head_dim, dtype=dtype), gpu(2, 8, rows, dtype=torch.float32)
    ours = gradients(inputs, dout, dlse, causal)
    monkeypatch.setenv(hopper.HOPPER_VARIABLE, "0")
    others = gradients(inputs, dout, dlse, causal)
    options = Options(scale=head_dim**-0.5, causal=causal)
    exact = [t.double() for t in inputs]
    out, lse = reference.attention_fwd(*exact, options)
    oracle = [
        out,
        *reference.attention_bwd(dout.double(), dlse.double(), *exact, out, lse, options),
    ]
    for name, one, other, right in zip(
        ("out", "dq", "dk", "dv"), ours, others, oracle, strict=True
    ):
        assert_close(one, other, right, name, terms=100.0)


@pytest.mark.parametrize("causal", [True, False])
def test_repeats_bit_for_bit(causal: bool) -> None:
    inputs = [gpu(2, 16, 4096, 128), gpu(2, 4, 4096, 128), gpu(2, 4, 4096, 128)]
    dout, dlse = gpu(2, 16, 4096, 128), gpu(2, 16, 4096, dtype=torch.float32)
    first = gradients(inputs, dout, dlse, causal)
    for _ in range(100):
        again = gradients(inputs, dout, dlse, causal)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
