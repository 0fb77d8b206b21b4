"""A checkpoint written by all ranks: what each writes is agreed, written, and made to count by rank 0.

The planner and the files are ``torch.distributed.checkpoint``'s, so that torch reads a checkpoint without
Stoker; the exchanges are ours, three of them, each of which carries the errors of all ranks, so that one
rank's full disk is the outcome on all and nobody waits for it. Called by the store, in its thread.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from stoker_train.durable import SummedFile, file_sum, sync_folder, whole_file
from stoker_train.sharded.checkpoints import claims, layout
from stoker_train.sharded.checkpoints.layout import Claim, Manifest, Stored
from stoker_train.sharded.checkpoints.pieces import Piece
from stoker_train.sharded.checkpoints.state import merged
from stoker_wire.errors import ConflictError, FencedError, StokerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_train.sharded.checkpoints.ranks import Ranks

__all__ = ("Order", "Saved", "write")

_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Saved:
    """The outcome of a save, the same on all ranks: its folder, or why there is none.

    ``nbytes``: of all ranks. ``fenced``: another gang has taken over, and this one has to end.
    """

    step: int
    path: Path | None = None
    nbytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    fenced: bool = False


@dataclass(slots=True)
class Order:
    """A save as a rank has it. ``error``: why its state could not be taken; the others hear of it."""

    step: int
    folder: Path
    meta: dict[str, Any]
    pieces: list[Piece]
    """On the host, and nobody else's."""
    plain: dict[str, Any]
    claim: Claim | None
    """Rank 0's."""
    number: int
    keep: int
    error: str = ""
    fenced: bool = False
    """``error`` is that another gang has taken over."""


class _Planner(DefaultSavePlanner):
    """The blocks of a rank as a plan of torch's; replicas are told apart from shards by their places."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._data = {(one.key, one.offsets): one.data for one in pieces}
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        """Return an item for each block."""
        self.plan = SavePlan([_item(one) for one in self._pieces])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a block."""
        return self._data[index.fqn, tuple(index.offset or ())]


def _item(piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    return WriteItem(
        index=MetadataIndex(piece.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.data.size()),
            properties=TensorProperties.create_from_tensor(piece.data),
            size=torch.Size(piece.shape),
        ),
    )


class _SummedFiles(FileSystem):
    """Files that are on the disk once they are written, with their sizes and checksums."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file to write to."""
        with Path(path).open(mode) as file:
            summed = SummedFile(cast("BinaryIO", file))
            yield summed
            # torch would sync before the last buffer is written.
            file.flush()
            os.fsync(file.fileno())
        self.written[Path(path).name] = (summed.nbytes, summed.sum.hexdigest())


def write(order: Order, ranks: Ranks) -> Saved:
    """Write a checkpoint with the other ranks; returns its outcome, also where there is none.

    The errors of ``torch.distributed`` are raised: then another rank is gone, and so is the checkpoint.
    """
    began = time.monotonic()
    name, problem, fenced = _open(order, ranks)
    if problem:
        return Saved(order.step, seconds=time.monotonic() - began, problem=problem, fenced=fenced)
    path = order.folder / name
    saved = _write_and_commit(order, ranks, path)
    if saved.problem and ranks.rank == 0:
        layout.remove(path)
    return replace(saved, seconds=time.monotonic() - began)


def _open(order: Order, ranks: Ranks) -> tuple[str, str, bool]:
    """Agree on the step and the name. Returns the name, what is wrong, and whether that is the fence."""
    name, error, fenced = "", order.error, order.fenced
    if ranks.rank == 0 and not error:
        try:
            assert order.claim is not None
            stored = layout.checkpoints_in(order.folder, claim=order.claim)
            claims.check(order.folder, order.claim)
            _remove_old(order, order.claim, stored)
            name = layout.stem(order.step, order.claim.serial, order.number)
            (order.folder / name).mkdir(parents=True)
        except (OSError, StokerError) as refused:
            error, fenced = _text(refused), isinstance(refused, FencedError)
    found = ranks.all_gather((order.step, error, name, fenced))
    for rank, (_, problem, _, is_fence) in enumerate(found):
        if problem:
            return "", _of_rank(rank, problem, ranks), is_fence
    steps = {step for step, *_ in found}
    if len(steps) > 1:
        return "", f"ranks save different steps: {sorted(steps)}", False
    return found[0][2], "", False


