"""The states of an optimizer by the names of its parameters, taken apart and put together.

A state that is shaped as its parameter is cut as it is, one number for each parameter is kept as that, and
anything else is kept whole where its parameter is not cut, and refused where it is. torch's
``get_optimizer_state_dict`` is not used: to load, it takes a step with the optimizer, which ours and wrappers
of it count, and it knows no parts of a model. Called by the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError
from stoker_train.sharded.checkpoints.pieces import (
    Piece,
    Place,
    local_of,
    piece_of_shard,
    pieces_of,
    writes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("OptimizerParts", "OptimizerStates")

_NOT_OPTIONS = ("params", "param_names")
Scalars = dict[str, dict[str, Any]]


class OptimizerParts:
    """The states of an optimizer, taken apart: ``pieces`` are views, the others copies or plain values."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.tensors: dict[str, list[str]] = {}
        """The names of the states in ``pieces``, by parameter."""
        self.scalars: list[tuple[str, str, torch.Tensor]] = []
        """Parameter, name and value of each state that is one number."""
        self.values: Scalars = {}
        """States that are no tensors, by parameter and name."""
        self.groups: list[dict[str, Any]] = []
        """The options of each group, and the names of its parameters under ``names``."""
        self.extra: dict[str, Any] = {}
        """What else the optimizer's state_dict has."""


