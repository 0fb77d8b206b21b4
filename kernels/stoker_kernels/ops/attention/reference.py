"""Attention in PyTorch: the specification.

Per query head, in fp32 (fp64 for fp64 inputs), with S_q queries and S_k keys:
    s = scale * q k^T, causal: masked to column <= row + S_k - S_q;  lse = log(sum(exp(s)))
    p = exp(s - lse);  a = keep * p / (1 - dropout_p);  o = a v
    dv = a^T do;  dp = keep * (do v^T) / (1 - dropout_p);  delta = sum(do * o) - dlse
    ds = p * (dp - delta);  dq = scale * ds k;  dk = scale * ds^T q
(Dao 2023, "FlashAttention-2", section 2.) A row with nothing to attend has o = 0, lse = -inf and no
gradient; so has a packed row behind the last sequence. With a softcap s is softcap * tanh(s / softcap)
(Gemma 2); alibi_slopes (H,) then subtract slope * |row + S_k - S_q - column| (Press et al., arXiv
2108.12409), and a bias is added: dense (b, h, S_q, S_k), b 1 or B, h 1 or H, or T5's (see ``relative``), by
the bucket of column - row - S_k + S_q, clipped to max_distance. Their gradients are p (dp - delta),
summed over what shares a number. A window w leaves the columns with |row + S_k - S_q - column| < w; under
a prefix of P columns all rows see those too; a block mask leaves its blocks (``blocks``). Query head h
reads key head h // (H / H_kv); dk, dv sum over the query heads of their group.

Dropout's keep is ``philox.keep_mask``: element (r, column) of a mask with ``columns`` columns, where r is
the row's flat index in lse, (B, H, S_q) or packed (H, T_q), so r = (batch * H + head) * S_q + row or
r = head * T_q + packed row; columns = S_k, or max_seqlen_k when packed.

Dense outputs and gradients are (B, H, S, D) views of (B, S, H, D) memory, so that a model's
``transpose(1, 2).reshape(B, S, H * D)`` copies nothing; packed ones are (T, H, D).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from stoker_kernels.ops.attention.blocks import dense_blocks
from stoker_kernels.primitives import philox
from stoker_kernels.runtime.backend import compute_dtype


class Options(NamedTuple):
    """The options of a call. Packed sequences have cu_seqlens, (B + 1,) offsets; dense ones None and 0."""

    scale: float
    causal: bool = True
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # (1 or B, 1 or H, S_q, S_k)
    relative_table: torch.Tensor | None = None  # (num_buckets, H)
    relative_buckets: torch.Tensor | None = None  # (2 max_distance + 1,) int32
    prefix_lengths: torch.Tensor | None = None  # (B,) int32
    kv_num_blocks: torch.Tensor | None = None  # this and the next five: a ``blocks.BlockMask``
    kv_indices: torch.Tensor | None = None
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    block_size_q: int = 0
    block_size_k: int = 0

    @property
    def threshold(self) -> int:
        """Dropout probability in 2^-16ths."""
        return philox.threshold_of(self.dropout_p, "dropout_p")

    @property
    def keep_scale(self) -> float:
        """The factor of kept probabilities; 0 where none is kept."""
        return philox.keep_scale_of(self.dropout_p)

    @property
    def scored(self) -> bool:
        """Whether anything but the causal diagonal shapes the scores."""
        tensors = (
            self.alibi_slopes, self.bias, self.relative_table, self.prefix_lengths, self.kv_indices,
        )  # fmt: skip
        return bool(self.window or self.softcap or any(tensor is not None for tensor in tensors))

    @property
    def packed(self) -> bool:
        """Whether several sequences lie in one row of tokens."""
        return self.cu_seqlens_q is not None


def bias_of(options: Options) -> torch.Tensor:
    """Return what the bias is made of, dense or T5's table. Raises ``ValueError`` where there is none."""
    bias = options.relative_table if options.bias is None else options.bias
    if bias is None:
        raise ValueError(
            "attention_biased_bwd: bias and relative_table are None: call attention_bwd"
        )
    return bias


Slices = list[tuple[slice, slice]]


def new_like(tensor: torch.Tensor, head_dim: int = 0) -> torch.Tensor:
    """Return an output shaped as ``tensor``: packed (T, H, D), or a (B, H, S, D) view of (B, S, H, D).

    ``head_dim`` replaces D where it is given.

    A packed one is zero: no program writes the rows behind the last sequence.
    """
    if tensor.ndim == 3:
        return tensor.new_zeros((*tensor.shape[:2], head_dim or tensor.shape[2]))
    batch, heads, seq_len, own_dim = tensor.shape
    head_dim = head_dim or own_dim
    return tensor.new_empty((batch, seq_len, heads, head_dim)).transpose(1, 2)


def sequence_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same (B, H, S, D) values over contiguous (B, S, H, D) memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _dense(tensor: torch.Tensor, packed: bool) -> torch.Tensor:
    """Map (T, H, D) -> (1, H, T, D); dense tensors as they are."""
    return tensor.transpose(0, 1)[None] if packed else tensor


