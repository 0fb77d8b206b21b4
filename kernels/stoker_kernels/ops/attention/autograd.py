"""Attention's torch side: opaque ops with fakes, the autograd Function, the public functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.attention import cpu, hopper, reference
from stoker_kernels.ops.attention.checks import check_scores, expanded_bias, given
from stoker_kernels.ops.attention.reference import Options, bias_of, new_like
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

if TYPE_CHECKING:
    from stoker_kernels.ops.attention.blocks import BlockMask
    from stoker_kernels.ops.attention.relative import RelativeBias

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
_BIASES = (Options._fields.index("bias"), Options._fields.index("relative_table"))
_OPTIONS = (
    "float scale, bool causal=True, float dropout_p=0.0, Tensor? seed=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, "
    "int window=0, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? bias=None, "
    "Tensor? relative_table=None, Tensor? relative_buckets=None, Tensor? prefix_lengths=None, "
    "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? q_num_blocks=None, "
    "Tensor? q_indices=None, int block_size_q=0, int block_size_k=0"
)


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options, backend = Options(*rest, **named), backend_for(q)
    if backend is Backend.TRITON and hopper.chosen(q, k, v, options):
        from stoker_kernels.ops.attention.hopper import launchers

        return launchers.attention_fwd(q, k, v, options)
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
) -> tuple[torch.Tensor, ...]:
    return _gradients((dout, dlse, q, k, v, out, lse), Options(*rest, **named), False)


def _biased_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    return _gradients((dout, dlse, q, k, v, out, lse), Options(*rest, **named), True)


def _gradients(given: tuple[Any, ...], options: Options, biased: bool) -> tuple[torch.Tensor, ...]:
    """Return dq, dk, dv, with ``biased`` the bias's gradient too, of the ops' seven first arguments."""
    dout, dlse, q, k, v, out, lse = given
    backend = backend_for(q)
    if backend is Backend.TRITON and hopper.chosen(q, k, v, options):
        from stoker_kernels.ops.attention.hopper import launchers

        return launchers.attention_bwd(dout, dlse, q, k, v, out, lse, options)
    if backend is Backend.TRITON:
        from stoker_kernels.ops.attention import triton

        return triton.attention_bwd(dout, dlse, q, k, v, out, lse, options, biased)
    if backend is Backend.CPU and dlse is None and cpu.fits(q, k, v, options):
        return cpu.attention_bwd(dout, q, k, v, out, lse, options)
    with torch.autocast(q.device.type, enabled=False):
        return reference.attention_bwd(dout, dlse, q, k, v, out, lse, options, biased)


def _bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    return new_like(q), new_like(k), new_like(v)


def _biased_bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    biases = bias_of(Options(*rest, **named))
    return new_like(q), new_like(k), new_like(v), biases.new_empty(biases.shape)


_FWD = register_op(
    "attention_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
_GIVEN = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_BWD = register_op(
    "attention_bwd",
    f"({_GIVEN}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_BIASED_BWD = register_op(
    "attention_biased_bwd",
    f"({_GIVEN}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _biased_bwd,
    _biased_bwd_fake,
)


class _AttentionFunction(torch.autograd.Function):
    """Its inputs are q, k, v, whether lse gets a gradient, and the fields of ``Options``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # torch.compile counts the parameters
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_lse: bool,
        scale: float,
        causal: bool,
        dropout_p: float,
        seed: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        window: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
        relative_table: torch.Tensor | None,
        relative_buckets: torch.Tensor | None,
        prefix_lengths: torch.Tensor | None,
        kv_num_blocks: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        q_num_blocks: torch.Tensor | None,
        q_indices: torch.Tensor | None,
        block_size_q: int,
        block_size_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _FWD(
            q, k, v,
            scale, causal, dropout_p, seed, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, window, softcap, alibi_slopes, bias,
            relative_table, relative_buckets, prefix_lengths, kv_num_blocks,
            kv_indices, q_num_blocks, q_indices, block_size_q, block_size_k,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        q, k, v, return_lse, *options = inputs
        tensors = [isinstance(value, torch.Tensor) for value in options]
        saved = [value for value, held in zip(options, tensors, strict=True) if held]
        ctx.save_for_backward(q, k, v, *output, *saved)
        ctx.set_materialize_grads(False)  # nobody may have used lse: then its zeros are not read
        if not return_lse:
            ctx.mark_non_differentiable(output[1])
        ctx.plain = [None if held else value for value, held in zip(options, tensors, strict=True)]
        ctx.tensors, ctx.return_lse = tensors, return_lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        options = list(ctx.plain)
        for place, held in enumerate(ctx.tensors):
            if held:
                options[place] = saved.pop(0)
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = dlse if ctx.return_lse else None  # compiled, it is zeros all the same
        gradients: list[torch.Tensor | None] = [None] * (4 + len(options))
        places = [4 + place for place in _BIASES if ctx.needs_input_grad[4 + place]]
        if places:
            *gradients[:3], gradients[places[0]] = _BIASED_BWD(
                dout, dlse, q, k, v, out, lse, *options
            )
        else:
            gradients[:3] = _BWD(dout, dlse, q, k, v, out, lse, *options)
        return tuple(gradients)


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in autocast's dtype inside it, as torch's own attention takes them; fp64 stays."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return list(tensors)
    return [t.to(dtype) if t.dtype in STORAGE_DTYPES else t for t in tensors]


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
    if options.bias is not None:
        options = options._replace(bias=expanded_bias(name, options.bias, q, k))
    check_scores(name, q, options)
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


def _with_table(
    name: str, options: Options, relative_bias: RelativeBias, q: torch.Tensor
) -> Options:
    table, buckets = relative_bias.checked(name, q.shape[1])
    return options._replace(relative_table=table, relative_buckets=buckets)


class Keywords(TypedDict, total=False):
    """The options that both public functions take, for their overloads."""

    causal: bool
    scale: float | None
    dropout_p: float
    seed: torch.Tensor | None
    window: int | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    relative_bias: RelativeBias | None
    prefix_lengths: torch.Tensor | None


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Keywords],
) -> torch.Tensor: ...
@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: Literal[True],
    **options: Unpack[Keywords],
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
    bias: torch.Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    block_mask: BlockMask | None = None,
    prefix_lengths: torch.Tensor | None = None,
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

    ``bias``, of a shape that broadcasts to (B, H, S_q, S_k), is added after the cap, and gets a gradient,
    summed in the kernel over batch and heads where it has one of them; -inf hides a column, a row of them
    sees nothing, and so does anything below -2e38, which base 2 cannot hold. ``relative_bias`` adds T5's
    bias by distance, which needs no such tensor and has its gradient in the table: prefer it.
    ``prefix_lengths`` (B,) int32: all rows see the first so many columns, and beyond them, as ``causal``
    says, those up to their own (prefix language models). ``block_mask`` leaves the blocks of its
    lists; no key or value of another is loaded. It needs S_q and S_k of its own, not ``bias``; other options
    hide more within its blocks.

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
        window=given("flash_attention: window", window),
        softcap=given("flash_attention: softcap", softcap), alibi_slopes=alibi_slopes,
        bias=bias, prefix_lengths=prefix_lengths,
    )  # fmt: skip
    if relative_bias is not None:
        options = _with_table("flash_attention", options, relative_bias, q)
    if block_mask is not None:
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        lists = block_mask.checked("flash_attention", *sizes)
        options = options._replace(
            kv_num_blocks=lists.kv_num_blocks, kv_indices=lists.kv_indices,
            q_num_blocks=lists.q_num_blocks, q_indices=lists.q_indices,
            block_size_q=lists.block_size[0], block_size_k=lists.block_size[1],
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
    **options: Unpack[Keywords],
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
    **options: Unpack[Keywords],
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
    relative_bias: RelativeBias | None = None,
    prefix_lengths: torch.Tensor | None = None,
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
        given(f"{name}: window", window), given(f"{name}: softcap", softcap), alibi_slopes,
        prefix_lengths=prefix_lengths,
    )  # fmt: skip
    if relative_bias is not None:
        options = _with_table(name, options, relative_bias, q)
    return _apply(name, q, k, v, return_lse, options)
