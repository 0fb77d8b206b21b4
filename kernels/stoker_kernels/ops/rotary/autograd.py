"""Rotary's torch side: one opaque op with its fake, the autograd Function, the functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.rotary import reference
from stoker_kernels.runtime.backend import Backend, backend_for, check_devices, register_op

if TYPE_CHECKING:
    from stoker_kernels.ops.rotary.scaling import RotaryScaling

_INTEGERS = (torch.int32, torch.int64)


def _rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    offset: int,
    interleaved: bool,
    backward: bool,
) -> torch.Tensor:
    where = positions, cu_seqlens, offsets, offset
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.rotary import triton

        return triton.rotary(x, cos, sin, *where, interleaved, backward)
    return reference.rotary(x, cos, sin, *where, interleaved, backward)


def _rotary_fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return reference.output_for(x)


_ROTARY = register_op(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, Tensor? offsets, "
    "SymInt offset, bool interleaved, bool backward) -> Tensor",
    _rotary,
    _rotary_fake,
)


class _RotaryFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        offsets: torch.Tensor | None,
        offset: int,
        interleaved: bool,
    ) -> torch.Tensor:
        y: torch.Tensor = _ROTARY(
            x, cos, sin, positions, cu_seqlens, offsets, offset, interleaved, False
        )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, *tensors, ctx.offset, ctx.interleaved = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx = _ROTARY(dy, *ctx.saved_tensors, ctx.offset, ctx.interleaved, True)
        return dx, None, None, None, None, None, None, None


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Apply the rotary position embedding to queries or keys; the result is a new tensor like x.

    x: (B, S, H, D), or packed sequences (T, H, D). For (B, H, S, D) pass ``x.transpose(1, 2)`` and
    transpose the result: no copy is made, the result keeps x's memory order. Queries and keys of
    one packed projection need one call: their heads are alike, so pass the slice that holds both.
    cos, sin: (P, R/2) with R <= D, of any floating dtype (:func:`rotary_tables`); values R .. D of
    each head are copied. Or (B, S, R/2) or (1, S, R/2), a row for each of x's, as Hugging Face's models make
    them (theirs hold every angle twice: pass ``cos[..., : R // 2]``). They are constants:
    no gradient reaches them.
    interleaved: pairs are neighbours (2i, 2i + 1) as in GPT-J, else half a rotation apart (i, i + R/2)
    as in LLaMA.
    The position of a row is its index in its sequence plus ``offset``: a number, or one per sequence
    (B,), for example the lengths of a KV cache. ``cu_seqlens`` (N + 1,) bounds the sequences of packed
    rows: 0, then the end of each; rows beyond the last have position 0. Or ``positions`` (S,), (B, S), or
    (T,) gives them. Integer tensors are int32 or int64, and their values are not checked: that
    would wait for the GPU. A position outside the tables gives NaN in its row, and reads nothing there.
    Arithmetic is fp32. Differentiable once.
    Raises ``ValueError`` for shapes, devices or options that do not fit together, ``TypeError`` for dtypes.
    """
    if x.ndim not in (3, 4):
        raise ValueError(f"rotary: x must be (B, S, H, D) or (T, H, D), got {tuple(x.shape)}")
    packed = x.ndim == 3
    rows = x[None] if packed else x
    if cos.ndim == 3 and not packed:
        if positions is not None or isinstance(offset, torch.Tensor) or offset:
            raise ValueError(
                "rotary: tables of a row each are final: leave out positions and offset"
            )
        cos, sin, positions = _per_row(x, cos, sin)
    offsets = offset if isinstance(offset, torch.Tensor) else None
    shift = 0 if isinstance(offset, torch.Tensor) else offset
    _check_tables(x, cos, sin)
    _check_positions(x, positions, cu_seqlens, offsets, shift)
    known = positions is None and cu_seqlens is None and offsets is None
    last = shift + rows.shape[1] - 1
    if known and not (shift >= 0 and last < cos.shape[0]):
        raise ValueError(
            f"rotary: rows at positions {shift} .. {last} need tables of that many rows, "
            f"got {cos.shape[0]}: make longer ones with rotary_tables"
        )
    y: torch.Tensor = _RotaryFunction.apply(
        rows, cos, sin, positions, cu_seqlens, offsets, shift, interleaved
    )
    return y[0] if packed else y


