"""What shapes attention's scores: windows, softcap, ALiBi, biases, prefixes, block masks, head widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stoker_kernels import (
    BlockMask,
    RelativeBias,
    flash_attention,
    flash_attention_padded,
    flash_attention_varlen,
)
from stoker_kernels.ops.attention.blocks import dense_blocks
from stoker_kernels.ops.attention.reference import Options
from stoker_kernels.ops.attention.relative import distance_buckets, relative_buckets
from tests.kernels._numerics import assert_close, leaves, poison_empty

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
SLOPES = (0.5, 0.1)


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    prefix_lengths: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
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
    if bias is not None:
        scores = scores + bias
    if relative_bias is not None:
        table, ways, reach, _ = relative_bias
        scores = scores + table[relative_buckets(-behind, len(table), ways, reach)].permute(2, 0, 1)
    hidden = torch.zeros(1, 1, rows, columns, dtype=torch.bool)
    if causal:
        hidden = hidden | (behind < 0)
    if prefix_lengths is not None:
        hidden = hidden & (torch.arange(columns) >= prefix_lengths[:, None, None, None])
    if window is not None:
        hidden = hidden | (behind.abs() >= window)
    if block_mask is not None:
        listed = dense_blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
        for dim, size in enumerate(block_mask.block_size, 2):
            listed = listed.repeat_interleave(size, dim)
        hidden = hidden | ~listed[:, :, :rows, :columns]
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp() @ v, lse


def compare(
    lengths: tuple[int, int], dims: tuple[int, int], causal: bool, batch: int = 1, **options: Any
) -> None:
    """Output, lse and gradients, also lse's and biases', against fp64; 2 query heads share a key head."""
    (rows, columns), (dim, v_dim) = lengths, dims
    inputs = [torch.randn(batch, 2, rows, dim), torch.randn(batch, 1, columns, dim)]
    inputs.append(torch.randn(batch, 1, columns, v_dim))
    dout, dlse = torch.randn(batch, 2, rows, v_dim), torch.randn(batch, 2, rows)
    relative = options.get("relative_bias")
    learnt = relative.table if relative is not None else options.get("bias")
    inputs += [] if learnt is None else [learnt]
    results = []
    for dtype, ours in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        own = leaves(*inputs, dtype=dtype)
        if relative is not None:
            options["relative_bias"] = relative._replace(table=own[3])
        elif learnt is not None:
            options["bias"] = own[3]
        if ours:
            out, lse = flash_attention(*own[:3], causal=causal, return_lse=True, **options)
        else:
            out, lse = textbook(*own[:3], causal, **options)
        empty = lse.isinf()
        kept = lse.masked_fill(empty, 0.0)
        ((out * dout.to(dtype)).sum() + (kept * dlse.to(dtype)).sum()).backward()
        results.append((out, kept, *(t.grad for t in own), empty))
    assert torch.equal(results[0][-1], results[2][-1])
    for name, kernel, witness, oracle in zip(NAMES, *(r[:-1] for r in results), strict=False):
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


@pytest.mark.parametrize(("lengths", "causal"), [((40, 70), False), ((70, 40), True)])
def test_biases(
    backend: str, lengths: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense, of each sequence and head, shared, and by column alone; T5's in both its forms."""
    poison_empty(monkeypatch)
    rows, columns = lengths
    compare(lengths, (32, 64), causal, 2, bias=torch.randn(2, 2, rows, columns))
    compare(lengths, (32, 32), causal, 2, bias=torch.randn(2, rows, columns), softcap=2.0)
    compare(lengths, (32, 32), causal, 2, bias=torch.randn(2, 1, 1, columns), window=20)
    compare(lengths, (32, 32), causal, 2, relative_bias=RelativeBias(torch.randn(8, 2), True, 20))
    compare(
        lengths, (32, 32), causal, 2, window=25,
        relative_bias=RelativeBias(torch.randn(6, 2), False, 12),
    )  # fmt: skip


def test_a_bias_of_minus_infinity_hides(backend: str) -> None:
    """A column, and a whole row, which is zero then; no gradient is NaN."""
    q, k, v = leaves(*(torch.randn(1, 2, 40, 32) for _ in range(3)))
    bias = torch.zeros(1, 1, 40, 40)
    bias[..., 33], bias[..., 7, :] = float("-inf"), float("-inf")
    bias.requires_grad_()
    out, lse = flash_attention(q, k, v, bias=bias, causal=False, return_lse=True)
    out.sum().backward()
    assert torch.equal(out[:, :, 7], torch.zeros(1, 2, 32))
    assert (lse[:, :, 7] == float("-inf")).all()
    assert torch.equal(q.grad[:, :, 7], torch.zeros(1, 2, 32))
    assert torch.equal(k.grad[:, :, 33], torch.zeros(1, 2, 32))
    assert all(t.grad.isfinite().all() for t in (q, k, v, bias))


