"""The cut of a whole model into the parts of a pipeline's rank, by layers.

Called on each rank with the whole model, on any device ("meta" costs no memory); the modules of the rank's
stages go over into parts, and the rest is dropped with the whole. Parameters and buffers of a part have the
names that they have in the whole model, so that a checkpoint knows no pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from stoker.exceptions import BadRequestError
from stoker_kernels.models.bert import Bert
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.t5 import T5
from stoker_kernels.models.transformer import Transformer
from stoker_train.sharded.pipelining.language_model import CausalLMPart, LayerRun

if TYPE_CHECKING:
    from collections.abc import Sequence

Stages = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A model that is its modules called one after the other: ``first``, the ``layers``, ``last``.

    All are names in the model (``"encoder.layers"``); ``layers`` is of a list of modules. A module that
    returns a tuple has it as its arguments the next. Functions between modules, as activations, must be
    modules to be run.
    """

    layers: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


class ChainPart(nn.Module):
    """Some of the modules of a chain, run in order, under their names in the whole model."""

    def __init__(self, whole: nn.Module, names: Sequence[str], lists: Sequence[str]) -> None:
        super().__init__()
        self._order = tuple(names)
        self.is_list = not lists
        """Whether the modules are those of an ``nn.Sequential``, as layers for ZeRO and recomputation."""
        self._ties = _ties_of(whole, names)
        leads = tuple(f"{name}." for name in names)
        for lead, _ in self._ties:  # before their other names: an optimizer knows them by the first
            if not lead.startswith(leads):
                path, _, last = lead.rpartition(".")
                _node(self, path, lists).register_parameter(last, whole.get_parameter(lead))
        for name in names:
            path, _, last = name.rpartition(".")
            _node(self, path, lists).add_module(last, whole.get_submodule(name))
        self.training = whole.training

    def _apply(self, fn: Any, recurse: bool = True) -> ChainPart:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for lead, name in self._ties:  # leaving the meta device makes two parameters of the one
            path, _, last = name.rpartition(".")
            setattr(self.get_submodule(path), last, self.get_parameter(lead))
        return self

    def forward(self, *inputs: Any) -> Any:
        """Run the modules; the first gets ``inputs``, each other one what the one before returned."""
        for name in self._order:
            found = self.get_submodule(name)(*inputs)
            inputs = found if isinstance(found, tuple) else (found,)
        return inputs if len(inputs) > 1 else inputs[0]


def count_layers(model: nn.Module, chain: Chain | None = None) -> int:
    """Return how many layers the stages of ``model`` can be made of."""
    if isinstance(model, CausalLM) and chain is None:
        if type(model).forward is not CausalLM.forward:
            raise BadRequestError(
                f"{type(model).__name__} has a forward of its own, which its parts would not have\n"
                "cut the model as it is made, before anything wraps it, or train it with pipeline=1",
                field="model",
            )
        return len(model.layers)
    return len(_layers(model, chain))


