"""Tensor and sequence parallelism of anyone's model by a plan of module names, on torch's styles.

    {"layers.*.attention.q": "colwise", "layers.*.attention.out": "rowwise",
     "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise", "head": "head"}

Called by ``cutting``. The model's code runs with local tensors: a head count must be read off a tensor
(``view(b, s, -1, head_dim)``).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stoker.exceptions import BadRequestError
from stoker_train.sharded.parallel.tensor.local_parameters import LocalParameters, divides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_train.sharded.parallel.tensor.exchange import TensorGroup

STYLES = {
    "colwise": "a linear layer by its outputs, which stay cut",
    "rowwise": "a linear layer by its inputs, which came cut; its output is whole, or a rank's own tokens",
    "embedding": "an embedding by its rows",
    "head": "a linear layer by its outputs, which are joined",
    "sequence": "a norm or dropout, on a rank's own tokens",
}
"""The names that a plan may give; any of torch's ``ParallelStyle`` may stand in their place."""


def check(model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Raise BadRequestError for a pattern of ``plan`` that names no module of the whole ``model``."""
    for pattern in plan:
        if not any(name and fnmatchcase(name, pattern) for name, _ in model.named_modules()):
            names = ", ".join(name for name, _ in model.named_children())
            raise BadRequestError(
                f"tensor_plan {pattern!r} is the name of no module\nthe model has {names}, and more in them",
                field="tensor_plan",
            )


def cut(model: nn.Module, group: TensorGroup, plan: Mapping[str, Any]) -> None:
    """Cut the modules whose names match a pattern of ``plan``; all others stay whole on each rank.

    BadRequestError for a pattern that no module has, a style that is not known or does not fit its module,
    and sizes that the ranks do not divide. A part of a pipeline (it has ``tied``) lacks most modules: who
    cuts the model into parts checks the plan with the whole.
    """
    if not hasattr(model, "tied"):
        check(model, plan)
    chosen: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        matching = {n: m for n, m in model.named_modules() if n and fnmatchcase(n, pattern)}
        for name, module in matching.items():
            chosen[name] = _style(style, name, module, group)
    tied = _tied(model)
    parallelize_module(model, group.mesh, dict(chosen))
    _tie(tied)
    LocalParameters(group).rest(model)


def _tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places (module's name, module, parameter's name) of parameters that have several."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie(tied: list[list[tuple[str, nn.Module, str]]]) -> None:
    """Make one parameter of those again of which torch's styles have made several."""
    for places in tied:
        (_, module, name), *others = places
        first = module._parameters[name]
        for _, other, own in others:
            if _placements(other._parameters[own]) != _placements(first):
                names = ", ".join(path for path, *_ in places)
                raise BadRequestError(
                    f"tensor_plan cuts the shared {name} of {names} in different ways\n"
                    "name all of them, with styles that cut it alike, as embedding and head",
                    field="tensor_plan",
                )
            other._parameters[own] = first


def _placements(parameter: Any) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _style(style: Any, name: str, module: nn.Module, group: TensorGroup) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise BadRequestError(
            f"tensor_plan[{name!r}] {style!r} is no style\n"
            f"give one of {', '.join(STYLES)}, or a style of torch.distributed.tensor.parallel",
            field="tensor_plan",
        )
    between = Shard(1) if group.sequence else Replicate()
    if style == "sequence":
        if not group.sequence:
            return _Whole()
        return SequenceParallel(use_local_output=True)
    kind = nn.Embedding if style == "embedding" else nn.Linear
    if not isinstance(module, kind):
        raise BadRequestError(
            f"tensor_plan[{name!r}] {style!r} is for {kind.__name__}, not {type(module).__name__}\n"
            "name the modules inside of it",
            field="tensor_plan",
        )
    if isinstance(module, nn.Embedding):
        divides(group.size, [("vocab", module.num_embeddings)], name)
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    assert isinstance(module, nn.Linear)
    if style == "rowwise":
        divides(group.size, [("width", module.in_features)], name)
        return RowwiseParallel(output_layouts=between)
    divides(group.size, [("width", module.out_features)], name)
    if style == "head":
        return ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return ColwiseParallel(input_layouts=between)


class _Whole(ParallelStyle):
    """Leaves a module as it is: what works on own tokens where sequences are cut."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module