@pytest.mark.parametrize("ways", [True, False])
def test_buckets_are_t5_s(ways: bool) -> None:
    """One distance each up to half of them, then geometric steps up to 128 (Raffel et al. 2020)."""
    buckets = distance_buckets(32, ways, 128)  # of -128 .. 128
    behind = buckets[:129].flip(0).tolist()
    exact, count = (8, 16) if ways else (16, 32)
    assert behind[:exact] == list(range(exact))
    edges = [distance for distance in range(1, 129) if behind[distance] != behind[distance - 1]]
    grown = [exact * (128 / exact) ** (i / (count - exact)) for i in range(count - exact)]
    assert edges[exact - 1 :] == [math.ceil(distance - 1e-9) for distance in grown]
    assert behind[128] == count - 1
    ahead = buckets[129:].tolist()
    assert ahead == ([b + 16 for b in behind[1:]] if ways else [0] * 128)


@pytest.mark.parametrize("lengths", [(40, 40), (70, 33), (33, 70)])
def test_prefix(backend: str, lengths: tuple[int, int]) -> None:
    """Each sequence has its own: none, within a tile, of whole tiles, longer than the keys."""
    for prefix in ((0, 25), (32, 200)):
        compare(lengths, (32, 32), True, 2, prefix_lengths=torch.tensor(prefix, dtype=torch.int32))


