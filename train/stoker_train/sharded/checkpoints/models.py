"""The tensors of modules by the names that they have in the whole model, whatever cut or wrapped them.

Called by the state. A part of a pipeline may have names of its own: then it says what they are in the whole
model, by a method ``full_name(name)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.exceptions import BadRequestError
from stoker_train.sharded.checkpoints.pieces import Place

__all__ = ("ModelTensors", "modules_in")

_ROWS_OF = "stoker_row_blocks"
"""By this name a module says of which parameters its own are rows (``parallel.tensor.our_models``)."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that torch.compile and wrappers for recomputation add."""


def modules_in(value: Any) -> list[torch.nn.Module] | None:
    """Return the modules that a value of the state is: one, or parts of one; None if it is another thing."""
    if isinstance(value, torch.nn.Module):
        return [value]
    if (
        isinstance(value, Sequence)
        and value
        and all(isinstance(one, torch.nn.Module) for one in value)
    ):
        return list(value)
    return None


class ModelTensors:
    """The parameters and buffers of a model, or of the parts of one that this rank has.

    ``name``: of the model in the state, by which its keys begin.
    """

    def __init__(self, name: str, modules: Sequence[torch.nn.Module]) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}
        """By full name, sharing the model's memory; a tied parameter under its first name alone."""
        self.extra: dict[str, Any] = {}
        """What modules keep beside (``get_extra_state``), by full name."""
        self.places: dict[torch.Tensor, Place] = {}
        """Each parameter in the whole model."""
        self._blocks: dict[str, Place] = {}
        self.tied: list[list[str]] = []
        """Names of one parameter each, where it has several."""
        self._modules = [(_unwrapped(one), _renaming(one)) for one in modules]
        for module, full_name in self._modules:
            # FSDP's hook gives the sharded parameters back first: they are asked for after this.
            for key, value in module.state_dict().items():
                if isinstance(value, torch.Tensor):
                    self.tensors[full_name(key)] = value
                else:
                    self.extra[full_name(key)] = value
            self._blocks |= _blocks_of(module, full_name)
        found: dict[torch.Tensor, list[str]] = {}
        for module, full_name in self._modules:
            for key, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(parameter, []).append(full_name(key))
        for held_by, names in found.items():
            self.places[held_by] = self.place(names[0], held_by)
            if len(names) > 1:
                self.tied.append(names)
        for names in self.tied:
            for name in names[1:]:
                self.tensors.pop(name, None)
        for key, held in self.tensors.items():
            if held.is_meta:
                raise BadRequestError(
                    f"{key} of the state's {name!r} is on the meta device\n"
                    "call model.to_empty(device=...) first",
                    field="state",
                )

    def place(self, key: str, tensor: torch.Tensor) -> Place:
        """Return where a tensor lies in the whole model."""
        return self._blocks.get(key) or Place(key, 0, tuple(tensor.shape))

    @property
    def all_names(self) -> list[str]:
        """All names of all tensors in the whole model."""
        whole = (self.place(key, tensor).name for key, tensor in self.tensors.items())
        return [*dict.fromkeys(whole), *(name for names in self.tied for name in names[1:])]

    def load_extra(self, extra: dict[str, Any]) -> None:
        """Give modules back what they kept beside."""
        for module, full_name in self._modules:
            own = {
                key: extra[full_name(key)]
                for key, value in module.state_dict().items()
                if not isinstance(value, torch.Tensor) and full_name(key) in extra
            }
            if own:
                module.load_state_dict(own, strict=False)


def _blocks_of(module: torch.nn.Module, full_name: Any) -> dict[str, Place]:
    """Return the parameters that are rows of others, as modules say that tensor parallelism has cut."""
    found = {}
    for path, child in module.named_modules():
        blocks = getattr(child, _ROWS_OF, None)
        for own, block in blocks.items() if isinstance(blocks, dict) else ():
            lead = f"{path}." if path else ""
            whole = full_name(lead + block.name)
            found[full_name(lead + own)] = Place(whole, block.first, tuple(block.shape))
    return found


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    parallel = torch.nn.parallel.DistributedDataParallel
    return module.module if isinstance(module, parallel) else module


def _renaming(module: torch.nn.Module) -> Any:
    own = getattr(_unwrapped(module), "full_name", None)

    def full_name(name: str) -> str:
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        plain = ".".join(parts)
        return str(own(plain)) if callable(own) else plain

    return full_name