def cut_evenly(layers: int, stages: int) -> Stages:
    """Return stages of as equal numbers of layers as can be, where no plan says which."""
    if not 1 <= stages <= layers:
        raise BadRequestError(
            f"{layers} layers cannot be cut into {stages} stages\n"
            f"take pipeline x interleave of at most {layers}",
            field="pipeline",
        )
    return tuple(pairwise(layers * number // stages for number in range(stages + 1)))


def split(
    model: nn.Module,
    stages: Sequence[Sequence[int]],
    *,
    pipeline: int,
    rank: int,
    chain: Chain | None = None,
) -> list[nn.Module]:
    """Return the parts of ``rank`` in a pipeline of ``pipeline`` ranks: of stages rank, rank + pipeline, ...

    ``stages``: layers [first, end) of each stage, as a plan has them. ``model`` is one of ours, an
    ``nn.Sequential`` whose modules are the layers, or anything that ``chain`` says how to run; its modules
    are taken over. The first part has the embedding, the last one the final norm and the head. A weight of
    several stages (a tied embedding) is in each of their parts under the whole model's first name for it,
    and in ``part.tied`` with those stages: the pipeline adds up its gradients. Raises BadRequestError for
    models that cannot be cut, and for stages that are not all of its layers in order.
    """
    if not 0 <= rank < pipeline or len(stages) % pipeline:
        raise BadRequestError(
            f"{len(stages)} stages do not go over a pipeline of {pipeline} ranks, of which this is {rank}\n"
            "give pipeline x interleave of them",
            field="stages",
        )
    cuts = _checked(stages, count_layers(model, chain))
    if isinstance(model, CausalLM) and chain is None:
        if model.prompt is not None:
            raise BadRequestError(
                "a model with a prompt cannot be cut into stages\ntrain it with pipeline=1",
                field="model",
            )
        groups = _groups(model, cuts)
        parts: list[nn.Module] = [CausalLMPart(model, *cut) for cut in cuts[rank::pipeline]]
    else:
        run = [_names(model, chain, cut, len(cuts), number) for number, cut in enumerate(cuts)]
        lists = [chain.layers] if chain is not None else []
        groups = _shared(model, run)
        _refuse_left_out(model, run)
        parts = [ChainPart(model, names, lists) for names in run[rank::pipeline]]
    for part, stage in zip(parts, range(rank, len(cuts), pipeline), strict=True):
        part.tied = {  # type: ignore[assignment]
            name: holders for name, holders in groups.items() if stage in holders
        }
    return parts


def _checked(stages: Sequence[Sequence[int]], layers: int) -> Stages:
    ends = [0]
    for first, end in stages:
        if first != ends[-1] or end <= first:
            break
        ends.append(end)
    if len(ends) - 1 != len(stages) or ends[-1] != layers:
        raise BadRequestError(
            f"stages {[list(one) for one in stages]} are not the {layers} layers of the model in order\n"
            "each stage begins where the one before ends, and has a layer at least",
            field="stages",
        )
    return tuple(pairwise(ends))


def _groups(model: CausalLM, cuts: Stages) -> dict[str, tuple[int, ...]]:
    """Return the weights of several stages by their first name, with those stages."""
    if model.head.weight is not model.embed.weight or len(cuts) == 1:
        return {}
    return {"embed.weight": (0, len(cuts) - 1)}


def _layers(model: nn.Module, chain: Chain | None) -> nn.ModuleList | nn.Sequential:
    if chain is None:
        if type(model).forward is nn.Sequential.forward:
            assert isinstance(model, nn.Sequential)
            return model
        name = type(model).__name__
        if isinstance(model, Transformer | Bert | T5):
            raise BadRequestError(
                f"{name} cannot be cut into stages\n"
                "of our models decoders can (GPT, CausalLM); train this one with pipeline=1",
                field="model",
            )
        raise BadRequestError(
            f"{name} cannot be cut into stages, as nobody knows its layers\n"
            "give chain=Chain(layers=, first=, last=) with the names of its modules in the order in which "
            "they run, or train it with pipeline=1",
            field="chain",
        )
    try:
        layers = model.get_submodule(chain.layers)
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise BadRequestError(
            f"chain.layers {chain.layers!r} is no list of modules of {type(model).__name__}\n"
            f"its lists: {', '.join(_lists(model)) or 'none'}",
            field="chain.layers",
        )
    return layers


def _lists(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential)
    ]


def _names(
    model: nn.Module, chain: Chain | None, cut: tuple[int, int], count: int, stage: int
) -> list[str]:
    """Return the names of the modules that a stage runs, in order."""
    lead = "" if chain is None else f"{chain.layers}."
    names = [f"{lead}{number}" for number in range(*cut)]
    if chain is None:
        children = list(model._modules)  # a module may stand there twice
        return children[cut[0] : cut[1]]
    if stage == 0:
        names = [*chain.first, *names]
    if stage == count - 1:
        names += chain.last
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise BadRequestError(
                f"chain: {type(model).__name__} has no module {name!r}\n"
                f"it has: {', '.join(name for name, _ in model.named_children())}",
                field="chain",
            ) from None
    return names


def _refuse_left_out(model: nn.Module, run: Sequence[Sequence[str]]) -> None:
    """Raise for parameters that no stage would have: the parts would compute something else."""
    leads = tuple(f"{name}." for names in run for name in names)
    left = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not name.startswith(leads)
    ]
    if left:
        raise BadRequestError(
            f"chain leaves {len(left)} parameters of {type(model).__name__} out\n"
            f"name the modules that run them: {', '.join(left[:5])}",
            field="chain",
        )


def _shared(model: nn.Module, run: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters of several stages, by their first name in the model, with those stages."""
    leads = _leads(model)
    holders: dict[str, set[int]] = {}
    for stage, names in enumerate(run):
        for name in names:
            for own, _ in model.get_submodule(name).named_parameters(remove_duplicate=False):
                holders.setdefault(leads[f"{name}.{own}"], set()).add(stage)
    return {name: tuple(sorted(found)) for name, found in holders.items() if len(found) > 1}


def _leads(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by each of its names."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found


def _ties_of(model: nn.Module, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (first name in the model, name) of what ``names`` have under another name than the first."""
    leads = _leads(model)
    own = [
        f"{name}.{inner}"
        for name in names
        for inner, _ in model.get_submodule(name).named_parameters(remove_duplicate=False)
    ]
    return [(leads[name], name) for name in own if leads[name] != name]


def _node(root: nn.Module, path: str, lists: Sequence[str]) -> nn.Module:
    """Return the module at ``path``, making what is missing; at a path of ``lists`` it is a list."""
    node, here = root, ""
    for name in path.split(".") if path else ():
        here = f"{here}.{name}" if here else name
        if name not in node._modules:
            node.add_module(name, LayerRun((), 0) if here in lists else nn.Module())
        found = node._modules[name]
        assert found is not None
        node = found
    return node
