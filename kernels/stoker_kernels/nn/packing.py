"""Sequences of different lengths in one row of tokens: where each begins, and each token's position."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """T tokens that belong to several sequences; attention stays within each.

    ``cu_seqlens`` (sequences + 1,) int32 holds the first token of each and T at the end; ``max_seqlen``
    bounds their lengths; ``positions`` (T,) int64 counts from 0 in each. Built without waiting for the
    device: shapes depend on the caller's numbers only, so a CUDA graph can hold it.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: torch.Tensor
    segments: torch.Tensor  # (T,) int64: the sequence that a token belongs to

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> Packing:
        """Pack by the boundaries of sequences that fill ``tokens`` tokens, none longer than max_seqlen."""
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"Packing: cu_seqlens must be 1-d int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
            )
        place = torch.arange(tokens, device=cu_seqlens.device)  # (T,)
        long = cu_seqlens.long()
        segments = torch.bucketize(place, long[1:], right=True)  # empty sequences are passed over
        return cls(cu_seqlens.to(torch.int32), max_seqlen, place - long[segments], segments)

    @classmethod
    def padded(cls, lengths: torch.Tensor, seq_len: int) -> Packing:
        """Lay out a padded batch (B, S) as B * S tokens: ``lengths`` (B,) of each row are real.

        The padding of each row is a sequence of its own, so nothing real sees it.
        """
        start = torch.arange(len(lengths), device=lengths.device) * seq_len  # (B,)
        edges = torch.stack([start, start + lengths], 1).flatten()  # (2 B,)
        total = edges.new_full((1,), len(lengths) * seq_len)
        return cls.of(torch.cat([edges, total]), len(lengths) * seq_len, seq_len)

    def mask(self, causal: bool) -> torch.Tensor:
        """Return (T, T) bool, true where a row may look: what PyTorch's attention needs."""
        return self.sees(self, causal)

    def sees(self, columns: Packing, causal: bool) -> torch.Tensor:
        """Return (T, T_k) bool: a row of this sees the columns of the same sequence in the other.

        Causal: up to its own, where a sequence's last row is its last column's.
        """
        allowed = self.segments[:, None] == columns.segments[None, :]
        return allowed & (self.distance(columns) <= 0) if causal else allowed

    def distance(self, columns: Packing) -> torch.Tensor:
        """Return column - row, (T, T_k) int64, of positions whose sequences end together."""
        longer = columns.cu_seqlens.diff() - self.cu_seqlens.diff()  # (sequences,)
        return columns.positions - (self.positions + longer[self.segments])[:, None]

    def with_prefix(self, length: int) -> Packing:
        """Return the packing of the same sequences with ``length`` more tokens before each."""
        count = len(self.cu_seqlens) - 1
        more = torch.arange(count + 1, device=self.cu_seqlens.device) * length
        total = len(self.positions) + count * length
        return Packing.of(self.cu_seqlens + more, total, self.max_seqlen + length)
