"""Commits in memory: copies of a state on its own device, two of them, in buffers that are used again.

A commit costs a copy and no allocation: :class:`TrainState` makes one every few steps, and a replica that
survives a crash goes on from it. On the CPU the copies lie where a newcomer on the same machine can read
them. On CUDA, what changes only in the optimizer's step is copied on a side stream, beside the next forward
pass; :meth:`Commits.wait` is called before that step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stoker.exceptions import NotFoundError
from stoker_train.elastic.state.memory import Buffer, allocate

if TYPE_CHECKING:
    from stoker_train.elastic.state.trees import FlatState

__all__ = ("Commit", "Commits")

_KEPT = 2
_Form = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(slots=True)
class Commit:
    """The state after ``step`` steps, in memory that nobody else writes to while it is held."""

    step: int
    skeleton: Any = None
    paths: list[str] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    valid: bool = False
    holders: int = 0
    copied: Any = None
    """The CUDA event after which the copies are whole; None if they are."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies, in the order of the paths."""
        return [buffer.tensor for buffer in self.buffers]

    def wait(self) -> None:
        """Have what this thread's stream does next see whole copies."""
        if self.copied is not None:
            torch.cuda.current_stream(self.copied.device).wait_event(self.copied)


class Commits:
    """The last two commits of a replica. For one thread, but :meth:`hold` ends in any."""

    def __init__(self) -> None:
        self._slots: list[Commit] = []
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        """Of the numbers of holders, which threads that write checkpoints lower."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be gone back to, ascending."""
        return tuple(sorted(slot.step for slot in self._slots if slot.valid))

    def get(self, step: int) -> Commit:
        """Return the commit of ``step``. NotFoundError names those that there are."""
        for slot in self._slots:
            if slot.valid and slot.step == step:
                return slot
        raise NotFoundError(
            f"no commit of step {step} is kept\nkept are {list(self.steps)}", field="step"
        )

    def add(self, step: int, flat: FlatState, settled: Sequence[bool]) -> None:
        """Copy a state; ``settled`` says which tensors do not change until :meth:`wait` was called."""
        slot = self._free(step)
        slot.valid, slot.step, slot.copied = False, step, None
        slot.buffers = _fitting(slot.buffers, flat.tensors)
        copies = slot.tensors
        late = [n for n, one in enumerate(flat.tensors) if settled[n] and one.is_cuda]
        if late:
            self._copy_beside(slot, [copies[n] for n in late], [flat.tensors[n] for n in late])
        beside = set(late)
        now = [n for n in range(len(copies)) if n not in beside]
        _copy([copies[n] for n in now], [flat.tensors[n] for n in now])
        for other in self._slots:
            if other.step == step:
                other.valid = False
        slot.paths, slot.skeleton, slot.valid = flat.paths, flat.skeleton, True

    def scratch(self, flat: FlatState) -> Commit:
        """Copy a state to where the commit before the last was, for others to read until the next commit."""
        slot = self._free(-1)
        slot.valid, slot.step, slot.copied = False, -1, None
        slot.buffers = _fitting(slot.buffers, flat.tensors)
        _copy(slot.tensors, flat.tensors)
        slot.paths, slot.skeleton = flat.paths, flat.skeleton
        return slot

    def wait(self) -> None:
        """Have what the current stream does next come after the copies that still run."""
        for slot in self._slots:
            slot.wait()

    def forget(self, above: int) -> None:
        """Void the commits of steps above ``above``: the job has gone back behind them."""
        for slot in self._slots:
            if slot.step > above:
                slot.valid = False

    @contextmanager
    def hold(self, step: int) -> Iterator[Commit]:
        """Keep the commit of ``step`` unchanged within this block; newer ones go elsewhere."""
        slot = self.get(step)
        with self._lock:
            slot.holders += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.holders -= 1

    def _free(self, step: int) -> Commit:
        """Return a slot to write to: not the newest commit, nor one that is held."""
        newest = max((slot.step for slot in self._slots if slot.valid), default=None)
        free = [
            slot
            for slot in self._slots
            if not slot.holders and not (slot.valid and slot.step == newest != step)
        ]
        for slot in free:
            if slot.valid and slot.step == step:
                return slot
        free.sort(key=lambda slot: (slot.valid, slot.step))
        if len(self._slots) > _KEPT and len(free) > 1:  # one more, as a slow checkpoint held it
            self._slots.remove(free.pop(0))
        if len(self._slots) < _KEPT or not free:
            slot = Commit(step)
            self._slots.append(slot)
            return slot
        return free[0]

    def _copy_beside(
        self, slot: Commit, copies: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> None:
        device = tensors[0].device
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _copy(copies, tensors)
            for tensor in tensors:
                tensor.record_stream(stream)
            slot.copied = stream.record_event()


def _fitting(buffers: list[Buffer], tensors: list[torch.Tensor]) -> list[Buffer]:
    """Return a buffer for each tensor: of those that there are where one fits, else a new one."""
    if [_form(buffer.tensor) for buffer in buffers] == [_form(tensor) for tensor in tensors]:
        return buffers
    spare: dict[_Form, list[Buffer]] = {}
    for buffer in reversed(buffers):
        spare.setdefault(_form(buffer.tensor), []).append(buffer)
    found = [fitting.pop() if (fitting := spare.get(_form(tensor))) else None for tensor in tensors]
    missing = [tensor for tensor, one in zip(tensors, found, strict=True) if one is None]
    new = iter(allocate(missing))
    return [next(new) if one is None else one for one in found]


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if copies:
        torch._foreach_copy_(copies, tensors)
