"""Models in Hugging Face's safetensors files: a checkpoint exported to them, and a sharded model filled.

A folder has ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
``model.safetensors.index.json``. Called by users and by ``stoker train export``. Needs ``safetensors``.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.exceptions import BadRequestError, NotFoundError, StartError
from stoker_train.durable import sync_folder, whole_file
from stoker_train.sharded.checkpoints.full_state import read_model, verified
from stoker_train.sharded.checkpoints.loading import Contents
from stoker_train.sharded.checkpoints.models import ModelTensors, modules_in
from stoker_train.sharded.checkpoints.pieces import pieces_of

__all__ = ("export", "load")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_GB = 10**9


def export(
    folder: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None = None,
    model: str = "model",
    dtype: torch.dtype | None = None,
    max_file_gb: float = 5.0,
) -> list[Path]:
    """Write the model of a checkpoint as safetensors files; return them.

    ``folder``: of a job (its newest, or ``step``), or one checkpoint. ``to``: a folder, or a file that ends
    in ``.safetensors``. ``dtype``: of the floating-point tensors in place of their own. A tied weight is
    written once, as Hugging Face has it. Files of an earlier export to the folder are removed.

    NotFoundError where there is no checkpoint, BadRequestError for a damaged one, StartError without
    ``safetensors``.
    """
    torch_files = _torch_files()
    stored = verified(folder, step)
    contents = Contents(stored)
    tied = {
        one
        for names in contents.plain["modules"].get(model, {}).get("tied", ())
        for one in names[1:]
    }
    tensors = {
        key: _of_dtype(value, dtype).contiguous()
        for key, value in read_model(contents, model).items()
        if key not in tied
    }
    path = Path(to)
    metadata = {"format": "pt", "step": str(stored.step)}
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(torch_files, path, tensors, metadata)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    parts = _parts(tensors, int(max_file_gb * _GB))
    if len(parts) == 1:
        _write(torch_files, path / _SINGLE, parts[0], metadata)
        _remove_others(path, {_SINGLE})
        return [path / _SINGLE]
    names = [f"model-{n + 1:05d}-of-{len(parts):05d}.safetensors" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _write(torch_files, path / name, part, metadata)
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
        "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
    }
    with whole_file(path / _INDEX) as file:
        file.write(json.dumps(index, indent=2, sort_keys=True).encode())
    _remove_others(path, {_INDEX, *names})
    sync_folder(path)
    return [path / name for name in names]


def load(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
) -> None:
    """Fill a model, or its parts on this rank, from safetensors files; each rank reads what it has.

    ``folder``: with the files of Hugging Face, or one file. ``names``: the name in the files of tensors
    whose name there is another. Values are given the model's dtype. ``strict``: the files have all tensors
    of the model; those that it does not have are left out.

    NotFoundError where there are no files, BadRequestError for a tensor that is missing or of another shape,
    StartError without ``safetensors``.
    """
    _torch_files()
    safe_open = importlib.import_module("safetensors").safe_open
    path = Path(folder)
    where = _where(path, safe_open)
    modules = modules_in(model)
    if modules is None:
        raise BadRequestError(
            f"model is {type(model).__name__}\ngive a torch.nn.Module, or a list of them",
            field="model",
        )
    own = ModelTensors("model", modules)
    by_file: dict[Path, list[tuple[str, str]]] = {}
    missing = []
    for key in own.tensors:
        place = own.place(key, own.tensors[key])
        others = next((one for one in own.tied if key in one), [place.name])
        wanted = [(names or {}).get(one, one) for one in others]
        found = next((one for one in wanted if one in where), None)
        if found is None:
            missing.append(wanted[0])
        else:
            by_file.setdefault(where[found], []).append((key, found))
    if missing and strict:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadRequestError(
            f"{path} does not have {missing[0]}{more}\n"
            "give names={name in the model: name in the files}, or strict=False",
            field="names",
        )
    with torch.no_grad():
        for file, keys in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for key, found in keys:
                    _fill(own, key, opened.get_slice(found), path)


def _fill(model: ModelTensors, key: str, source: Any, path: Path) -> None:
    place = model.place(key, model.tensors[key])
    shape = list(source.get_shape())
    if shape != list(place.shape):
        raise BadRequestError(
            f"{key} is {shape} in {path} and {list(place.shape)} in the model\n"
            "give the files of this model, or names=",
            field="folder",
        )
    for piece in place.put(key, pieces_of(key, model.tensors[key])):
        ends = [at + size for at, size in zip(piece.offsets, piece.data.shape, strict=True)]
        block = tuple(slice(at, end) for at, end in zip(piece.offsets, ends, strict=True))
        # A number has no slices.
        piece.data.copy_(source[block] if block else source[...])


def _where(path: Path, safe_open: Any) -> dict[str, Path]:
    """Return the file of each tensor."""
    index = path / _INDEX
    if index.is_file():
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            where = {key: path / name for key, name in listed.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadRequestError(
                f"{index} has no weight_map\ncopy it again: {error!r}", field="folder"
            ) from None
        lost = next((file for file in where.values() if not file.is_file()), None)
        if lost is not None:
            raise NotFoundError(
                f"{lost} is not there, and {_INDEX} names it\ncopy it, too", field="folder"
            )
        return where
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
    else:
        files = []
    if not files:
        raise NotFoundError(
            f"folder {path} has no safetensors files\n"
            f"give a folder with {_SINGLE} or {_INDEX}, or one file",
            field="folder",
        )
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except Exception as error:
            raise BadRequestError(
                f"{file} is no safetensors file\ncopy it again: {error}", field="folder"
            ) from None
    return found


def _parts(tensors: dict[str, torch.Tensor], limit_nbytes: int) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in files of at most ``limit_nbytes``; one that is larger has its own."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit_nbytes:
            parts.append({})
            size = 0
        parts[-1][key] = tensor
        size += tensor.nbytes
    return parts


def _write(
    torch_files: Any, path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch_files.save_file(tensors, partial, metadata=metadata)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _remove_others(path: Path, written: set[str]) -> None:
    """Remove an earlier export of the model: readers take the one file before the index, or its parts."""
    for one in (path / _SINGLE, path / _INDEX, *path.glob("model-?????-of-?????.safetensors")):
        if one.name not in written:
            one.unlink(missing_ok=True)


def _of_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _torch_files() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise StartError(
            "safetensors is not installed\npip install 'stoker[train]' or pip install safetensors"
        ) from None
