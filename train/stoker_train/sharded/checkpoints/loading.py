"""A checkpoint read into a state under any plan: each rank reads the blocks that it needs.

All ranks agree on what is wrong before anything is written, so they load together or fail alike. Called by
the store, and by the full state for one process.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stoker.exceptions import BadRequestError, NotFoundError
from stoker_train.sharded.checkpoints import layout
from stoker_train.sharded.checkpoints.pieces import Piece, pieces_of
from stoker_train.sharded.checkpoints.state import PER_RANK, State, read_plain, scalars_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_train.sharded.checkpoints.layout import Stored
    from stoker_train.sharded.checkpoints.ranks import Ranks

__all__ = ("Contents", "Loaded", "load_into")

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded.

    ``values``: the plain values that were saved. ``per_rank``: this rank's own, None where another number of
    ranks has saved.
    """

    step: int
    meta: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: Any = None
    ranks: int = 1
    """The number of ranks that saved it."""


class Contents:
    """A checkpoint as it is on disk: its plain part, and the form of each of its tensors.

    NotFoundError where it is removed meanwhile. torch's metadata is a pickle: only of a trusted folder.
    """

    def __init__(self, stored: Stored) -> None:
        self._path = stored.path
        self._reader = FileSystemReader(stored.path)
        with self._there():
            self._metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
            self.plain = read_plain(stored.path / layout.PLAIN)
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (tuple(one.size), one.properties.dtype)
            for key, one in self._metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def keys_of(self, name: str) -> list[str]:
        """Return the names of the tensors of the module that was saved as ``name``."""
        prefix = f"{name}."
        others = [f"{one}." for one in self.plain["optimizers"] if one.startswith(prefix)]
        return [
            key.removeprefix(prefix)
            for key in self.forms
            if key.startswith(prefix) and not any(key.startswith(one) for one in others)
        ]

    def saved_key(self, name: str, key: str) -> str:
        """Return the key of a tensor of the module ``name``, by any of its names; empty without."""
        if f"{name}.{key}" in self.forms:
            return f"{name}.{key}"
        for names in self.plain["modules"][name]["tied"]:
            if key in names:
                return next((f"{name}.{one}" for one in names if f"{name}.{one}" in self.forms), "")
        return ""

    def names_of(self, name: str, key: str) -> list[str]:
        """Return all names of a tensor of the module ``name``."""
        return next((one for one in self.plain["modules"][name]["tied"] if key in one), [key])

    def read(self, pieces: list[Piece]) -> None:
        """Fill blocks with their values, of another dtype where theirs is another."""
        planner = _Planner(pieces, self._metadata)
        with torch.no_grad(), self._there():
            self._reader.read_data(planner.plan(), planner).wait()
            planner.copy_twins()

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotFoundError(
                f"checkpoint {self._path.name} was removed while it was read\n"
                "its job has newer ones: read the newest, or have the job keep more",
                field="folder",
            ) from None


