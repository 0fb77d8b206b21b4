"""A training state taken apart: blocks of tensors by name, and all that is none as plain values.

``{"model": module or its parts, "optimizer": optimizer, **others}``: a module and an optimizer may stand
under any name; what has ``state_dict`` is kept by that; ``per_rank`` is each rank's own. Called by saving
and loading; it copies what is plain, and no block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError
from stoker_train.elastic.state.trees import flatten, from_portable, to_portable
from stoker_train.sharded.checkpoints.models import ModelTensors, modules_in
from stoker_train.sharded.checkpoints.optimizers import OptimizerParts, OptimizerStates
from stoker_train.sharded.checkpoints.pieces import Piece, Place, pieces_of, writes

__all__ = ("PER_RANK", "State", "StateParts", "merged", "read_plain", "scalars_of")

PER_RANK = "per_rank"
Plain = dict[str, Any]


@dataclass(slots=True)
class StateParts:
    """A state taken apart. ``pieces`` share the memory of the state; ``plain`` is a copy."""

    pieces: list[Piece] = field(default_factory=list)
    plain: Plain = field(default_factory=dict)


class State:
    """The state that a rank gave to be saved or loaded into. BadRequestError where it is no mapping."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        if not isinstance(given, Mapping):
            raise BadRequestError(
                f"state is {type(given).__name__}, and not a mapping\n"
                'give {"model": model, "optimizer": optimizer, ...}',
                field="state",
            )
        self.models: dict[str, ModelTensors] = {}
        self.optimizers: dict[str, OptimizerStates] = {}
        self.values: dict[str, Any] = {}
        self.per_rank: Any = given.get(PER_RANK)
        places: dict[torch.Tensor, Place] = {}
        for name, value in given.items():
            if (modules := modules_in(value)) is not None:
                self.models[name] = ModelTensors(name, modules)
                places |= self.models[name].places
        for name, value in given.items():
            if name in self.models or name == PER_RANK:
                continue
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers[name] = OptimizerStates(name, value, places)
            else:
                self.values[name] = value

    def take(self, rank: int, *, once: bool = False) -> StateParts:
        """Take the state apart as it is now. Values that all ranks have are taken from rank 0.

        ``once``: a block that several ranks have as a DTensor, on one of them; all have to take part.
        """
        parts = StateParts()
        modules: Plain = {}
        for name, model in self.models.items():
            for key, tensor in model.tensors.items():
                place = model.place(key, tensor)
                whole = f"{name}.{place.name}"
                if not once or writes(whole, tensor):
                    parts.pieces += place.put(whole, pieces_of(key, tensor))
            modules[name] = {"extra": _portable(model.extra, name), "tied": model.tied}
        optimizers: Plain = {}
        for name, states in self.optimizers.items():
            taken = states.take(once=once)
            parts.pieces += taken.pieces
            optimizers[name] = _plain_of(taken, name)
        values = {
            name: _portable(value.state_dict() if _is_stateful(value) else value, name)
            for name, value in (self.values.items() if rank == 0 else ())
        }
        parts.plain = {
            "modules": modules,
            "optimizers": optimizers,
            "values": values,
            PER_RANK: _portable(self.per_rank, PER_RANK),
        }
        return parts


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _plain_of(taken: OptimizerParts, name: str) -> Plain:
    stacked: dict[tuple[Any, ...], tuple[list[str], list[torch.Tensor]]] = {}
    for parameter, state, value in taken.scalars:
        kind = (state, value.dtype, value.device, tuple(value.shape))
        names, values = stacked.setdefault(kind, ([], []))
        names.append(parameter)
        values.append(value)
    return {
        "tensors": taken.tensors,
        # Stacked: one copy from the device for all of them.
        "scalars": [
            {"state": kind[0], "names": names, "values": torch.stack(values).cpu()}
            for kind, (names, values) in stacked.items()
        ],
        "values": _portable(taken.values, name),
        "groups": _portable(taken.groups, name),
        "extra": _portable(taken.extra, name),
    }


