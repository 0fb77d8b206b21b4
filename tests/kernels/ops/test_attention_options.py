"""What attention does beyond the plain causal case: grouped heads, packed sequences, dropout, lse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels import flash_attention, flash_attention_varlen, philox
from stoker_kernels.ops.attention import reference
from stoker_kernels.ops.attention.reference import Options
from tests.kernels._numerics import assert_close, leaves, poison_empty

NAMES = ("out", "dq", "dk", "dv")


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse with K and V repeated over their groups; rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    rows, columns = scores.shape[-2:]
    if causal:
        hidden = ~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return (p if keep is None else p * keep) @ v, lse


def tensors(*shapes: tuple[int, ...], magnitude: float = 1.0) -> list[torch.Tensor]:
    return [magnitude * torch.randn(shape) for shape in shapes]


def compare(
    inputs: list[torch.Tensor],
    dout: torch.Tensor,
    ours: Any,
    plain: Any,
    dlse: torch.Tensor | None = None,
    terms: float = 30.0,
) -> None:
    """Outputs and gradients of ``ours`` against ``plain`` in fp64, both -> (out, lse)."""
    results = []
    for run, dtype in ((ours, inputs[0].dtype), (plain, inputs[0].dtype), (plain, torch.float64)):
        own = leaves(*inputs, dtype=dtype)
        out, lse = run(*own)
        sees = lse > float("-inf")
        loss = (out * dout.to(dtype)).sum()
        if dlse is not None:
            loss = loss + (lse.masked_fill(~sees, 0.0) * dlse).sum()
        loss.backward()
        results.append((out, *(t.grad for t in own), lse))
    empty = results[2][-1].isinf()
    assert torch.equal(results[0][-1].isinf(), empty)
    for name, kernel, witness, oracle in zip(NAMES, *(r[:4] for r in results), strict=True):
        assert_close(kernel, witness, oracle, name, terms)
    assert_close(*(r[-1].masked_fill(empty, 0.0) for r in results), "lse", terms)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(45, 45), (17, 70), (70, 17), (1, 33), (32, 32)])
def test_lengths_and_groups(
    backend: str,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S_q != S_k aligned bottom-right, grouped heads, and the log-sum-exp with its gradient.

    70 queries on 17 keys leave rows with nothing to attend under the causal mask.
    """
    poison_empty(monkeypatch)
    (rows, columns), (h, kv) = lengths, heads
    inputs = tensors((1, h, rows, 32), (1, kv, columns, 32), (1, kv, columns, 32))
    compare(
        inputs, torch.randn(1, h, rows, 32),
        lambda *qkv: flash_attention(*qkv, causal=causal, return_lse=True),
        lambda *qkv: textbook(*qkv, causal=causal),
        dlse=torch.randn(1, h, rows),
    )  # fmt: skip


def test_rows_with_nothing_to_attend_are_zero(backend: str) -> None:
    q, k, v = leaves(*tensors((1, 2, 40, 32), (1, 2, 8, 32), (1, 2, 8, 32)))
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert torch.equal(out[:, :, :32], torch.zeros(1, 2, 32, 32))
    assert (lse[:, :, :32] == float("-inf")).all()
    lse.exp().sum().backward(retain_graph=True)
    out.sum().backward()
    assert torch.equal(q.grad[:, :, :32], torch.zeros(1, 2, 32, 32))
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_gradient_of_the_log_sum_exp_alone(backend: str) -> None:
    """Nobody used the output; and infinite gradients of rows that saw nothing change nothing."""
    inputs = tensors((1, 2, 20, 32), (1, 1, 12, 32), (1, 1, 12, 32))
    ours, plain = leaves(*inputs), leaves(*inputs, dtype=torch.float64)
    _, lse = flash_attention(*ours, return_lse=True)
    weight = torch.ones(1, 2, 20)
    weight[:, :, :8] = float("inf")
    lse.backward(weight)
    textbook(*plain)[1][:, :, 8:].sum().backward()
    for name, a, b in zip(("dq", "dk"), ours, plain, strict=False):
        assert_close(a.grad, b.grad.float(), b.grad, name, 10.0)
    assert torch.equal(ours[2].grad, torch.zeros(1, 1, 12, 32))


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_and_no_queries(backend: str, causal: bool) -> None:
    q, k, v = leaves(*tensors((1, 1, 5, 32), (1, 1, 0, 32), (1, 1, 0, 32)))
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 1, 5, 32))
    assert torch.equal(q.grad, torch.zeros(1, 1, 5, 32))
    assert (lse == float("-inf")).all()
    q, k, v = leaves(*tensors((1, 1, 0, 32), (1, 1, 5, 32), (1, 1, 5, 32)))
    flash_attention(q, k, v, causal=causal).sum().backward()
    assert torch.equal(k.grad, torch.zeros(1, 1, 5, 32))


