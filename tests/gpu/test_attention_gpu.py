"""Attention on a real GPU: bf16 against fp64 for grouped heads, packed sequences, dropout; repeatability.

Run with ``pytest -m gpu tests/gpu``. The plain causal case is in test_kernels_gpu.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels import flash_attention, flash_attention_varlen, philox  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]


@pytest.fixture(autouse=True)
def _compiled_and_seeded() -> None:
    pytest.importorskip("triton", reason="the CUDA path needs triton")
    from stoker_kernels.ops.attention.triton.forward import attention_fwd_kernel
    from stoker_kernels.runtime.launch import is_interpreted

    if is_interpreted(attention_fwd_kernel):
        pytest.skip("triton is interpreted in this process: run tests/gpu alone")
    torch.manual_seed(0)


def gpu(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, keep: torch.Tensor | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1).nan_to_num(0.0)
    return (p if keep is None else p * keep.to(p.dtype)) @ v


def compare(inputs: list[torch.Tensor], ours: Any, plain: Any) -> None:
    dout, results = gpu(*inputs[0].shape), []
    for run, dtype in ((ours, torch.bfloat16), (plain, torch.bfloat16), (plain, torch.float64)):
        own = leaves(*inputs, dtype=dtype)
        out = run(*own)
        out.backward(dout.to(dtype))
        results.append((out, *(t.grad for t in own)))
    for name, kernel, witness, oracle in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=100.0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("lengths", [(1024, 1024), (300, 777), (777, 300)])
def test_grouped_heads(
    lengths: tuple[int, int], head_dim: int, causal: bool, dropout_p: float
) -> None:
    rows, columns = lengths
    kv = (2, 2, columns, head_dim)
    seed = torch.tensor([11], device="cuda")
    keep = philox.keep_mask(seed, 16 * rows, columns, philox.threshold_of(dropout_p, "p"))
    keep = keep.view(2, 8, rows, columns) * philox.keep_scale_of(dropout_p)
    compare(
        [gpu(2, 8, rows, head_dim), gpu(*kv), gpu(*kv)],
        lambda *qkv: flash_attention(*qkv, causal=causal, dropout_p=dropout_p, seed=seed),
        lambda *qkv: textbook(*qkv, causal, keep),
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed(head_dim: int) -> None:
    lengths = (700, 0, 129, 1, 1024)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    kv = (sum(lengths), 2, head_dim)

    def alone(*qkv: torch.Tensor) -> torch.Tensor:
        parts = zip(*(t.split(lengths) for t in qkv), strict=True)
        outs = (textbook(*(t.transpose(0, 1)[None] for t in p), True, None) for p in parts)
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    compare(
        [gpu(sum(lengths), 8, head_dim), gpu(*kv), gpu(*kv)],
        lambda *qkv: flash_attention_varlen(*qkv, cu, cu, 1024, 1024),
        alone,
    )


def test_repeats_bit_for_bit_and_log_sum_exp() -> None:
    q, k, v = gpu(1, 16, 4096, 128), gpu(1, 4, 4096, 128), gpu(1, 4, 4096, 128)
    grads = []
    for _ in range(3):
        own = leaves(q, k, v)
        out, lse = flash_attention(*own, return_lse=True)
        (out.float().square().sum() + lse.sum()).backward()
        grads.append([t.grad for t in own])
    for again in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], again, strict=True))
    scores = q[0, :4].double() @ k[0, :1].double().mT * 128**-0.5
    hidden = torch.ones(4096, 4096, dtype=torch.bool, device="cuda").triu(1)
    expected = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse[0, :4].double(), expected, rtol=1e-5, atol=1e-5)
