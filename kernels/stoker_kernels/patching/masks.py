"""The masks that transformers makes for our attention: bounds of sequences, not a matrix.

:func:`make_layout` is registered as the mask function of ``attn_implementation="stoker"``. A padded batch
stays where it lies: each row of it becomes segments of one packed row (:func:`_edges`), so nothing is copied
and no shape depends on what the mask holds. What is no padding, no window and no packing raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

REMEDY = 'use apply(model, skip={"attention"}), or attn_implementation="sdpa"'
# Their masks are known to be causal, windowed or packed, where torch.compile hides what is asked for.
MODEL_TYPES = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "bert",
        "falcon",
        "mixtral",
    )
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys that each query sees. It goes through a model where its attention mask would.

    ``edges`` are cu_seqlens of queries and keys of the batch laid out as one row; None for a batch without
    padding, whose last query sees the last key. ``window`` as ``flash_attention``'s.
    """

    causal: bool
    window: int | None = None
    edges: tuple[torch.Tensor, torch.Tensor] | None = None
    packed: bool = False

    ndim = 4  # what transformers asks of a mask that is made already

    def to(self, device: Any, *_: Any, **__: Any) -> Layout:
        """Return it on ``device``, as accelerate moves a layer's arguments."""
        if self.edges is None:
            return self
        edges = (self.edges[0].to(device), self.edges[1].to(device))
        return Layout(self.causal, self.window, edges, self.packed)

    def own_keys(self) -> Layout:
        """Return that of self-attention whose padded queries see nothing, as they do where it is causal."""
        if self.edges is None or self.causal or self.packed:
            return self
        keys = self.edges[1]
        _, before, real, _, behind = keys.diff().view(-1, 5).unbind(1)  # as _edges makes them
        none = torch.zeros_like(real)
        sizes = torch.stack([before, none, real, behind, none], 1).flatten()
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
        return Layout(self.causal, self.window, (ends, keys), self.packed)