def _write_and_commit(order: Order, ranks: Ranks, path: Path) -> Saved:
    planner = _Planner(order.pieces)
    files = _SummedFiles()
    writer = FileSystemWriter(path, per_thread_copy_ahead=0, overwrite=True, sync_files=False)
    writer.fs = files
    planner.set_up_planner({}, writer.storage_meta(), ranks.rank == 0)
    writer.set_up_storage_writer(ranks.rank == 0)

    gathered = ranks.gather((planner.create_local_plan(), order.plain))
    plans: list[Any] = []
    metadata = None
    plain: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            plans, metadata = planner.create_global_plan([one for one, _ in gathered])
            plans = writer.prepare_global_plan(plans)
            plain = merged([one for _, one in gathered])
        except Exception as error:
            plans = [_text(error)] * ranks.size
    plan = ranks.scatter(plans)
    if isinstance(plan, str):
        return Saved(order.step, problem=plan)

    results: Any = []
    problem = ""
    try:
        plan = planner.finish_plan(plan)
        if plan.items:
            results = writer.write_data(plan, planner).wait()
        if not path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is not there on this node", str(path))
        sync_folder(path)
    except Exception as error:
        problem = _text(error)
    written = ranks.gather((results, files.written, problem))
    outcome = Saved(order.step)
    if ranks.rank == 0:
        outcome = _commit(
            order, ranks, path, written, partial(writer.finish, cast("Metadata", metadata)), plain
        )
    return cast("Saved", ranks.broadcast(outcome))


def _commit(
    order: Order, ranks: Ranks, path: Path, written: list[Any], finish: Any, plain: dict[str, Any]
) -> Saved:
    """Make the checkpoint count, if every rank has written its part and no other gang took over."""
    for rank, (_, _, problem) in enumerate(written):
        if problem:
            return Saved(order.step, problem=_of_rank(rank, problem, ranks))
    claim = order.claim
    assert claim is not None
    try:
        files: dict[str, tuple[int, str]] = {}
        for rank, (_, own, _) in enumerate(written):
            for name, (nbytes, digest) in own.items():
                if not _has(path / name, nbytes):
                    raise ConflictError(
                        f"{name} of rank {rank} is not seen by rank 0\n"
                        f"{order.folder} has to be on a file system that all nodes share"
                    )
                files[name] = (nbytes, digest)
        finish([results for results, _, _ in written])
        files[_METADATA] = ((path / _METADATA).stat().st_size, file_sum(path / _METADATA))
        with whole_file(path / layout.PLAIN) as file:
            summed = SummedFile(file)
            torch.save(plain, summed)  # type: ignore[arg-type]
        files[layout.PLAIN] = (summed.nbytes, summed.sum.hexdigest())
        claims.check(order.folder, claim)
        manifest = Manifest(
            step=order.step, serial=claim.serial, ranks=ranks.size, at_s=time.time(),
            owner=claim.owner, attempt=claim.attempt, meta=order.meta, files=files,
        )  # fmt: skip
        sync_folder(path)
        with whole_file(path / layout.MANIFEST) as file:
            file.write(msgspec.json.encode(manifest))
        sync_folder(path)
        sync_folder(order.folder)
        # After it, too: what a later gang has not seen does not count.
        claims.check(order.folder, claim, counted=path.name)
    except Exception as error:
        return Saved(order.step, problem=_text(error), fenced=isinstance(error, FencedError))
    return Saved(order.step, path, manifest.nbytes)


def _remove_old(order: Order, claim: Claim, stored: list[Stored]) -> None:
    """Make room for one more.

    Before the write and not after it: a gang that is replaced in between then removes none that its
    successor may go on from: it has seen the newest of these.
    """
    for one in stored[: -max(1, order.keep - 1)]:
        layout.remove(one.path)
    layout.remove_abandoned(order.folder, claim, {one.path.name for one in stored})


def _has(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False


def _of_rank(rank: int, problem: str, ranks: Ranks) -> str:
    return problem if ranks.size == 1 else f"rank {rank}: {problem}"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {error.filename or 'the folder'} is full"
    if isinstance(error, StokerError):
        return str(error)
    return f"{type(error).__name__}: {error}"
