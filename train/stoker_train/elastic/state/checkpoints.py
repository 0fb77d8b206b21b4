"""Durable checkpoints: files that are whole or not there, written beside the training.

A checkpoint is ``checkpoint-{step}.pt``, which ``torch.load`` reads, and ``checkpoint-{step}.json`` with
its size and checksum, written last: without it the file does not count. Ranks other than 0 write only what
is theirs alone, into files with their rank in the name, so no file has two writers. A disk that is full or
breaks costs a checkpoint and never the job: :attr:`CheckpointStore.problem` says so, and the one before
stays.

Each is of a ``generation``, a fence: a rank 0 of an older one, that does not know of its end, writes nothing
where a newer one has written, and what it wrote before counts less than anything newer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.durable import SummedFile, sync_folder, whole_file

__all__ = ("CheckpointStore", "Saved")

_log = logging.getLogger(__name__)
_STEP_DIGITS = 10
_NAME = re.compile(r"checkpoint-(\d{10})\.json")
_ABANDONED_S = 600.0
"""A file that nobody has written to for so long was left by a process that died."""
Payload = dict[str, Any]


class _Manifest(msgspec.Struct, frozen=True):
    step: int
    nbytes: int
    xxh3_128: str
    version: int = 1
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """The outcome of a save: its file, or why there is none."""

    step: int
    path: Path | None = None
    nbytes: int = 0
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Order:
    step: int
    payload: Payload
    held: ExitStack
    """Lets the payload go."""
    rank: int
    generation: int
    future: Future[Saved]

    def end(self, saved: Saved) -> None:
        """Let the payload go, and say what became of it."""
        self.held.close()
        self.future.set_result(saved)


class CheckpointStore:
    """A folder of checkpoints, the last ``keep`` of which stay. A thread of its own writes to it.

    One is written at a time and one waits; a third takes the place of the one that waits. Raises
    BadRequestError for ``keep`` below 1.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise BadRequestError(
                f"keep={keep} of Checkpoint() keeps none\ngive 1 or more", field="keep"
            )
        self.path, self.keep = Path(path), keep
        self._lock = threading.Condition()
        self._waiting: _Order | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._problem = ""

    @property
    def problem(self) -> str:
        """The reason that the last checkpoint could not be written; empty if it was."""
        return self._problem

    def save(
        self,
        step: int,
        payload: Payload | Callable[[], AbstractContextManager[Payload]],
        *,
        rank: int = 0,
        generation: int = 0,
    ) -> Future[Saved]:
        """Write ``payload`` as the checkpoint of ``step``, beside the caller; the future never fails.

        Nobody may change the payload until the future is done. Where it is a function, it is called at once,
        and the payload is what the context manager that it returns yields, which ends with the future: see
        ``TrainState.committed``. ``rank`` other than 0: only this rank's own part of the checkpoint that
        rank 0 writes. Of an older ``generation`` than the newest in the folder it is not written.
        """
        held = ExitStack()
        given = held.enter_context(payload()) if callable(payload) else payload
        order = _Order(step, given, held, rank, generation, Future())
        with self._lock:
            replaced, self._waiting = self._waiting, order
            if self._closed:
                replaced, self._waiting = order, None
            elif self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_all, name="checkpoints", daemon=True
                )
                self._thread.start()
            self._lock.notify_all()
        if replaced is not None:
            why = "the store is closed" if self._closed else "a later one came before its turn"
            replaced.end(Saved(replaced.step, problem=why))
        return order.future

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which there is a checkpoint, ascending."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return ()
        found = (_NAME.fullmatch(name) for name in names)
        return tuple(sorted(int(one[1]) for one in found if one))

    def latest(self) -> tuple[int, Payload] | None:
        """Return the newest checkpoint that is whole, with tensors on the CPU; None if there is none.

        Of the newest generation, and of that the last step.
        """
        for _, step in reversed(self._by_age()):
            payload = self.load(step)
            if payload is not None:
                return step, payload
        return None

    def generation_of(self, step: int) -> int:
        """Return the generation that the checkpoint of ``step`` is of; 0 if that cannot be read."""
        try:
            data = (self.path / f"{_stem(step, 0)}.json").read_bytes()
            return msgspec.json.decode(data, type=_Manifest).generation
        except (OSError, msgspec.MsgspecError):
            return 0

    def _by_age(self) -> list[tuple[int, int]]:
        """Return the generation and the step of each checkpoint, the oldest first."""
        return sorted((self.generation_of(step), step) for step in self.steps())

    def load(self, step: int, rank: int = 0, *, generation: int | None = None) -> Payload | None:
        """Return the checkpoint of ``step``, or ``rank``'s own part; None if it is not there or torn.

        Or is of another ``generation`` than the one that is given.
        """
        stem = _stem(step, rank)
        try:
            manifest = msgspec.json.decode(
                (self.path / f"{stem}.json").read_bytes(), type=_Manifest
            )
            data = (self.path / f"{stem}.pt").read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("checkpoint %s in %s cannot be read: %s", stem, self.path, error)
            return None
        if generation not in (None, manifest.generation):
            return None
        if len(data) != manifest.nbytes or xxhash.xxh3_128_hexdigest(data) != manifest.xxh3_128:
            _log.warning(
                "checkpoint %s in %s is torn: its checksum differs; an older one is used",
                stem,
                self.path,
            )
            return None
        loaded: Payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return loaded

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what waits, and end the thread; what is not written within ``timeout_s`` is given up."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while self._waiting is None and not self._closed:
                    self._lock.wait()
                order, self._waiting = self._waiting, None
            if order is None:
                return
            order.end(self._save(order))

    def _save(self, order: _Order) -> Saved:
        began = time.monotonic()
        try:
            newest = max((generation for generation, _ in self._by_age()), default=0)
            if newest > order.generation:
                raise ConflictError(
                    f"generation {order.generation} is over: {newest} has written here"
                )
            path, nbytes = self._write(order)
            if order.rank == 0:
                self._remove_old()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if not self._problem:  # once, until it works again
                _log.error(
                    "checkpoint of step %d cannot be written to %s: %s; the one before stays, and "
                    "training goes on",
                    order.step,
                    self.path,
                    problem,
                )
            self._problem = problem
            return Saved(order.step, seconds=time.monotonic() - began, problem=problem)
        if self._problem:
            _log.warning("checkpoints in %s are written again, of step %d", self.path, order.step)
        self._problem = ""
        return Saved(order.step, path, nbytes, time.monotonic() - began)

    def _write(self, order: _Order) -> tuple[Path, int]:
        stem = _stem(order.step, order.rank)
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{stem}.pt"
        with whole_file(path) as file:
            summed = SummedFile(file)
            torch.save(order.payload, summed)  # type: ignore[arg-type]
        manifest = _Manifest(
            order.step, summed.nbytes, summed.sum.hexdigest(), generation=order.generation
        )
        with whole_file(self.path / f"{stem}.json") as file:
            file.write(msgspec.json.encode(manifest))
        sync_folder(self.path)
        return path, summed.nbytes

    def _remove_old(self) -> None:
        old = {_stem(step, 0) for _, step in self._by_age()[: -self.keep]}
        for name in os.listdir(self.path):
            file = self.path / name
            # The manifest goes first, so that what is left of a removal does not count.
            if name.partition(".")[0] in old and name.endswith(".json"):
                file.unlink(missing_ok=True)
        for name in os.listdir(self.path):
            file = self.path / name
            if name.partition(".")[0] in old:
                file.unlink(missing_ok=True)
            elif name.startswith(".checkpoint-"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - file.stat().st_mtime > _ABANDONED_S:
                        file.unlink()


def _stem(step: int, rank: int) -> str:
    stem = f"checkpoint-{step:0{_STEP_DIGITS}d}"
    return stem if rank == 0 else f"{stem}.rank-{rank:05d}"