def make_layout(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> Layout:
    """Describe a mask of ``batch_size`` rows, with the arguments of transformers' mask functions.

    ``attention_mask`` (B, past + S) is true for real tokens, which must be neighbours. Raises ``ValueError``
    for anything else, ``RuntimeError`` for it under ``torch.compile``.
    """
    if isinstance(attention_mask, Layout):  # ``generate`` makes the mask before the model does
        return attention_mask
    compiling = torch.compiler.is_compiling()
    if use_vmap:
        raise ValueError(
            f"attention 'stoker': a mask function of one's own is not supported\n{REMEDY}"
        )
    causal, window, segments = _meaning(mask_function, local_size, config, compiling)
    if compiling and causal and not allow_is_causal_skip and attention_mask is None:
        _refuse_packed(mask_function, batch_size, q_length, device)
    if segments is not None:
        edges = _packed_edges(segments)
        return Layout(causal, window, (edges, edges.clone()), packed=True)
    if attention_mask is None and _ends_together(causal, q_offset, q_length, kv_offset, kv_length):
        return Layout(causal, window)
    columns = torch.arange(kv_length, device=device) + kv_offset
    real = _real(attention_mask, columns, batch_size, compiling)
    if real is None:
        if _ends_together(causal, q_offset, q_length, kv_offset, kv_length):
            return Layout(causal, window)
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    shift = q_offset - kv_offset
    if causal:
        real = real & (torch.arange(kv_length, device=device) < shift + q_length)
    return Layout(causal, window, _edges(real, q_length, shift if causal else None))


def _ends_together(causal: bool, q_offset: Any, q_length: int, kv_offset: Any, keys: int) -> bool:
    """Return whether the last query sees the last key, as attention without bounds has it."""
    if not causal:
        return True
    if isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        return False
    return bool(q_offset + q_length == kv_offset + keys)


def _meaning(
    function: Any, local_size: int | None, config: Any, compiling: bool
) -> tuple[bool, int | None, torch.Tensor | None]:
    """Return what a mask function stands for: causal, window, each token's sequence (B, S)."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return True, None, None
    if function is masking_utils.bidirectional_mask_function:
        return False, None, None
    if compiling:
        if getattr(config, "model_type", None) not in MODEL_TYPES:
            raise ValueError(
                "attention 'stoker': the masks of this model are not known under torch.compile\n"
                + REMEDY
            )
        return True, local_size, None
    parts = list(_parts(function))
    names = [name for name, _ in parts]
    allowed = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
    if "causal_mask_function" not in names or not allowed.issuperset(names):
        odd = next((n for n in names if n not in allowed), names[0])
        raise ValueError(f"attention 'stoker': a mask made by {odd} is not supported\n{REMEDY}")
    found = dict(parts)
    window = found.get("sliding_window_overlay", {}).get("sliding_window")
    return True, window, found.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")


def _parts(function: Any) -> Any:
    """Yield the functions that a mask function joins, by name, with what each holds."""
    name = function.__qualname__.split(".")[0]
    cells = function.__closure__ or ()
    held = {k: c.cell_contents for k, c in zip(function.__code__.co_freevars, cells, strict=True)}
    if name == "and_masks":
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":  # within a sequence positions count on
        yield from _parts(held["mask_function"])
    else:
        yield name, held


def _real(
    mask: torch.Tensor | None, columns: torch.Tensor, batch: int, compiling: bool
) -> torch.Tensor | None:
    """Return (B, S_k) which of the keys are real; None where all are, which compiled code cannot ask."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != batch:
        raise ValueError(
            f"attention 'stoker': the mask must be (B, S), got {tuple(mask.shape)}\n{REMEDY}"
        )
    padded = torch.nn.functional.pad(mask.bool(), (0, 1))  # behind the mask nothing is real
    real = padded[:, columns.clamp(max=mask.shape[1])]
    gaps = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1
    message = f"attention 'stoker': the real tokens of a row must be neighbours\n{REMEDY}"
    if compiling:
        torch._assert_async(~gaps.any(), message)
        return real
    gap, full = torch.stack([gaps.any(), real.all()]).tolist()
    if gap:
        raise ValueError(message)
    return None if full else real


def _edges(real: torch.Tensor, rows: int, shift: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Map real (B, S_k), one run per row -> cu_seqlens of queries and of keys, alike in length, int32.

    Query j stands at key j + ``shift``; None: every query sees every real key. Padded queries become
    segments without keys, padded keys segments without queries: zero, and without gradient.
    """
    keys = real.shape[1]
    count = real.sum(1)
    first = torch.where(count > 0, real.int().argmax(1), 0)
    last = first + count
    if shift is None:
        begin, end = torch.zeros_like(first), torch.full_like(first, rows)
    else:
        begin = (first - shift).clamp(0, rows)
        end = torch.maximum((last - shift).clamp(0, rows), begin)
        begin = torch.where(count > 0, begin, end)
    none = torch.zeros_like(first)
    # Per row of the batch: queries before, keys before, the real ones, queries behind, keys behind.
    q = torch.stack([begin, none, end - begin, rows - end, none], 1)
    k = torch.stack([none, first, count, none, keys - last], 1)
    zero = q.new_zeros(1)
    edges = [torch.cat([zero, t.flatten().cumsum(0)]).to(torch.int32) for t in (q, k)]
    return edges[0], edges[1]


def _packed_edges(segments: torch.Tensor) -> torch.Tensor:
    """Map (B, S), a number per sequence of each row -> cu_seqlens of all of them, int32."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), segments.numel())]).to(torch.int32)


def _refuse_packed(function: Any, batch: int, length: int, device: Any) -> None:
    """Let a compiled call fail if positions begin again in a row: how many sequences is not known there."""
    row = torch.arange(1, length, device=device)[None, None, :, None]
    which = torch.arange(batch, device=device)[:, None, None, None]
    together = function(which, torch.zeros_like(which), row, row - 1)
    torch._assert_async(
        together.all(),
        "attention 'stoker': packed sequences are not supported under torch.compile\n" + REMEDY,
    )