def _stored(tensor: torch.Tensor, like: torch.Tensor, packed: bool) -> torch.Tensor:
    """Invert ``_dense``, in the dtype and layout of an output."""
    tensor = tensor.to(like.dtype)
    return tensor[0].transpose(0, 1).contiguous() if packed else sequence_major(tensor)


def _sequences(options: Options, rows: int, columns: int) -> Slices:
    """Return the rows and columns of each sequence; one of all where nothing is packed."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return [(slice(0, rows), slice(0, columns))]
    ends_q, ends_k = options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist()
    for name, ends, total in (("q", ends_q, rows), ("k", ends_k, columns)):
        if ends[0] != 0 or ends[-1] > total or sorted(ends) != ends:
            raise ValueError(
                f"flash_attention_varlen: cu_seqlens_{name} must rise from 0 to at most {total}, "
                f"got {ends}"
            )
    pairs_q, pairs_k = list(pairwise(ends_q)), list(pairwise(ends_k))
    longest_q, longest_k = (max((b - a for a, b in p), default=0) for p in (pairs_q, pairs_k))
    if longest_q > options.max_seqlen_q or longest_k > options.max_seqlen_k:
        raise ValueError(
            f"flash_attention_varlen: max_seqlen_q and max_seqlen_k are {options.max_seqlen_q} and "
            f"{options.max_seqlen_k}, but the longest sequences have {longest_q} and {longest_k}"
        )
    return [(slice(*a), slice(*b)) for a, b in zip(pairs_q, pairs_k, strict=True)]


def _keep(options: Options, shape: torch.Size, columns: int) -> torch.Tensor | None:
    """Return the dropout mask (*shape of lse, columns), or None without dropout."""
    if options.seed is None:
        return None
    columns = options.max_seqlen_k if options.packed else columns
    return philox.keep_mask(options.seed, shape.numel(), columns, options.threshold).view(
        *shape, columns
    )


def _distance_buckets(options: Options, rows: int, columns: int) -> torch.Tensor:
    """Return the bucket of each score, (rows, columns) int64."""
    buckets = options.relative_buckets
    assert buckets is not None
    reach = len(buckets) // 2
    row = torch.arange(rows, device=buckets.device)[:, None] + (columns - rows)
    distance = torch.arange(columns, device=buckets.device) - row
    return buckets[distance.clamp(-reach, reach) + reach].long()


def _bias(q: torch.Tensor, columns: int, options: Options) -> torch.Tensor | None:
    """Return what is added to the scores, broadcastable to (B, Hkv, G, Sq, Sk), or None."""
    if options.bias is not None:
        bias = options.bias.to(q.dtype)
        return bias[:, :, None] if bias.shape[1] == 1 else grouped(bias, q.shape[2])
    if options.relative_table is not None:
        table = options.relative_table.to(q.dtype)
        chosen = table[_distance_buckets(options, q.shape[3], columns)]  # (Sq, Sk, H)
        return grouped(chosen.permute(2, 0, 1)[None], q.shape[2])
    return None


def _bias_gradient(ds: torch.Tensor, options: Options) -> torch.Tensor:
    """Map the scores' gradient (B, Hkv, G, Sq, Sk) -> that of the bias, or of the table of buckets."""
    ds = ds.flatten(1, 2)
    if options.bias is not None:
        shared = [dim for dim in (0, 1) if options.bias.shape[dim] == 1]
        return ds.sum(shared, keepdim=True) if shared else ds
    assert options.relative_table is not None
    chosen = _distance_buckets(options, *ds.shape[-2:]).flatten()
    table = ds.new_zeros(options.relative_table.shape)
    return table.index_add_(0, chosen, ds.sum(0).flatten(1).T)