def _per_row(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Map tables ([1 or] B, S, R/2) -> tables of as many rows, and each row's place in them."""
    if cos.shape != sin.shape or cos.shape[:2] not in (x.shape[:2], (1, x.shape[1])):
        raise ValueError(
            f"rotary: cos and sin of a row each must both be (B, S, R/2) or (1, S, R/2) for x "
            f"{tuple(x.shape)}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[0] == 1:
        return cos[0], sin[0], None
    places = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[:2])
    return cos.flatten(0, 1), sin.flatten(0, 1), places


def _check_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if cos.ndim != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        raise ValueError(
            f"rotary: cos and sin must both be (P, R/2) with 0 < R <= D = {x.shape[-1]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not tensor.is_floating_point():
            raise TypeError(f"rotary: {name} must be floating point, got {tensor.dtype}")
    check_devices("rotary", x, cos=cos, sin=sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rotary: the tables get no gradient: pass cos.detach(), sin.detach()")


def _check_positions(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    offset: int,
) -> None:
    given = {"positions": positions, "cu_seqlens": cu_seqlens, "offset": offsets}
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in _INTEGERS:
            raise TypeError(f"rotary: {name} must be int32 or int64, got {tensor.dtype}")
    check_devices("rotary", x, **given)
    if positions is not None:
        if cu_seqlens is not None or offsets is not None or offset:
            raise ValueError("rotary: positions are final: leave out cu_seqlens and offset")
        allowed = [x.shape[:1]] if x.ndim == 3 else [x.shape[1:2], x.shape[:2]]
        if positions.shape not in allowed:
            raise ValueError(
                f"rotary: positions must have shape {' or '.join(str(tuple(s)) for s in allowed)}, "
                f"got {tuple(positions.shape)}"
            )
    if cu_seqlens is not None and (x.ndim != 3 or cu_seqlens.ndim != 1 or not len(cu_seqlens)):
        raise ValueError(
            f"rotary: cu_seqlens (N + 1,) goes with packed x (T, H, D), "
            f"got {tuple(cu_seqlens.shape)} for {tuple(x.shape)}"
        )
    if offsets is not None:
        sequences = 1 if x.ndim == 3 else x.shape[0]
        sequences = sequences if cu_seqlens is None else len(cu_seqlens) - 1
        if offsets.shape != (sequences,):
            raise ValueError(
                f"rotary: offset must be a number or one per sequence ({sequences},), "
                f"got {tuple(offsets.shape)}"
            )


def rotary_tables(
    dim: int,
    max_len: int,
    base: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine (max_len, dim/2) of position p times base^(-2i/dim), for :func:`rotary`.

    ``dim`` is the rotated part R of a head. The angles are computed in fp64 and rounded once to
    ``dtype``: in fp32 the angle itself would be off by 0.004 at position 100 000.
    ``scaling`` stretches them to a longer context: :class:`Llama3Scaling` or :class:`YarnScaling`.
    Raises ``ValueError`` unless dim is positive and even.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary_tables: dim must be positive and even, got {dim}")
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    position = torch.arange(max_len, dtype=torch.float64, device=device)
    theta, magnitude = torch.pow(base, -exponent), 1.0
    if scaling is not None:
        theta, magnitude = scaling.frequencies(theta, dim, base), scaling.magnitude
    angle = position[:, None] * theta
    return (angle.cos() * magnitude).to(dtype), (angle.sin() * magnitude).to(dtype)
