"""Attention's torch side: opaque ops with fakes, the autograd Function, the public functions."""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.attention import cpu, reference
from stoker_kernels.ops.attention.reference import Options, new_like
from stoker_kernels.primitives import philox
from stoker_kernels.runtime.backend import (
    STORAGE_DTYPES,
    Backend,
    autocast_dtype,
    backend_for,
    check_devices,
    check_local,
    compute_dtype,
    register_op,
)

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
MAX_WINDOW = 2**31  # columns are int32 in the kernels
_OPTIONS = (
    "float scale, bool causal=True, float dropout_p=0.0, Tensor? seed=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, "
    "int window=0, float softcap=0.0, Tensor? alibi_slopes=None"
)


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options, backend = Options(*rest, **named), backend_for(q)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.attention import triton

        return triton.attention_fwd(q, k, v, options)
    if backend is Backend.CPU and cpu.fits(q, k, v, options):
        return cpu.attention_fwd(q, k, v, options)
    with torch.autocast(q.device.type, enabled=False):  # it would round the fp32 products
        return reference.attention_fwd(q, k, v, options)


def _fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return new_like(q, v.shape[-1]), q.new_empty(rows, dtype=compute_dtype(q.dtype))


def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, backend = Options(*rest, **named), backend_for(q)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.attention import triton

        return triton.attention_bwd(dout, dlse, q, k, v, out, lse, options)
    if backend is Backend.CPU and dlse is None and cpu.fits(q, k, v, options):
        return cpu.attention_bwd(dout, q, k, v, out, lse, options)
    with torch.autocast(q.device.type, enabled=False):
        return reference.attention_bwd(dout, dlse, q, k, v, out, lse, options)


def _bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_like(q), new_like(k), new_like(v)