LENGTHS = (0, 5, 40, 0, 33, 1, 17)
LENGTHS_K = (3, 5, 20, 0, 50, 1, 0)


def packed(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_packed_equals_each_sequence_alone(
    backend: str, causal: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences, more queries than keys, no keys at all; neighbours must not leak."""
    poison_empty(monkeypatch)
    total, total_k, columns = sum(LENGTHS), sum(LENGTHS_K), max(LENGTHS_K) + 9
    inputs = tensors((total, 4, 32), (total_k, 2, 32), (total_k, 2, 32))
    seed = torch.tensor([77])
    keep = philox.keep_mask(seed, 4 * total, columns, philox.threshold_of(dropout_p, "p"))
    keep = keep.view(4, total, columns) * philox.keep_scale_of(dropout_p)

    def ours(*qkv: torch.Tensor) -> Any:
        return flash_attention_varlen(
            *qkv, packed(LENGTHS), packed(LENGTHS_K, torch.int64), max(LENGTHS) + 3, columns,
            causal=causal, dropout_p=dropout_p, seed=seed, return_lse=True,
        )  # fmt: skip

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        parts, at, at_k = [], 0, 0
        for rows, width in zip(LENGTHS, LENGTHS_K, strict=True):
            one = (q[at : at + rows], k[at_k : at_k + width], v[at_k : at_k + width])
            mask = keep[:, at : at + rows, :width].to(q.dtype)
            parts.append(textbook(*(t.transpose(0, 1)[None] for t in one), causal, mask))
            at, at_k = at + rows, at_k + width
        out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
        return out, torch.cat([lse[0] for _, lse in parts], 1)

    compare(inputs, torch.randn(total, 4, 32), ours, alone)


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_the_documented_mask(backend: str, causal: bool) -> None:
    """Forward, dQ and dK/dV drop the same elements, those of ``philox.keep_mask``."""
    inputs = tensors((2, 2, 37, 32), (2, 1, 50, 32), (2, 1, 50, 32))
    seed = torch.tensor([2**40 + 3])
    keep = (
        philox.keep_mask(seed, 2 * 2 * 37, 50, philox.threshold_of(0.25, "p")).view(2, 2, 37, 50)
        / 0.75
    )
    compare(
        inputs, torch.randn(2, 2, 37, 32),
        lambda *qkv: flash_attention(
            *qkv, causal=causal, dropout_p=0.25, seed=seed, return_lse=True
        ),
        lambda q, *kv: textbook(q, *kv, causal, keep.to(q.dtype)),
    )  # fmt: skip


def test_dropout_s_frequency_and_extremes(backend: str) -> None:
    """Uniform attention to values 1: an output is the kept fraction, scaled; p = 1 drops all."""
    q = torch.zeros(1, 4, 48, 32)
    v = torch.ones(1, 4, 48, 32)
    kept = flash_attention(q, q, v, causal=False, dropout_p=0.3)[..., 0]
    assert abs(kept.mean() - 1) < 5 * (0.3 / 0.7 / (4 * 48 * 48)) ** 0.5
    assert len(kept.unique()) > 5
    again = flash_attention(q, q, v, causal=False, dropout_p=0.3)[..., 0]
    assert not torch.equal(kept, again)  # each call draws a seed of its own
    (leaf,) = leaves(q)
    out = flash_attention(leaf, q, v, dropout_p=1.0)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(leaf.grad, torch.zeros_like(q))


def test_dropout_follows_torch_s_generator(backend: str) -> None:
    q = torch.randn(1, 1, 20, 32)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(flash_attention(q, q, q, dropout_p=0.5))
    assert torch.equal(*outs)


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
@pytest.mark.parametrize("where", ["scores", "values"])
def test_extreme_magnitudes_stay_finite(backend: str, magnitude: float, where: str) -> None:
    """Scores up to 1e9 lose all precision but never become infinite: probabilities stay within 1.

    PyTorch's CPU backward does not hold them there, so on the CPU only the forward promises that.
    """
    q, k, v = tensors((1, 2, 40, 32), (1, 2, 40, 32), (1, 2, 40, 32))
    if where == "scores":
        q, k = q * magnitude, k * magnitude
    else:
        v = v * magnitude
    dout = torch.randn(1, 2, 40, 32)
    scores = float(1 + (q @ k.mT).abs().max() * 32**-0.5)
    part = float(max(q.abs().max(), k.abs().max(), 1) * max(v.abs().max(), 1))
    if (backend, where, magnitude) == ("cpu", "scores", 1e4):
        found = flash_attention(q, k, v, return_lse=True)
        plain, oracle = textbook(q, k, v), textbook(q.double(), k.double(), v.double())
        for name, one, witness, exact in zip(("out", "lse"), found, plain, oracle, strict=True):
            assert_close(one, witness, exact, name, terms=30.0 * part * scores)
        return
    compare(
        [q, k, v], dout, lambda *qkv: flash_attention(*qkv, return_lse=True), textbook,
        terms=30.0 * part * scores,
    )  # fmt: skip


def test_nan_reaches_only_those_who_see_it(backend: str) -> None:
    q, k, v = tensors((1, 1, 40, 32), (1, 1, 40, 32), (1, 1, 40, 32))
    q[0, 0, 7, 3] = float("nan")
    k[0, 0, 36, 2] = float("nan")
    out = flash_attention(q, k, v)[0, 0]
    assert out[7].isnan().all()
    assert out[36:].isnan().all()
    assert out[[*range(7), *range(8, 36)]].isfinite().all()


def test_packed_gradients_repeat_bit_for_bit(backend: str) -> None:
    inputs = tensors((sum(LENGTHS), 4, 32), (sum(LENGTHS_K), 1, 32), (sum(LENGTHS_K), 1, 32))
    dout, grads = torch.randn(sum(LENGTHS), 4, 32), []
    for _ in range(2):
        own = leaves(*inputs)
        flash_attention_varlen(*own, packed(LENGTHS), packed(LENGTHS_K), 40, 50).backward(dout)
        grads.append([t.grad for t in own])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_upstream_gradient_is_left_alone(backend: str) -> None:
    own, dout = leaves(*tensors(*[(1, 2, 9, 32)] * 3)), torch.randn(1, 2, 9, 32)
    before = dout.clone()
    flash_attention(*own).backward(dout)
    assert torch.equal(dout, before)


def test_row_offsets_pass_2_to_the_31(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a head, in elements, wraps in int32; the interpreter wraps as the GPU does."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton
    import triton.language as tl

    from stoker_kernels.ops.attention.triton import tiles

    # Interpreted kernels look names up in their module.
    monkeypatch.setitem(globals(), "tl", tl)
    monkeypatch.setitem(globals(), "head_base", tiles.head_base)

    @triton.jit
    def probe(out_ptr, base_ptr, batch, head, first, stride):  # type: ignore[no-untyped-def]
        there = head_base(base_ptr, batch, head, first, stride, stride, stride)  # noqa: F821
        tl.store(out_ptr, there.to(tl.int64) - base_ptr.to(tl.int64))

    out, base = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    probe[(1,)](out, base, 3, 5, 7, 2**29)
    assert out.item() == 4 * 15 * 2**29


def test_gradcheck_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    seed = torch.tensor([1])
    inputs = leaves(*tensors((1, 2, 4, 32), (1, 1, 6, 32), (1, 1, 6, 32)), dtype=torch.float64)

    def run(*qkv: torch.Tensor) -> Any:
        return flash_attention(*qkv, dropout_p=0.4, seed=seed, return_lse=True)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    out, lse = reference.attention_fwd(*inputs, Options(32**-0.5))
    for ours, plain in zip((out, lse), textbook(*inputs), strict=True):
        assert_close(ours, ours, plain)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors((1, 4, 4, 32), (1, 3, 4, 32), (1, 3, 4, 32))
    with pytest.raises(ValueError, match="4 query heads must be a multiple of 3"):
        flash_attention(q, k, v)
    with pytest.raises(ValueError, match="dropout_p must be a probability"):
        flash_attention(q, q, q, dropout_p=1.5)
    with pytest.raises(ValueError, match="scale must be positive"):
        flash_attention(q, q, q, scale=0.0)
    with pytest.raises(ValueError, match=r"seed must be \(1,\) int64"):
        flash_attention(q, q, q, dropout_p=0.5, seed=torch.zeros(2))
    flat = q[0].transpose(0, 1)  # (T, H, D)
    cu = packed((1, 3))
    with pytest.raises(ValueError, match=r"q must be \(T, H, D\)"):
        flash_attention_varlen(q, q, q, cu, cu, 3, 3)
    with pytest.raises(ValueError, match="cu_seqlens_k must be"):
        flash_attention_varlen(flat, flat, flat, cu, cu.float(), 3, 3)
    with pytest.raises(ValueError, match="must have one length"):
        flash_attention_varlen(flat, flat, flat, cu, cu[:2], 3, 3)
    with pytest.raises(ValueError, match="must rise from 0 to at most 4"):
        flash_attention_varlen(flat, flat, flat, cu * 2, cu * 2, 9, 9)
    with pytest.raises(ValueError, match="longest sequences have 3 and 3"):
        flash_attention_varlen(flat, flat, flat, cu, cu, 3, 2)


def test_autocast_is_torch_s(backend: str) -> None:
    """Its dtype for q, k and v, alike or not, as torch's attention takes them; fp64 stays."""
    inputs = tensors((1, 4, 24, 32), (1, 2, 24, 32), (1, 2, 24, 32))
    for dtypes in ((torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float16)):
        own, theirs = (
            [t.to(d, copy=True).requires_grad_() for t, d in zip(inputs, dtypes, strict=True)]
            for _ in range(2)
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attention(*own)
            wanted = torch.nn.functional.scaled_dot_product_attention(
                *theirs, is_causal=True, enable_gqa=True
            )
        assert out.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        out.sum().backward()
        wanted.sum().backward()
        for a, b in zip(own, theirs, strict=True):
            assert a.grad.dtype == a.dtype
            torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=5e-2)
        narrow = leaves(*own, dtype=torch.bfloat16)
        assert torch.equal(out, flash_attention(*narrow))  # and the op's products were fp32
    with torch.autocast("cpu", torch.bfloat16):
        if backend != "triton":
            assert flash_attention(*[t.double() for t in inputs]).dtype == torch.float64
        flat = [t[0].transpose(0, 1) for t in inputs]
        cu = packed((20, 4))
        assert flash_attention_varlen(*flat, cu, cu, 20, 20).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert flash_attention(*inputs).dtype == torch.float32


def test_rows_behind_the_last_sequence_are_zero(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding at the tail, as for CUDA graphs, whose values are nobody's: here NaN."""
    poison_empty(monkeypatch)
    used, used_k, pad = sum(LENGTHS), sum(LENGTHS_K), 37
    inputs = tensors((used + pad, 4, 32), (used_k + pad, 2, 32), (used_k + pad, 2, 32))
    exact = leaves(inputs[0][:used], inputs[1][:used_k], inputs[2][:used_k])
    for tensor, rows in zip(inputs, (used, used_k, used_k), strict=True):
        tensor[rows:] = float("nan")
    padded = leaves(*inputs)
    dout, dlse = torch.randn(used + pad, 4, 32), torch.randn(4, used + pad)
    cu = packed(LENGTHS), packed(LENGTHS_K), max(LENGTHS), max(LENGTHS_K)
    results = []
    for own, rows in ((exact, used), (padded, used + pad)):
        out, lse = flash_attention_varlen(*own, *cu, return_lse=True)
        sees = lse[:, :used] > float("-inf")
        loss = (out[:used] * dout[:used]).sum() + (lse[:, :used] * dlse[:, :used])[sees].sum()
        if rows > used:
            assert torch.equal(out[used:], torch.zeros(pad, 4, 32))
            assert torch.equal(lse[:, used:], torch.full((4, pad), float("-inf")))
            loss = loss + (out[used:] * dout[used:]).sum()
        loss.backward()
        results.append((out[:used], lse[:, :used], *(t.grad for t in own)))
    for a, b in zip(*results, strict=True):
        b = b[: len(a)] if b.ndim == 3 else b
        torch.testing.assert_close(a, b)
    for grad in results[1][2:]:
        assert not grad[-pad:].any()


def test_fp16_probabilities_are_held_at_1(request: pytest.FixtureRequest) -> None:
    """Machine code only: a fused multiply-add leaves exp2 above 1, and fp16 ends at 2^16."""
    pytest.importorskip("triton", reason="compiling needs triton")
    code = """
import torch
from stoker_kernels import aot, flash_attention
for dtype in (torch.float16, torch.bfloat16):
    with aot.compiling(90) as run:
        flash_attention(*[torch.empty(1, 1, 256, 64, device="meta", dtype=dtype)] * 3)
    ((_, compiled),) = run.kernels
    ptx = compiled.asm["ptx"]
    print("fma.rn.f32" in ptx, "min.NaN.f32" in ptx)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    environment["PYTHONPATH"] = str(Path(__file__).parents[3] / "kernels")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True", "False"]


def test_more_sequences_than_a_grid_dimension_holds(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's second and third grid dimension end at 65535, here at 2: several launches, same bits."""
    from stoker_kernels.ops.attention.triton import launchers

    seed = torch.tensor([4])
    dense = tensors((3, 2, 20, 32), (3, 1, 20, 32), (3, 1, 20, 32))
    flat = tensors((sum(LENGTHS), 2, 32), (sum(LENGTHS_K), 1, 32), (sum(LENGTHS_K), 1, 32))

    def results() -> list[torch.Tensor]:
        found = []
        for inputs, more in (
            (dense, ()), (flat, (packed(LENGTHS), packed(LENGTHS_K), 40, 50)),
        ):  # fmt: skip
            own = leaves(*inputs)
            run = flash_attention_varlen if more else flash_attention
            out = run(*own, *more, dropout_p=0.2, seed=seed)
            out.sum().backward()
            found += [out, *(t.grad for t in own)]
        return found

    expected, grids = results(), []
    launched = launchers.launch

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
        grids.append(grid)
        launched(kernel, grid, *args, **config)

    monkeypatch.setattr(launchers, "MAX_GRID", 2)
    monkeypatch.setattr(launchers, "launch", launch)
    for ours, before in zip(results(), expected, strict=True):
        assert torch.equal(ours, before)
    assert all(size <= 2 for grid in grids for size in grid[1:])
    with pytest.raises(ValueError, match="at most 2 heads"):
        flash_attention(*tensors(*[(1, 3, 4, 32)] * 3))