class OptimizerStates:
    """An optimizer whose parameters are at ``places`` of the whole model, under ``name`` in the state."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        places: Mapping[torch.Tensor, Place],
    ) -> None:
        self.name, self._optimizer = name, optimizer
        self._params: list[tuple[Place, torch.Tensor]] = []
        for number, group in enumerate(optimizer.param_groups):
            for order, parameter in enumerate(group["params"]):
                place = places.get(parameter)
                if place is None:
                    raise BadRequestError(
                        f"parameter {order} of group {number} of the state's {name!r}, "
                        f"{list(parameter.shape)}, belongs to none of its modules\n"
                        "put the model into the state, and make the optimizer after it was sharded",
                        field="state",
                    )
                self._params.append((place, parameter))

    @property
    def names(self) -> list[str]:
        """The names of the parameters in the whole model, in the optimizer's order."""
        return [place.name for place, _ in self._params]

    def key(self, parameter: str, state: str) -> str:
        """Return the key of a state in the checkpoint."""
        return f"{self.name}.state.{parameter}.{state}"

    def take(self, *, once: bool = False) -> OptimizerParts:
        """Take the states apart, as they are now; ``once``: a block on one of the ranks that have it."""
        parts = OptimizerParts()
        saved = self._optimizer.state_dict()
        at = 0
        for group in saved["param_groups"]:
            count = len(group["params"])
            options = {key: one for key, one in group.items() if key not in _NOT_OPTIONS}
            parts.groups.append(
                {**options, "names": list(dict.fromkeys(self.names[at : at + count]))}
            )
            for key in group["params"]:
                place, parameter = self._params[at]
                at += 1
                for state, value in saved["state"].get(key, {}).items():
                    self._take_state(parts, place, parameter, state, value, once)
        parts.extra = {
            key: one for key, one in saved.items() if key not in ("state", "param_groups")
        }
        return parts

    def _take_state(
        self,
        parts: OptimizerParts,
        place: Place,
        parameter: torch.Tensor,
        state: str,
        value: Any,
        once: bool,
    ) -> None:
        full_name = place.name
        if not isinstance(value, torch.Tensor):
            parts.values.setdefault(full_name, {})[state] = value
            return
        key = self.key(full_name, state)
        pieces = self._pieces(key, parameter, value)
        if pieces is not None:
            if once and not writes(key, value if isinstance(value, DTensor) else parameter):
                pieces = []
            shaped = value.shape in (parameter.shape, local_of(parameter).shape)
            parts.pieces += place.put(key, pieces) if shaped else pieces
            known = parts.tensors.setdefault(full_name, [])
            if state not in known:
                known.append(state)
        elif value.numel() == 1:
            parts.scalars.append((full_name, state, local_of(value)))
        else:
            raise BadRequestError(
                f"state {state} of {full_name} is {list(value.shape)} on this rank, which is neither "
                f"its parameter's {list(parameter.shape)} nor one number\n"
                "a checkpoint cannot cut it as its parameter is cut: train it with zero=0 and tensor=1, "
                "or with an optimizer whose states are shaped as the parameters",
                field="state",
            )

    @staticmethod
    def _pieces(key: str, parameter: torch.Tensor, value: torch.Tensor) -> list[Piece] | None:
        """Return the blocks of a state that are here, None if it is no block of anything."""
        if isinstance(value, DTensor):
            return pieces_of(key, value)
        if isinstance(parameter, DTensor):
            # As an optimizer has it that keeps its states elsewhere (offload).
            if value.shape == local_of(parameter).shape and value.dim():
                return piece_of_shard(key, value.detach(), parameter)
            if not is_cut(parameter) and value.dim() and value.numel() > 1:
                return pieces_of(key, value)
            return None
        if value.dim() == 0 or (value.numel() == 1 and value.shape != parameter.shape):
            return None
        return pieces_of(key, value)

    def targets(
        self,
        tensors: Mapping[str, list[str]],
        forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        saved_names: Mapping[str, str],
    ) -> tuple[list[dict[str, torch.Tensor]], list[Piece]]:
        """Return new states by name for each parameter, and their blocks to be read into.

        ``tensors``: the names of the states that the checkpoint has, by parameter. ``forms``: shape and
        dtype of each of its keys. ``saved_names``: the names of the parameters in it.
        """
        states: list[dict[str, torch.Tensor]] = []
        pieces: list[Piece] = []
        present: Mapping[torch.Tensor, dict[str, Any]] = self._optimizer.state
        for place, parameter in self._params:
            held = present.get(parameter, {})
            saved_name = saved_names[place.name]
            own: dict[str, torch.Tensor] = {}
            for state in tensors.get(saved_name, ()):
                key = self.key(saved_name, state)
                shape, dtype = forms[key]
                if shape == place.shape:
                    own[state], blocks = _like(parameter, dtype, held.get(state), key)
                    pieces += place.put(key, blocks)
                    continue
                if is_cut(parameter) or place.shape != tuple(parameter.shape):
                    raise BadRequestError(
                        f"state {state} of {place.name} is {list(shape)} in the checkpoint, and its "
                        f"parameter {list(place.shape)} is cut here\n"
                        "load it where the parameter is whole, or begin with a new optimizer",
                        field="into",
                    )
                own[state] = torch.empty(shape, dtype=dtype, device=parameter.device)
                pieces += pieces_of(key, own[state])
            states.append(own)
        return states, pieces

    def put(
        self,
        states: list[dict[str, Any]],
        groups: list[dict[str, Any]],
        extra: dict[str, Any],
        saved_names: Mapping[str, str],
    ) -> None:
        """Give the optimizer its states, by name for each parameter, and the options of its groups."""
        options_of = {name: group for group in groups for name in group["names"]}
        present = self._optimizer.state_dict()
        made: list[dict[str, Any]] = []
        at = 0
        for number, group in enumerate(present["param_groups"]):
            own = self.names[at : at + len(group["params"])]
            at += len(own)
            found = [
                options_of[saved_names[name]] for name in own if saved_names[name] in options_of
            ]
            if found:
                self._check_alike(number, own, found)
                group = {
                    **group,
                    **{key: value for key, value in found[0].items() if key != "names"},
                }
            made.append({**group, "params": list(range(at - len(own), at))})
        by_number = {number: dict(own) for number, own in enumerate(states) if own}
        self._optimizer.load_state_dict({**extra, "state": by_number, "param_groups": made})
        self._keep_dtypes(states)

    def _check_alike(self, number: int, own: list[str], found: list[dict[str, Any]]) -> None:
        first = found[0]
        for other in found[1:]:
            if other is first:
                continue
            for option, value in first.items():
                if option != "names" and not _equal(value, other.get(option)):
                    raise BadRequestError(
                        f"group {number} of the state's {self.name!r} ({own[0]} ...) has parameters that "
                        f"were of groups with {option}={value} and {option}={other.get(option)}\n"
                        "make the groups of the optimizer as they were when the checkpoint was saved",
                        field="into",
                    )

    def _keep_dtypes(self, states: list[dict[str, Any]]) -> None:
        """Undo torch's rounding of states to their parameter's dtype: they are as they were saved."""
        for (_, parameter), own in zip(self._params, states, strict=True):
            for state, value in own.items():
                now = self._optimizer.state.get(parameter, {}).get(state)
                if (
                    isinstance(now, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and now.dtype != value.dtype
                ):
                    self._optimizer.state[parameter][state] = value.to(now.device)


def _like(
    parameter: torch.Tensor, dtype: torch.dtype, present: Any, key: str
) -> tuple[torch.Tensor, list[Piece]]:
    """Return a new state that is cut as its parameter, and its blocks; plain where ``present`` is."""
    local = torch.empty_like(local_of(parameter), dtype=dtype)
    if not isinstance(parameter, DTensor):
        return local, pieces_of(key, local)
    blocks = piece_of_shard(key, local, parameter)
    if isinstance(present, torch.Tensor) and not isinstance(present, DTensor):
        return local, blocks
    made = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return made, blocks


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether other ranks have other parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(one.is_replicate() for one in tensor.placements)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)