_FWD = register_op(
    "attention_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "attention_bwd",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _AttentionFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_lse: bool,
        scale: float,
        causal: bool,
        dropout_p: float,
        seed: torch.Tensor | None,
        cu_q: torch.Tensor | None,
        cu_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        window: int,
        softcap: float,
        slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _FWD(
            q, k, v, scale, causal, dropout_p, seed, cu_q, cu_k, max_q, max_k, window, softcap,
            slopes,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        q, k, v, return_lse, scale, causal, dropout_p, seed, cu_q, cu_k, *sizes, slopes = inputs
        ctx.save_for_backward(q, k, v, *output, seed, cu_q, cu_k, slopes)
        ctx.set_materialize_grads(False)  # nobody may have used lse: then its zeros are not read
        if not return_lse:
            ctx.mark_non_differentiable(output[1])
        ctx.plain, ctx.return_lse = (scale, causal, dropout_p, *sizes), return_lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, seed, cu_q, cu_k, slopes = ctx.saved_tensors
        scale, causal, dropout_p, *sizes = ctx.plain
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = dlse if ctx.return_lse else None  # compiled, it is zeros all the same
        dq, dk, dv = _BWD(
            dout,
            dlse,
            q,
            k,
            v,
            out,
            lse,
            scale,
            causal,
            dropout_p,
            seed,
            cu_q,
            cu_k,
            *sizes,
            slopes,
        )
        return dq, dk, dv, *[None] * 12


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in autocast's dtype inside it, as torch's own attention takes them; fp64 stays."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return list(tensors)
    return [t.to(dtype) if t.dtype in STORAGE_DTYPES else t for t in tensors]


def _check_scores(name: str, q: torch.Tensor, options: Options) -> None:
    """Check window, softcap and alibi_slopes."""
    if not 0 <= options.window < MAX_WINDOW:
        raise ValueError(
            f"{name}: window must be 1 to 2^31 - 1 columns, or None for all, got {options.window}"
        )
    if not 0.0 <= options.softcap < math.inf:
        raise ValueError(
            f"{name}: softcap must be positive and finite, or None, got {options.softcap}"
        )
    slopes = options.alibi_slopes
    if slopes is None:
        return
    if slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32:
        raise ValueError(
            f"{name}: alibi_slopes must be ({q.shape[1]},) float32, one per query head, got "
            f"{tuple(slopes.shape)} {slopes.dtype}"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: alibi_slopes get no gradient: pass alibi_slopes.detach()")
    check_devices(name, q, alibi_slopes=slopes)


def _apply(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    options: Options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Check what dense and packed calls have in common, draw the seed, run."""
    q, k, v = _as_autocast(q, k, v)
    check_local(name, q=q, k=k, v=v)
    heads_at = 1  # in (B, H, S, D) and in (T, H, D)
    for other, tensor in (("k", k), ("v", v)):
        if tensor.ndim != q.ndim or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: {other} must match q: {tuple(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}, q is {tuple(q.shape)} {q.dtype} on {q.device}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{name}: k and v must have one shape up to the head dimension, got {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
        )
    if k.shape[-1] != q.shape[-1] or (q.ndim == 4 and k.shape[0] != q.shape[0]):
        raise ValueError(
            f"{name}: k must match q in batch and head dimension, got {tuple(k.shape)} for "
            f"{tuple(q.shape)}"
        )
    for head_dim in (q.shape[-1], v.shape[-1]):
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"{name}: head dimension {head_dim}, expected one of {HEAD_DIMS}")
    kv_heads = k.shape[heads_at]
    if kv_heads == 0 or q.shape[heads_at] % kv_heads:
        raise ValueError(
            f"{name}: {q.shape[heads_at]} query heads must be a multiple of {kv_heads} key heads"
        )
    if not 0.0 < options.scale < math.inf:
        raise ValueError(f"{name}: scale must be positive and finite, got {options.scale}")
    _check_scores(name, q, options)
    philox.threshold_of(options.dropout_p, f"{name}: dropout_p")
    if options.dropout_p == 0.0:
        options = options._replace(seed=None)
    elif options.seed is None:
        options = options._replace(seed=philox.draw_seed(q.device))
    elif options.seed.shape != (1,) or options.seed.dtype != torch.int64:
        raise ValueError(f"{name}: seed must be (1,) int64, as philox.draw_seed makes it")
    check_devices(name, q, seed=options.seed)
    # One tensor passed twice: torch.compile refuses it, and torch 2.11 halves its gradient. Views differ.
    v = v.view_as(v) if v is q or v is k else v
    k = k.view_as(k) if k is q else k
    cu_q, cu_k = options.cu_seqlens_q, options.cu_seqlens_k
    if cu_k is not None and cu_k is cu_q:
        options = options._replace(cu_seqlens_k=cu_k.view_as(cu_k))
    out, lse = _AttentionFunction.apply(q, k, v, return_lse, *options)
    return (out, lse) if return_lse else out


_Number = TypeVar("_Number", int, float)


def _given(what: str, value: _Number | None) -> _Number:
    """Return ``value``, 0 for None. Raises ``ValueError`` for a given 0: it would hide nothing or all."""
    if value == 0:
        raise ValueError(f"{what} is 0: pass None to leave it out")
    return 0 if value is None else value


class _Keywords(TypedDict, total=False):
    """The options that both public functions take, for their overloads."""

    causal: bool
    scale: float | None
    dropout_p: float
    seed: torch.Tensor | None
    window: int | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> torch.Tensor: ...
@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend: dropout(softmax(scale * q k^T, causal: column <= row + S_k - S_q)) v, per head.

    q (B, H, S_q, D); k, v (B, H_kv, S_k, D) of one dtype, any strides, D of 32, 64, 80, 96, 128, 192
    or 256 (v may have another of these: so has the result), H a multiple of H_kv (query head h reads key
    head h // (H / H_kv), nothing is repeated in memory). The result is
    (B, H, S_q, D) over (B, S_q, H, D) memory, so ``out.transpose(1, 2).reshape(B, S, H * D)`` is free.
    A row with nothing to attend, which S_q > S_k makes, is zero and has no gradient.

    ``window`` w: a row sees the last w columns up to its own, without ``causal`` those to its right as well
    (|row + S_k - S_q - column| < w); tiles outside are not loaded. ``softcap`` c: scores are
    c * tanh(score / c), exact to about 1e-7 c. ``alibi_slopes`` (H,) fp32, no gradient: scores lose
    slope * |row + S_k - S_q - column|, after the cap. Window and cap are compiled into the kernels: one
    compilation per value.

    ``scale`` defaults to 1/sqrt(D). ``dropout_p`` drops probabilities by a mask drawn from ``seed``, (1,)
    int64 (from torch's generator by default), see ``reference``; pass 0 in evaluation. With
    ``return_lse`` the natural log-sum-exp of the scores, (B, H, S_q) fp32, -inf for a row with nothing,
    comes too, and is differentiable. Memory is O(S); softmax and accumulation are fp32; the backward
    uses no atomics, so gradients repeat bit for bit. Differentiable once. Scores are computed again in
    the backward, and fp32 rounds a score of 10^6 to 1/16: from there on probabilities are coarse. They
    stay finite to 10^9, except in the gradients on the CPU, which are PyTorch's. Under autocast q, k and v
    are taken in its dtype, whatever they have, as by torch's ``scaled_dot_product_attention``.
    Raises ``ValueError`` naming the argument that does not fit.
    """
    if q.ndim != 4:
        raise ValueError(f"flash_attention: q must be (B, H, S, D), got {tuple(q.shape)}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    options = Options(
        scale, causal, dropout_p, seed,
        window=_given("flash_attention: window", window),
        softcap=_given("flash_attention: softcap", softcap), alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return _apply("flash_attention", q, k, v, return_lse, options)


@overload
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> torch.Tensor: ...
@overload
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend within each of B sequences packed along the first dimension, no padding.

    Otherwise as :func:`flash_attention`. q (T_q, H, D); k, v (T_k, H_kv, D); the result is like q, lse
    (H, T_q). Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and likewise columns:
    (B + 1,) int32 or int64 on q's device, rising from 0 to T or less: rows behind the last sequence are
    zero, their lse is -inf, and they get no gradient. Sequences may be empty. max_seqlen_q and
    max_seqlen_k bound the lengths; both are plain numbers, so that nothing waits for the GPU, and no kernel
    can check them against cu_seqlens: rows beyond them are not computed. The CPU path checks. Raises as
    :func:`flash_attention`.
    """
    name = "flash_attention_varlen"
    if q.ndim != 3:
        raise ValueError(f"{name}: q must be (T, H, D), got {tuple(q.shape)}")
    for which, cu in (("q", cu_seqlens_q), ("k", cu_seqlens_k)):
        if cu.ndim != 1 or not len(cu) or cu.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: cu_seqlens_{which} must be (B + 1,) int32 or int64, got "
                f"{tuple(cu.shape)} {cu.dtype}"
            )
        if cu.device != q.device:
            raise ValueError(f"{name}: cu_seqlens_{which} is on {cu.device}, q is on {q.device}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"{name}: cu_seqlens_q and cu_seqlens_k must have one length, got "
            f"{len(cu_seqlens_q)} and {len(cu_seqlens_k)}"
        )
    if max_seqlen_q < 0 or max_seqlen_k < 0:
        raise ValueError(f"{name}: max_seqlen_q and max_seqlen_k must not be negative")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options = Options(
        scale, causal, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        _given(f"{name}: window", window), _given(f"{name}: softcap", softcap), alibi_slopes,
    )  # fmt: skip
    return _apply(name, q, k, v, return_lse, options)
