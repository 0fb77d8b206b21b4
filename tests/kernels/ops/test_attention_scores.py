"""What shapes attention's scores: windows, softcap, ALiBi; and heads of any supported width."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker_kernels import flash_attention, flash_attention_varlen
from stoker_kernels.ops.attention.reference import Options
from tests.kernels._numerics import assert_close, leaves, poison_empty

NAMES = ("out", "lse", "dq", "dk", "dv")
SLOPES = (0.5, 0.1)


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the whole matrix of scores, masked."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    behind = torch.arange(rows)[:, None] + (columns - rows) - torch.arange(columns)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * behind.abs()
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if causal:
        hidden |= behind < 0
    if window is not None:
        hidden |= behind.abs() >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp() @ v, lse


def compare(lengths: tuple[int, int], dims: tuple[int, int], causal: bool, **options: Any) -> None:
    """Output, lse and gradients, also lse's, against fp64; 2 query heads share a key head."""
    (rows, columns), (dim, v_dim) = lengths, dims
    inputs = [torch.randn(1, 2, rows, dim), torch.randn(1, 1, columns, dim)]
    inputs.append(torch.randn(1, 1, columns, v_dim))
    dout, dlse = torch.randn(1, 2, rows, v_dim), torch.randn(1, 2, rows)
    results = []
    for dtype, ours in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        own = leaves(*inputs, dtype=dtype)
        if ours:
            out, lse = flash_attention(*own, causal=causal, return_lse=True, **options)
        else:
            out, lse = textbook(*own, causal, **options)
        empty = lse.isinf()
        kept = lse.masked_fill(empty, 0.0)
        ((out * dout.to(dtype)).sum() + (kept * dlse.to(dtype)).sum()).backward()
        results.append((out, kept, *(t.grad for t in own), empty))
    assert torch.equal(results[0][-1], results[2][-1])
    for name, kernel, witness, oracle in zip(NAMES, *(r[:-1] for r in results), strict=True):
        assert_close(kernel, witness, oracle, name, 60.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(70, 70), (33, 90), (90, 33)])
@pytest.mark.parametrize("window", [1, 7, 40, 2**31 - 1])
def test_window(
    backend: str,
    window: int,
    lengths: tuple[int, int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Narrower and wider than a tile; 90 rows on 33 columns leave rows that see nothing."""
    poison_empty(monkeypatch)
    compare(lengths, (32, 32), causal, window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(45, 45), (17, 70), (70, 17)])
def test_softcap_and_alibi(backend: str, lengths: tuple[int, int], causal: bool) -> None:
    compare(lengths, (32, 32), causal, softcap=2.0)
    compare(lengths, (32, 32), causal, alibi_slopes=torch.tensor(SLOPES))
    compare(
        lengths, (32, 32), causal, window=20, softcap=3.0, alibi_slopes=torch.tensor(SLOPES)
    )  # fmt: skip


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (256, 256), (32, 64)])
def test_head_dims(backend: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    compare((35, 35), dims, True)
    compare((9, 40), dims, False, window=11)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_outside_the_window_are_not_loaded(interpreter: None, causal: bool) -> None:
    """NaN in rows and columns that the middle ones do not see: reading them, even to mask, would show."""
    inputs = [torch.randn(1, 2, 256, 32) for _ in range(4)]
    for tensor in inputs:
        tensor[:, :, :32], tensor[:, :, 224:] = float("nan"), float("nan")
    *qkv, dout = leaves(*inputs)
    out = flash_attention(*qkv, causal=causal, window=16)
    out.backward(dout.detach())
    for tensor in (out, *(t.grad for t in qkv)):
        assert tensor[:, :, 96:160].isfinite().all()


def test_packed_windows_stay_in_their_sequence(backend: str) -> None:
    lengths = (5, 40, 0, 33)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slopes = torch.tensor(SLOPES)
    q, k, v = leaves(torch.randn(78, 2, 32), torch.randn(78, 1, 32), torch.randn(78, 1, 64))
    dout = torch.randn(78, 2, 64)
    flash_attention_varlen(
        q, k, v, ends, ends, 40, 40, window=9, softcap=4.0, alibi_slopes=slopes
    ).backward(dout)
    singles = leaves(q, k, v)
    at = 0
    for length in lengths:
        parts = [t[at : at + length].transpose(0, 1)[None] for t in singles]
        if length:
            out = flash_attention(*parts, window=9, softcap=4.0, alibi_slopes=slopes)
            out.backward(dout[at : at + length].transpose(0, 1)[None])
        at += length
    for packed, single in zip((q, k, v), singles, strict=True):
        torch.testing.assert_close(packed.grad, single.grad)


def test_padding_on_either_side_by_packing(backend: str) -> None:
    """A key padding mask: the real tokens, wherever they lie in their rows, packed; then scattered back."""
    mask = torch.tensor([[False] * 5 + [True] * 12, [True] * 17, [True] * 9 + [False] * 8])
    q, k, v = (torch.randn(3, 17, 2, 32) for _ in range(3))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    packed = flash_attention_varlen(q[mask], k[mask], v[mask], ends, ends, 17, 17)
    out = torch.zeros_like(q)
    out[mask] = packed
    for row, real in enumerate(mask):
        alone = [t[row, real].transpose(0, 1)[None] for t in (q, k, v)]
        expected, _ = textbook(*(t.double() for t in alone), True)
        torch.testing.assert_close(
            out[row, real].double(), expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5
        )


def test_a_prefix_is_more_keys_than_queries(backend: str) -> None:
    """Prefix tuning: 6 learnt keys and values in front, seen by every row, with their gradients."""
    q, k, v = (torch.randn(1, 2, 20, 32) for _ in range(3))
    prefix = leaves(torch.randn(1, 2, 6, 32), torch.randn(1, 2, 6, 32))
    wide = leaves(*prefix, dtype=torch.float64)
    for (pk, pv), dtype, run in (
        (prefix, torch.float32, lambda *t: flash_attention(*t)),
        (wide, torch.float64, lambda *t: textbook(*t, True)[0]),
    ):
        keys, values = torch.cat([pk, k.to(dtype)], 2), torch.cat([pv, v.to(dtype)], 2)
        run(q.to(dtype), keys, values).square().sum().backward()
    for ours, oracle in zip(prefix, wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), oracle.grad, rtol=1e-4, atol=1e-5)


def test_gradcheck_opcheck_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"window": 3, "softcap": 2.0, "alibi_slopes": torch.tensor(SLOPES)}
    inputs = leaves(torch.randn(1, 2, 7, 64), torch.randn(1, 1, 7, 64), torch.randn(1, 1, 7, 32))
    whole = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(*inputs, **options), flash_attention(*inputs, **options))
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    plain = Options(0.2, True, **options)
    torch.library.opcheck(
        torch.ops.stoker.attention_fwd.default, (*(t.detach() for t in inputs), *plain)
    )
    small = leaves(*(t[:, :, :3] for t in inputs), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: flash_attention(*t, **options), small)


def test_errors() -> None:
    q = torch.randn(1, 2, 4, 32)
    slopes = torch.ones(2)
    for options, text in (
        ({"window": 0}, "window is 0"),
        ({"window": 2**31}, r"window must be 1 to 2\^31 - 1"),
        ({"window": -1}, "window must be"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"softcap": float("inf")}, "softcap must be positive"),
        ({"alibi_slopes": torch.ones(3)}, "one per query head"),
        ({"alibi_slopes": slopes.double()}, "float32"),
        ({"alibi_slopes": slopes.clone().requires_grad_()}, "get no gradient"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_attention(q, q, q, **options)