def _portable(value: Any, name: str) -> Any:
    """Return a copy on the host that ``torch.load(weights_only=True)`` reads."""
    _refuse_dtensors(value, name)
    flat = flatten(value, name)
    return to_portable(flat.skeleton, [one.to("cpu", copy=True) for one in flat.tensors])


def _refuse_dtensors(value: Any, path: str) -> None:
    if isinstance(value, DTensor):
        raise BadRequestError(
            f"{path} of the state is a DTensor, which only modules and optimizers may have\n"
            "give the module that owns it, or value.full_tensor()",
            field="state",
        )
    if isinstance(value, Mapping):
        for key, one in value.items():
            _refuse_dtensors(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            _refuse_dtensors(one, f"{path}[{place}]")


def merged(plains: list[Plain]) -> Plain:
    """Return the plain part of a whole state, of those of all ranks in their order.

    What several ranks have (replicas, shards of one parameter) is taken from the first of them.
    """
    found: Plain = {
        "version": 1,
        "modules": {},
        "optimizers": {},
        "values": plains[0]["values"],
        PER_RANK: [one[PER_RANK] for one in plains],
    }
    for plain in plains:
        for name, module in plain["modules"].items():
            into = found["modules"].setdefault(name, {"extra": {}, "tied": []})
            into["extra"] = {**module["extra"], **into["extra"]}
            into["tied"] += [one for one in module["tied"] if one not in into["tied"]]
        for name, optimizer in plain["optimizers"].items():
            _merge_optimizer(found["optimizers"], name, optimizer)
    return found


def _merge_optimizer(found: Plain, name: str, optimizer: Plain) -> None:
    if name not in found:
        found[name] = optimizer
        return
    into = found[name]
    # A rank may have a state of a parameter that those before it have none of: their part had no gradient.
    for parameter, states in optimizer["tensors"].items():
        had = into["tensors"].setdefault(parameter, states)
        if had != states:
            into["tensors"][parameter] = list(dict.fromkeys([*had, *states]))
    for parameter, values in optimizer["values"].items():
        into["values"][parameter] = {**values, **into["values"].get(parameter, {})}
    known = {one for group in into["groups"] for one in group["names"]}
    for group in optimizer["groups"]:
        own = [one for one in group["names"] if one not in known]
        if own:
            into["groups"].append({**group, "names": own})
    held = {(scalars["state"], one) for scalars in into["scalars"] for one in scalars["names"]}
    for scalars in optimizer["scalars"]:
        state = scalars["state"]
        places = [n for n, one in enumerate(scalars["names"]) if (state, one) not in held]
        if places:
            into["scalars"].append(
                {
                    "state": scalars["state"],
                    "names": [scalars["names"][n] for n in places],
                    "values": scalars["values"][places],
                }
            )


def read_plain(path: Any) -> Plain:
    """Return the plain part of a checkpoint from its file; values are as they were given."""
    plain: Plain = torch.load(path, map_location="cpu", weights_only=True)
    for module in plain["modules"].values():
        module["extra"] = from_portable(module["extra"])
    for optimizer in plain["optimizers"].values():
        for name in ("values", "groups", "extra"):
            optimizer[name] = from_portable(optimizer[name])
    plain["values"] = from_portable(plain["values"])
    plain[PER_RANK] = [from_portable(one) for one in plain[PER_RANK]]
    return plain


def scalars_of(optimizer: Plain) -> dict[str, dict[str, Any]]:
    """Return the states of an optimizer that are one number or no tensor, by parameter and name."""
    found: dict[str, dict[str, Any]] = {
        parameter: dict(values) for parameter, values in optimizer["values"].items()
    }
    for scalars in optimizer["scalars"]:
        for parameter, value in zip(scalars["names"], scalars["values"], strict=True):
            found.setdefault(parameter, {})[scalars["state"]] = value.clone()
    return found