def _hidden(q: torch.Tensor, columns: int, options: Options, sequence: int) -> torch.Tensor | None:
    """Return where scores are left out, broadcastable to (B, Hkv, G, Sq, Sk), or None."""
    rows = q.shape[3]
    behind = torch.arange(rows, device=q.device)[:, None] + (columns - rows)
    column = torch.arange(columns, device=q.device)
    behind = behind - column
    hidden: torch.Tensor | None = behind < 0 if options.causal else None
    if options.prefix_lengths is not None:
        assert hidden is not None
        lengths = options.prefix_lengths
        lengths = lengths[sequence][None] if options.packed else lengths  # (B,)
        hidden = hidden & (column >= lengths[:, None, None, None, None])
    if options.window:
        outside = behind.abs() >= options.window
        hidden = outside if hidden is None else hidden | outside
    if options.kv_num_blocks is not None and options.kv_indices is not None:
        blocks = dense_blocks(options.kv_num_blocks, options.kv_indices)  # (b, h, R, C)
        blocks = blocks.repeat_interleave(options.block_size_q, 2)[:, :, :rows]
        outside = ~blocks.repeat_interleave(options.block_size_k, 3)[:, :, :, :columns]
        outside = outside[:, :, None] if outside.shape[1] == 1 else grouped(outside, q.shape[2])
        hidden = outside if hidden is None else hidden | outside
    return hidden


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, options: Options, sequence: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Map q (B, Hkv, G, Sq, D), k (B, Hkv, 1, Sk, D), wide -> p (B, Hkv, G, Sq, Sk), lse, cap's slope.

    ``sequence`` counts packed ones.
    """
    rows, columns = q.shape[3], k.shape[3]
    scores, inner = q @ k.mT * options.scale, None
    if options.softcap:
        tangent = torch.tanh(scores / options.softcap)
        scores, inner = tangent * options.softcap, 1 - tangent * tangent
    if options.alibi_slopes is not None:
        row = torch.arange(rows, device=q.device)[:, None] + (columns - rows)
        distance = (row - torch.arange(columns, device=q.device)).abs().to(q.dtype)
        slopes = options.alibi_slopes.to(q.dtype).view(1, q.shape[1], q.shape[2], 1, 1)
        scores = scores - slopes * distance
    bias = _bias(q, columns, options)
    if bias is not None:
        scores = scores + bias
    hidden = _hidden(q, columns, options, sequence)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]), lse, inner


def grouped(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Map (B, H, ...) -> (B, H / group, group, ...)."""
    return tensor.unflatten(1, (tensor.shape[1] // group, group))


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map q (B, H, Sq, D), k, v (B, Hkv, Sk, D) -> out like q, lse (B, H, Sq) in the compute dtype.

    Packed: q (T, H, D), k, v (Tk, Hkv, D) -> out like q, lse (H, T). Raises ``ValueError`` for
    cu_seqlens that do not fit.
    """
    dtype, packed = compute_dtype(q.dtype), options.packed
    wide_q, wide_k, wide_v = (_dense(t, packed).to(dtype) for t in (q, k, v))
    out = wide_q.new_zeros((*wide_q.shape[:3], v.shape[-1]))
    lse = wide_q.new_full(wide_q.shape[:3], float("-inf"))
    keep = _keep(options, lse.shape, wide_k.shape[2])
    group = wide_q.shape[1] // max(wide_k.shape[1], 1)
    sequences = _sequences(options, wide_q.shape[2], wide_k.shape[2])
    for number, (rows, columns) in enumerate(sequences):
        part = grouped(wide_q[:, :, rows], group)
        p, part_lse, _ = _probabilities(part, wide_k[:, :, None, columns], options, number)
        if keep is not None:
            p = p * grouped(keep[:, :, rows, : p.shape[-1]], group) * options.keep_scale
        out[:, :, rows] = (p @ wide_v[:, :, None, columns]).flatten(1, 2)
        lse[:, :, rows] = part_lse.flatten(1, 2)
    return _stored(out, q, packed), lse[0] if packed else lse


def attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    biased: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients dq, dk, dv, shaped as q, k, v; dout like out, dlse like lse.

    With ``biased`` also that of the bias or of the table of buckets, whichever there is, in its dtype.
    """
    dtype, packed = lse.dtype, options.packed
    wide_q, wide_k, wide_v = (_dense(t, packed).to(dtype) for t in (q, k, v))
    wide_dout, wide_out = _dense(dout, packed).to(dtype), _dense(out, packed).to(dtype)
    delta = (wide_dout * wide_out).sum(-1)  # (B, H, Sq)
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape)
    delta = delta.masked_fill(lse.reshape(delta.shape) == float("-inf"), 0.0)[..., None]
    keep = _keep(options, wide_q.shape[:3], wide_k.shape[2])
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    dbias = wide_q.new_zeros(bias_of(options).shape) if biased else None
    group = wide_q.shape[1] // max(wide_k.shape[1], 1)
    sequences = _sequences(options, wide_q.shape[2], wide_k.shape[2])
    for number, (rows, columns) in enumerate(sequences):
        part_q, part_dout = (grouped(t[:, :, rows], group) for t in (wide_q, wide_dout))
        part_k, part_v = (t[:, :, None, columns] for t in (wide_k, wide_v))
        p, _, inner = _probabilities(part_q, part_k, options, number)
        dp, dropped_p = part_dout @ part_v.mT, p
        if keep is not None:
            part_keep = grouped(keep[:, :, rows, : p.shape[-1]], group) * options.keep_scale
            dp, dropped_p = dp * part_keep, p * part_keep
        ds = p * (dp - grouped(delta[:, :, rows], group))
        if dbias is not None:
            dbias += _bias_gradient(ds, options)
        ds = ds * options.scale
        if inner is not None:
            ds = ds * inner
        dq[:, :, rows] = (ds @ part_k).flatten(1, 2)
        dk[:, :, columns] = (ds.mT @ part_q).sum(2)
        dv[:, :, columns] = (dropped_p.mT @ part_dout).sum(2)
    found = _stored(dq, q, packed), _stored(dk, k, packed), _stored(dv, v, packed)
    return found if dbias is None else (*found, dbias.to(bias_of(options).dtype))
