"""Tensor and sequence parallelism of :mod:`stoker_kernels.models`, by the types of their modules.

Attention is cut by heads, an MLP by its inner width, embedding and head by the vocabulary; norms are whole,
and with ``sequence`` work on each rank's own tokens (Shoeybi et al. 2019; Korthikanti et al. 2022). A part of
a pipeline has the same modules, so it is cut the same way; between parts travel a rank's own tokens.
Called by ``cutting``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from stoker.exceptions import BadRequestError
from stoker_kernels.models.bert import Bert, BertEncoder
from stoker_kernels.models.transformer import Transformer
from stoker_kernels.nn import (
    GELUMLP,
    ALiBi,
    Attention,
    CrossAttention,
    FusedMLP,
    FusedSwiGLU,
    LayerNorm,
    LMHead,
    MoE,
    RMSNorm,
    SwiGLUMLP,
)
from stoker_train.sharded.parallel.extending import extend
from stoker_train.sharded.parallel.tensor.dropout import own_random, own_seed
from stoker_train.sharded.parallel.tensor.exchange import TensorGroup
from stoker_train.sharded.parallel.tensor.local_parameters import (
    COLUMNS,
    ROWS,
    WHOLE,
    LocalParameters,
    divides,
    fused,
    local,
    read_as,
)
from stoker_train.sharded.parallel.tensor.vocabulary import embedded, head_members

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_kernels.nn import Packing

_KINDS = (Transformer, Bert, Attention, GELUMLP, SwiGLUMLP, LMHead)
_BLOCKS = "stoker_row_blocks"
_REFUSED = (CrossAttention, FusedMLP, FusedSwiGLU, MoE)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [first, ...) of the parameter ``name`` of the whole model, which has ``shape``."""

    name: str
    first: int
    shape: tuple[int, ...]


def is_ours(model: nn.Module) -> bool:
    """Return whether ``model`` has modules that this plan knows."""
    return any(isinstance(module, _KINDS) for module in model.modules())


def cut(model: nn.Module, group: TensorGroup) -> None:
    """Cut ``model`` in place. BadRequestError, with nothing changed, for what the ranks do not divide."""
    modules = list(model.named_modules())
    for name, module in modules:
        _check(module, name or "the model", group)
    parameters = LocalParameters(group)
    heads: dict[int, ALiBi] = {}
    # What reads whole sequences, which an encoder joins.
    berts = [module for _, module in modules if isinstance(module, Bert)]
    behind = {id(bert.norm) for bert in berts} | {id(bert.head) for bert in berts}
    whole = TensorGroup(group.mesh, sequence=False)
    for _, module in modules:
        if isinstance(module, Attention):
            _cut_attention(module, parameters, group, heads)
        elif isinstance(module, GELUMLP | SwiGLUMLP):
            _cut_mlp(module, parameters, group)
        elif isinstance(module, RMSNorm | LayerNorm):
            summed = group.sequence and id(module) not in behind
            for own in ("weight", "bias"):
                parameters.cut(module, own, WHOLE, summed=summed)
        elif isinstance(module, Transformer):
            _cut_ends(module, parameters, group)
        if isinstance(module, LMHead):
            parameters.cut(module, "weight", ROWS)
            parameters.cut(module, "bias", ROWS)
            extend(module, head_members(whole if id(module) in behind else group))
    parameters.rest(model)


def blocks_of(model: nn.Module) -> Mapping[str, Block]:
    """Return, by full name, the parameters that are blocks of one parameter of the whole model.

    Query, key and value projections of grouped heads (fewer of keys than of queries), which one cut cannot
    divide by heads. All other parameters have the whole model's names and shapes.
    """
    found = {}
    for path, module in model.named_modules():
        for own, block in getattr(module, _BLOCKS, {}).items():
            lead = f"{path}." if path else ""
            found[lead + own] = Block(lead + block.name, block.first, block.shape)
    return found


def _check(module: nn.Module, where: str, group: TensorGroup) -> None:
    size = group.size
    if isinstance(module, _REFUSED) or (
        isinstance(module, Attention) and (module.relative or module.prefix) is not None
    ):
        raise BadRequestError(
            f"tensor {size}: {where} ({type(module).__name__}) cannot be cut\n"
            "take a plan with tensor=1: ZeRO divides its parameters, too",
            field="tensor",
        )
    if isinstance(module, Attention):
        divides(size, [("heads", module.heads), ("kv_heads", module.kv_heads)], where)
        _check_linear([module.qkv, module.out], where, size)
    elif isinstance(module, GELUMLP | SwiGLUMLP):
        _check_linear([module.up, module.down], where, size)
        divides(size, [("width", module.down.in_features)], where)
    elif isinstance(module, LMHead):
        divides(size, [("vocab", module.out_features)], where)
    elif isinstance(module, Transformer):
        if module.embed is not None:
            divides(size, [("vocab", module.embed.num_embeddings)], where)
        if module.prompt is not None and group.sequence:
            raise BadRequestError(
                f"sequence: {where} has a prompt before its tokens\ntake a plan with sequence=False",
                field="sequence",
            )


def _check_linear(linears: list[nn.Module], where: str, size: int) -> None:
    for linear in linears:
        if type(linear) is not nn.Linear:
            raise BadRequestError(
                f"tensor {size}: a projection of {where} is a {type(linear).__name__}\n"
                "adapters are trained with tensor=1, where ZeRO divides the model",
                field="tensor",
            )