@pytest.mark.parametrize("causal", [True, False])
def test_block_mask(backend: str, causal: bool) -> None:
    """Random blocks for each sequence and head, some rows with none; and a function's, with T5's bias."""
    for size in ((32, 16), (16, 64)):
        blocks = torch.rand(2, 2, -(-70 // size[0]), -(-90 // size[1])) < 0.5
        blocks[0, :, 0] = False
        compare((70, 90), (32, 32), causal, 2, block_mask=BlockMask.from_dense(blocks, size))
    band = BlockMask.from_function(
        lambda _, __, row, column: (row - column).abs() < 2, 1, 1, 70, 70, (32, 32)
    )
    table = RelativeBias(torch.randn(8, 2), True, 20)
    compare((70, 70), (32, 32), causal, 2, block_mask=band, relative_bias=table)


def test_blocks_outside_the_lists_are_not_loaded(interpreter: None) -> None:
    """All of the second of 4 blocks is NaN: reading it for another, even to mask it, would show."""
    length = 128
    blocks = torch.eye(4, dtype=torch.bool)
    blocks[1, 1] = False
    blocks[3, 0] = blocks[2, 3] = True
    mask = BlockMask.from_dense(blocks, (32, 32))
    assert int(mask.kv_num_blocks.sum()) == int(mask.q_num_blocks.sum()) == 5  # of 16
    inputs = [torch.randn(1, 2, length, 32) for _ in range(4)]
    for tensor in inputs:
        tensor[:, :, 32:64] = float("nan")
    *qkv, dout = leaves(*inputs)
    table = torch.randn(8, 2, requires_grad=True)
    out = flash_attention(
        *qkv, causal=False, block_mask=mask, relative_bias=RelativeBias(table, max_distance=20)
    )
    assert torch.equal(out[:, :, 32:64], torch.zeros(1, 2, 32, 32))
    out[:, :, :32].backward(dout[:, :, :32].detach(), retain_graph=True)
    out[:, :, 64:].backward(dout[:, :, 64:].detach())
    sound = torch.ones(length, dtype=torch.bool)
    sound[32:64] = False
    for tensor in (out, *(t.grad for t in qkv)):
        assert tensor[:, :, sound].isfinite().all()
    assert table.grad.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_padded(backend: str, causal: bool) -> None:
    """Real tokens behind, in front, around a gap, and none at all."""
    mask = torch.ones(4, 20)
    mask[0, :6], mask[1, 9:], mask[2, 4:9], mask[3] = 0, 0, 0, 0
    q, k, v = leaves(torch.randn(4, 2, 20, 32), *(torch.randn(4, 1, 20, 32) for _ in range(2)))
    out = flash_attention_padded(q, k, v, mask, causal=causal)
    out.square().sum().backward()
    wide = leaves(q, k, v, dtype=torch.float64)
    bias = torch.zeros(4, 1, 1, 20).double().masked_fill(mask[:, None, None] == 0, -1e30)
    real = mask.bool() if causal else torch.ones(4, 20, dtype=torch.bool)
    real[3] = False
    plain = textbook(*wide, causal, bias=bias)[0].transpose(1, 2)
    finite = plain[real]
    finite.square().sum().backward()
    ours = out.transpose(1, 2)
    assert_close(ours[real], finite.float(), finite, "out", 20.0)
    assert torch.equal(ours[~real], torch.zeros_like(ours[~real]))
    for name, a, b in zip("qkv", (q, k, v), wide, strict=True):
        assert_close(a.grad, b.grad.float(), b.grad, name, 60.0)
    tail = flash_attention_padded(q[:, :, 17:], k, v, mask, causal=causal)
    torch.testing.assert_close(tail[2], out[2, :, 17:])


def test_packed_prefixes_and_tables_stay_in_their_sequence(backend: str) -> None:
    lengths, ends = (5, 40, 0, 33), torch.tensor([0, 5, 45, 45, 78], dtype=torch.int32)
    prefix = torch.tensor([9, 20, 3, 0], dtype=torch.int32)
    inputs = [torch.randn(78, 2, 32), torch.randn(78, 1, 32), torch.randn(78, 1, 32)]
    q, k, v, table = leaves(*inputs, torch.randn(8, 2))
    dout = torch.randn(78, 2, 32)
    bias = RelativeBias(table, max_distance=20)
    flash_attention_varlen(
        q, k, v, ends, ends, 40, 40, prefix_lengths=prefix, relative_bias=bias
    ).backward(dout)
    singles = leaves(q, k, v, table)
    at = 0
    for number, length in enumerate(lengths):
        parts = [t[at : at + length].transpose(0, 1)[None] for t in singles[:3]]
        if length:
            out = flash_attention(
                *parts, prefix_lengths=prefix[number : number + 1],
                relative_bias=RelativeBias(singles[3], max_distance=20),
            )  # fmt: skip
            out.backward(dout[at : at + length].transpose(0, 1)[None])
        at += length
    for packed, single in zip((q, k, v, table), singles, strict=True):
        torch.testing.assert_close(packed.grad, single.grad, rtol=1e-4, atol=1e-5)


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
    table, bias = leaves(torch.randn(4, 2), torch.randn(1, 2, 3, 1), dtype=torch.float64)
    prefix = torch.tensor([2], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda table, *t: flash_attention(
            *t, relative_bias=RelativeBias(table, max_distance=3), prefix_lengths=prefix
        ),
        [table, *small],
    )
    assert torch.autograd.gradcheck(lambda bias, *t: flash_attention(*t, bias=bias), [bias, *small])


def test_errors() -> None:
    q = torch.randn(1, 2, 4, 32)
    slopes, prefix = torch.ones(2), torch.ones(1, dtype=torch.int32)
    mask = BlockMask.from_dense(torch.ones(1, 1) > 0)
    for options, text in (
        ({"window": 0}, "window is 0"),
        ({"window": 2**31}, r"window must be 1 to 2\^31 - 1"),
        ({"window": -1}, "window must be"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"softcap": float("inf")}, "softcap must be positive"),
        ({"alibi_slopes": torch.ones(3)}, "one per query head"),
        ({"alibi_slopes": slopes.double()}, "float32"),
        ({"alibi_slopes": slopes.clone().requires_grad_()}, "get no gradient"),
        ({"bias": torch.ones(2, 3, 4)}, r"bias must broadcast to \(1, 2, 4, 4\)"),
        ({"bias": torch.ones(1), "relative_bias": RelativeBias(torch.ones(8, 2))}, "give one of"),
        ({"relative_bias": RelativeBias(torch.ones(8, 3))}, r"must be \(num_buckets, 2\)"),
        ({"relative_bias": RelativeBias(torch.ones(2, 2))}, "at least 4 buckets"),
        ({"prefix_lengths": torch.ones(1)}, r"must be \(1,\) int32"),
        ({"prefix_lengths": prefix, "window": 3}, "needs causal=True, and no window"),
        ({"block_mask": BlockMask.from_dense(torch.ones(2, 2) > 0)}, r"must be \(1, 1, 1\) int32"),
        ({"block_mask": mask, "bias": torch.ones(1)}, "do not go together"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_attention(q, q, q, **options)
    with pytest.raises(TypeError, match="bias must be floating point"):
        flash_attention(q, q, q, bias=torch.ones(4, 4) > 0)
    with pytest.raises(ValueError, match="two powers of two, 16 or more"):
        BlockMask.from_dense(torch.ones(1, 1) > 0, (16, 24))
    with pytest.raises(ValueError, match=r"mask must be \(1, 4\)"):
        flash_attention_padded(q, q, q, torch.ones(1, 3))
    with pytest.raises(ValueError, match="cannot be the last"):
        flash_attention_padded(q, q[:, :, :3], q[:, :, :3], torch.ones(1, 3))
