"""A checkpoint as one whole state, without a process group: to look at, to convert, to begin from.

Called by users, by ``safetensors_files`` and by ``stoker train export``; one process, no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.exceptions import BadRequestError
from stoker_train.sharded.checkpoints import claims, layout
from stoker_train.sharded.checkpoints.layout import Stored, one_checkpoint
from stoker_train.sharded.checkpoints.loading import Contents
from stoker_train.sharded.checkpoints.pieces import pieces_of
from stoker_train.sharded.checkpoints.ranks import Ranks
from stoker_train.sharded.checkpoints.saving import Order, write
from stoker_train.sharded.checkpoints.state import State, scalars_of

if TYPE_CHECKING:
    import os

__all__ = ("load_full", "save_full", "verified")

_TIMEOUT_S = 1800.0


def load_full(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    model: str = "model",
    optimizer: str = "optimizer",
) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
    """Return step, model and optimizer of the newest checkpoint in a folder, on the host.

    ``folder``: of a job, or one checkpoint in it. The model is a state dict by full names. The optimizer is
    ``{"state": {name: {state: tensor}}, "param_groups": [{"params": [names], options}]}``, which
    ``torch.distributed.checkpoint.state_dict`` takes; empty where none was saved as ``optimizer``.

    NotFoundError where there is no checkpoint, BadRequestError for one that is damaged.
    """
    stored = verified(folder, step)
    contents = Contents(stored)
    tensors = read_model(contents, model)
    return stored.step, tensors, _optimizer_of(contents, optimizer)


def save_full(
    folder: str | os.PathLike[str],
    step: int,
    model: Mapping[str, torch.Tensor],
    *,
    meta: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write a whole state dict as the newest checkpoint of a folder, and return where it is.

    Any sharded model loads it by ``load({"model": model})``: it has no optimizer. The folder is taken over:
    a job that writes to it is fenced. Raises BadRequestError for
    what is no tensor, and OSError with what went wrong on the disk.
    """
    for key, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise BadRequestError(
                f"model[{key!r}] is {type(tensor).__name__}, and not a tensor\n"
                "give a state dict of tensors by name",
                field="model",
            )
    path = Path(folder)
    pieces = [one for key, tensor in model.items() for one in pieces_of(f"model.{key}", tensor)]
    plain = State({}).take(0).plain
    plain["modules"] = {"model": {"extra": {}, "tied": []}}
    claim = claims.take(path, layout.newest_claim(path).owner, layout.newest_claim(path).attempt)
    order = Order(step, path, dict(meta or {}), pieces, plain, claim, 1, keep)
    saved = write(order, Ranks.alone())
    if saved.path is None:
        raise OSError(f"the state was not written to {path}: {saved.problem}")
    return saved.path


def verified(folder: str | os.PathLike[str], step: int | None = None) -> Stored:
    """Return the newest checkpoint in a folder, or the one that it is, once its files are found whole."""
    stored = one_checkpoint(folder, step)
    what = layout.verify(stored)
    if what and step is None and not (stored.path / layout.MANIFEST).exists():
        # Its job has removed it meanwhile, after it wrote newer ones.
        stored = one_checkpoint(folder)
        what = layout.verify(stored)
    if what:
        raise BadRequestError(
            f"checkpoint {stored.path.name} is not whole: {what}\n"
            "give the step of another one, as `stoker train checkpoints --verify` lists them",
            field="folder",
        )
    return stored


def read_model(contents: Contents, name: str = "model") -> dict[str, torch.Tensor]:
    """Return the whole state dict of the module that was saved as ``name``, tied names included."""
    if name not in contents.plain["modules"]:
        there = ", ".join(contents.plain["modules"]) or "none"
        raise BadRequestError(
            f"the checkpoint has no model {name!r}\nits models: {there}", field="model"
        )
    found = {key: _new(contents, f"{name}.{key}") for key in contents.keys_of(name)}
    contents.read([one for key, made in found.items() for one in pieces_of(f"{name}.{key}", made)])
    for names in contents.plain["modules"][name]["tied"]:
        own = next((found[one] for one in names if one in found), None)
        if own is not None:
            found |= dict.fromkeys(names, own)
    return found


def _new(contents: Contents, key: str) -> torch.Tensor:
    shape, dtype = contents.forms[key]
    return torch.empty(shape, dtype=dtype)


def _optimizer_of(contents: Contents, name: str) -> dict[str, Any]:
    saved = contents.plain["optimizers"].get(name)
    if saved is None:
        return {}
    states: dict[str, dict[str, Any]] = {}
    pieces = []
    for parameter, names in saved["tensors"].items():
        for state in names:
            key = f"{name}.state.{parameter}.{state}"
            made = states.setdefault(parameter, {})[state] = _new(contents, key)
            pieces += pieces_of(key, made)
    contents.read(pieces)
    for parameter, values in scalars_of(saved).items():
        states.setdefault(parameter, {}).update(values)
    groups = [
        {"params": group["names"], **{key: one for key, one in group.items() if key != "names"}}
        for group in saved["groups"]
    ]
    return {**saved["extra"], "state": states, "param_groups": groups}