def _cut_attention(
    attention: Attention,
    parameters: LocalParameters,
    group: TensorGroup,
    alibis: dict[int, ALiBi],
) -> None:
    d = attention.head_dim
    if attention.heads == attention.kv_heads:
        for name in ("weight", "bias"):
            parameters.cut(attention.qkv, name, fused(3))
    else:
        rows = [attention.heads * d, attention.kv_heads * d, attention.kv_heads * d]
        _cut_blocks(attention.qkv, rows, parameters)
    _cut_last(attention.out, parameters, group)
    attention.heads //= group.size
    attention.kv_heads //= group.size
    whole = attention.alibi
    if whole is not None:
        if id(whole) not in alibis:
            alibis[id(whole)] = _OwnALiBi(whole, group)
        attention.alibi = alibis[id(whole)]
    kind = type(attention)

    def forward(
        self: Attention,
        x: torch.Tensor,
        packing: Packing | None = None,
        seed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = group.enter(x)
        if group.sequence or not (self.training and self.dropout):
            return kind.forward(self, x, packing, seed)
        with own_random(group, x.device):
            return kind.forward(self, x, packing, own_seed(seed, group))

    extend(attention, {"forward": forward})


def _cut_blocks(linear: nn.Linear, rows: list[int], parameters: LocalParameters) -> None:
    """Make one parameter of each block of rows; the module reads the local parts as one."""
    blocks: dict[str, Block] = {}
    for name in ("weight", "bias"):
        whole = linear._parameters.get(name)
        if whole is None:
            continue
        first, own = 0, [f"{name}_{block}" for block in "qkv"]
        for block, part in zip(own, torch.split(whole.detach(), rows), strict=True):
            parameters.put(linear, block, part, whole)
            blocks[block] = Block(name, first, tuple(whole.shape))
            first += len(part)
        del linear._parameters[name]
        read_as(linear, {name: _joined(own)})
    extend(linear, {_BLOCKS: blocks})


def _joined(names: list[str]) -> Any:
    def joined(module: nn.Module) -> torch.Tensor:
        parts = [local(module._parameters[name]) for name in names]
        return torch.cat([part for part in parts if part is not None])

    return joined


def _cut_last(linear: nn.Linear, parameters: LocalParameters, group: TensorGroup) -> None:
    """Cut the projection that ends a block by columns: its products are parts of a sum."""
    parameters.cut(linear, "weight", COLUMNS)
    parameters.cut(linear, "bias", WHOLE, summed=group.sequence)

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y, bias = group.leave(F.linear(x, self.weight)), cast("torch.Tensor | None", self.bias)
        return y if bias is None else y + bias

    extend(linear, {"forward": forward})


def _cut_mlp(mlp: GELUMLP | SwiGLUMLP, parameters: LocalParameters, group: TensorGroup) -> None:
    placement = ROWS if isinstance(mlp, GELUMLP) else fused(2)
    parameters.cut(mlp.up, "weight", placement)
    parameters.cut(mlp.up, "bias", placement)
    parameters.cut(mlp, "up_bias", ROWS)
    _cut_last(mlp.down, parameters, group)
    kind = type(mlp)

    def forward(self: GELUMLP | SwiGLUMLP, x: torch.Tensor) -> torch.Tensor:
        return kind.forward(self, group.enter(x))  # type: ignore[arg-type]

    extend(mlp, {"forward": forward})


def _cut_ends(model: Transformer, parameters: LocalParameters, group: TensorGroup) -> None:
    """Cut what comes before the layers; with sequences cut, their sum is divided among the ranks."""

    def look_up(self: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        found = embedded(self.weight, tokens, group)
        return found if group.sequence else group.sum(found)

    if model.embed is not None:
        parameters.cut(model.embed, "weight", ROWS)
        extend(model.embed, {"forward": look_up})
    if not group.sequence:
        return
    for table in (model.position, model.token_type):
        if table is not None:  # part of a sum over ranks: the first has it, others zeros
            parameters.cut(table, "weight", WHOLE, summed=True, share=float(group.rank == 0))
    _cut_sequences(model, group)


def _cut_sequences(model: Transformer, group: TensorGroup) -> None:
    kind, drops = type(model), model.config.dropout > 0.0

    def embeddings(self: Transformer, tokens: torch.Tensor, *args: Any, **more: Any) -> Any:
        group.check(tokens.shape[1])
        return group.leave(kind.embeddings(self, tokens, *args, **more))

    def hidden(self: Transformer, *args: Any, **more: Any) -> torch.Tensor:
        if more.get("lengths") is not None:
            raise BadRequestError(
                "sequence: rows with lengths cannot be cut along the sequence\n"
                "take a plan with sequence=False, or give rows without padding",
                field="sequence",
            )
        found = kind.hidden(self, *args, **more)
        return group.join(found, 1) if isinstance(self, BertEncoder) else found

    def forward(self: Transformer, *args: Any, **more: Any) -> Any:
        if not (drops and self.training):
            return kind.forward(self, *args, **more)
        with own_random(group, next(self.parameters()).device):
            return kind.forward(self, *args, **more)

    extend(model, {"embeddings": embeddings, "hidden": hidden, "forward": forward})


class _OwnALiBi(ALiBi):
    """The slopes of this rank's heads."""

    def __init__(self, whole: ALiBi, group: TensorGroup) -> None:
        super().__init__(whole.heads, whole.scale)
        self._part = (group.rank, group.size)
        self.slopes = whole.slopes.chunk(group.size)[group.rank]

    def _apply(self, fn: Any, recurse: bool = True) -> _OwnALiBi:
        super()._apply(fn, recurse)
        rank, size = self._part
        self.slopes = self.slopes.chunk(size)[rank]
        return self
