"""Attention under a mask of real tokens: the real ones are packed, attended to, and laid out again.

Nothing waits for the device and no shape depends on the mask, so torch.compile and CUDA graphs can hold it:
packed tensors keep the length of the padded ones, and what lies behind the last sequence is skipped.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch

from stoker_kernels.ops.attention.autograd import Keywords, flash_attention_varlen


class Unpadding(NamedTuple):
    """Places of the real tokens of a padded batch (B, S); :meth:`of` reads them from a mask."""

    places: torch.Tensor  # (B * S,) int64: real tokens in order, then the padding
    inverse: torch.Tensor  # (B * S,) int64: where each token has gone
    cu_seqlens: torch.Tensor  # (B + 1,) int32

    @classmethod
    def of(cls, mask: torch.Tensor) -> Unpadding:
        """Read mask (B, S), bool or 0 and 1, true where a token is real: on either side, or anywhere."""
        if mask.ndim != 2:
            raise ValueError(f"Unpadding: mask must be (B, S), got {tuple(mask.shape)}")
        mask = mask.bool()
        places = torch.argsort((~mask).flatten().to(torch.uint8), stable=True)
        inverse = torch.empty_like(places).scatter_(
            0, places, torch.arange(len(places), device=mask.device)
        )
        ends = mask.sum(1).cumsum(0).to(torch.int32)
        return cls(places, inverse, torch.cat([ends.new_zeros(1), ends]))

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (B, S, ...) -> (B * S, ...): real tokens first, sequence after sequence."""
        return x.flatten(0, 1).index_select(0, self.places)

    def pad(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """Invert :meth:`unpad`: (B * S, ...) -> (B, S, ...)."""
        return x.index_select(0, self.inverse).unflatten(0, (batch, -1))


def flash_attention_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    **options: Unpack[Keywords],
) -> torch.Tensor:
    """Attend to the keys of mask (B, S_k) alone, bool or 0 and 1, true at real tokens, wherever they lie.

    q (B, H, S_q, D), k, v and the result as :func:`flash_attention`'s, and so are ``options``. The rows are
    the last S_q of the S_k tokens, so S_q <= S_k, where ``causal``; rows of padding are zero then, and get no
    gradient. Without ``causal`` (an encoder, or a decoder that looks at it) all rows are real. A sequence
    without a real key gives zero. Distances (window, ALiBi, relative bias, prefix) count real tokens alone:
    padding in front or behind changes none of them. Costs a copy of q, k, v and the result.
    """
    name = "flash_attention_padded"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"{name}: q, k and v must be (B, H, S, D), got {tuple(q.shape)}")
    batch, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    if mask.shape != (batch, columns):
        raise ValueError(f"{name}: mask must be {(batch, columns)}, got {tuple(mask.shape)}")
    causal = options.get("causal", True)
    if causal and rows > columns:
        raise ValueError(
            f"{name}: {rows} rows cannot be the last of {columns} tokens: pass causal=False"
        )
    keys = queries = Unpadding.of(mask)
    k, v = (keys.unpad(t.transpose(1, 2)) for t in (k, v))
    if causal:
        if rows < columns:
            queries = Unpadding.of(mask[:, columns - rows :])
        packed = queries.unpad(q.transpose(1, 2))
        ends = queries.cu_seqlens
    else:
        packed = q.transpose(1, 2).flatten(0, 1)
        ends = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
    out = flash_attention_varlen(
        packed, k, v, ends, keys.cu_seqlens, rows, columns, return_lse=False, **options
    )  # (B * S_q, H, D)
    out = queries.pad(out, batch) if causal else out.unflatten(0, (batch, rows))
    return out.transpose(1, 2)