class _Planner(DefaultLoadPlanner):
    """The blocks that a rank wants, each of those of the checkpoint that overlap it."""

    def __init__(self, pieces: list[Piece], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._saved = pieces, metadata
        self._data: dict[tuple[str, tuple[int, ...]], list[torch.Tensor]] = {}

    def plan(self) -> LoadPlan:
        """Return what is to be read, in the order in which it lies in the files."""
        items: list[ReadItem] = []
        for piece in self._pieces:
            place = (piece.key, piece.offsets)
            known = self._data.setdefault(place, [])
            known.append(piece.data)
            saved = self._saved.state_dict_metadata[piece.key]
            assert isinstance(saved, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.size())
            found = create_read_items_for_chunk_list(piece.key, saved, [chunk])
            if sum(math.prod(one.lengths) for one in found) != piece.data.numel():
                raise BadRequestError(
                    f"{piece.key} is not whole in the checkpoint: a part at {list(piece.offsets)} is "
                    "missing\nuse the checkpoint before it",
                    field="into",
                )
            if len(known) == 1:
                items += found
        where = self._saved.storage_data

        def place_of(item: ReadItem) -> tuple[str, int]:
            info = where[item.storage_index]
            return info.relative_path, info.offset

        return LoadPlan(sorted(items, key=place_of))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return where the values of a block belong."""
        return self._data[index.fqn, tuple(index.offset or ())][0]

    def copy_twins(self) -> None:
        """Fill the blocks that were asked for more than once."""
        for first, *others in self._data.values():
            for other in others:
                other.copy_(first)


def load_into(stored: Stored, into: dict[str, Any], ranks: Ranks, *, strict: bool) -> Loaded:
    """Fill a state from a checkpoint whose files are whole. BadRequestError, on all ranks, if they differ."""
    contents: Contents | None = None
    state: State | None = None
    pieces: list[Piece] = []
    found: dict[str, list[dict[str, torch.Tensor]]] = {}
    aliases: dict[str, dict[str, str]] = {}
    own = _Differences()
    try:
        contents, state = Contents(stored), State(into)
        pieces = _model_pieces(state, contents, own)
        for name, optimizer in state.optimizers.items():
            saved = contents.plain["optimizers"].get(name)
            if saved is None:
                own.missing.append(f"the optimizer {name!r}")
                continue
            aliases[name] = _saved_names(optimizer.names, saved, contents.plain["modules"])
            known = {one for group in saved["groups"] for one in group["names"]}
            own.missing += [
                f"{parameter} of the optimizer {name!r}"
                for parameter, alias in aliases[name].items()
                if alias not in known
            ]
            found[name], blocks = optimizer.targets(saved["tensors"], contents.forms, aliases[name])
            pieces += blocks
    except Exception as error:
        own.error = f"{type(error).__name__}: {error}" if not str(error) else str(error)
        own.kind = type(error).__name__
    together = ranks.all_gather(own)
    _raise_differences(together, contents, stored, strict)
    assert contents is not None and state is not None
    problem = ""
    try:
        present = set(contents.forms)
        contents.read([one for one in pieces if one.key in present])
        _put(state, contents, found, aliases)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [f"rank {n}: {one}" for n, one in enumerate(ranks.all_gather(problem)) if one]
    if problems:
        raise BadRequestError(
            f"checkpoint {stored.path.name} could not be loaded: {problems[0]}\n"
            "the state that it was loaded into is not to be used",
            field="into",
        )
    plain, manifest = contents.plain, stored.manifest
    same = manifest.ranks == ranks.size
    return Loaded(
        manifest.step, dict(manifest.meta), plain["values"],
        plain[PER_RANK][ranks.rank] if same else None, manifest.ranks,
    )  # fmt: skip


@dataclass(slots=True)
class _Differences:
    """The differences between a state and a checkpoint on a rank."""

    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=dict)
    error: str = ""
    kind: str = ""


def _model_pieces(state: State, contents: Contents, own: _Differences) -> list[Piece]:
    pieces: list[Piece] = []
    for name, model in state.models.items():
        if name not in contents.plain["modules"]:
            own.missing.append(f"the model {name!r}")
            continue
        own.keys[name] = model.all_names
        for key, tensor in model.tensors.items():
            place = model.place(key, tensor)
            others = next((names for names in model.tied if key in names), [place.name])
            saved = next(filter(None, (contents.saved_key(name, one) for one in others)), "")
            form = contents.forms.get(saved)
            if form is None:
                own.missing.append(place.name)
            elif form[0] != place.shape:
                own.shapes.append(
                    f"{place.name} is {list(form[0])} in the checkpoint and {list(place.shape)} in the model"
                )
            else:
                pieces += place.put(saved, pieces_of(saved, tensor))
    return pieces


def _raise_differences(
    together: list[_Differences], contents: Contents | None, stored: Stored, strict: bool
) -> None:
    for rank, one in enumerate(together):
        if one.error:
            where = f" (rank {rank})" if len(together) > 1 else ""
            first, _, fix = one.error.partition("\n")
            raise BadRequestError(
                f"{first}{where}\n{fix or 'see the checkpoint before it'}", field="into"
            )
    shapes = _once(one for each in together for one in each.shapes)
    if shapes:
        raise BadRequestError(
            f"{_listed(shapes)}\nload it into the model that checkpoint {stored.path.name} was made of",
            field="into",
        )
    if not strict:
        return
    missing = _once(one for each in together for one in each.missing)
    if missing:
        raise BadRequestError(
            f"checkpoint {stored.path.name} does not have {_listed(missing)}\n"
            "load it into the model that it was made of, or with strict=False",
            field="into",
        )
    assert contents is not None
    for name in _once(one for each in together for one in each.keys):
        wanted = {key for each in together for key in each.keys.get(name, ())}
        more = [
            key for key in contents.keys_of(name) if wanted.isdisjoint(contents.names_of(name, key))
        ]
        if more:
            raise BadRequestError(
                f"the model {name!r} does not have {_listed(more)}, which checkpoint "
                f"{stored.path.name} has\nload it into the model that it was made of, or with "
                "strict=False",
                field="into",
            )


def _once(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _saved_names(
    wanted: list[str], saved: dict[str, Any], modules: dict[str, Any]
) -> dict[str, str]:
    """Return the names under which the states of parameters were saved.

    They are others for tied parameters: the last stage of a pipeline knows the second name alone.
    """
    known = {name for group in saved["groups"] for name in group["names"]}
    found = {}
    for name in wanted:
        found[name] = name
        if name not in known:
            tied = (one for each in modules.values() for one in each["tied"] if name in one)
            found[name] = next((o for names in tied for o in names if o in known), name)
    return found


def _put(
    state: State,
    contents: Contents,
    found: dict[str, list[dict[str, torch.Tensor]]],
    aliases: dict[str, dict[str, str]],
) -> None:
    plain = contents.plain
    for name, model in state.models.items():
        if name in plain["modules"]:
            model.load_extra(plain["modules"][name]["extra"])
    for name, optimizer in state.optimizers.items():
        saved = plain["optimizers"].get(name)
        if saved is None:
            continue
        scalars = scalars_of(saved)
        states = [
            {**own, **scalars.get(aliases[name][parameter], {})}
            for parameter, own in zip(optimizer.names, found[name], strict=True)
        ]
        optimizer.put(states, saved["groups"], saved["extra"], aliases[name])
    for name, value in state.values.items():
        if name in plain["values"] and callable(getattr(value, "load_state_dict", None)):
            value.load_state_dict(plain["values"][name])
