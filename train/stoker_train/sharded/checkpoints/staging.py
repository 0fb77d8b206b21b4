"""Copies of a state on the host, in memory that is used again: what a checkpoint is written from.

A save costs the training this copy. On a GPU it goes to pinned memory, enqueued after the step, and the
host does not wait: what the training does next on the stream comes after it. Called by the store.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stoker_train.sharded.checkpoints.pieces import Piece

__all__ = ("Staging",)


class Staging:
    """Host memory for one copy of the blocks of a rank."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._events: list[Any] = []

    def copy(self, pieces: list[Piece]) -> list[Piece]:
        """Return the blocks as copies on the host; :meth:`settle` says when they are whole.

        The copies of the call before are overwritten.
        """
        held: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        found, devices = [], set()
        with torch.no_grad():
            for piece in pieces:
                place = (piece.key, piece.offsets)
                known = self._held.get(place)
                into = known if known is not None and _fits(known, piece.data) else _new(piece.data)
                into.copy_(piece.data, non_blocking=piece.data.is_cuda)
                if piece.data.is_cuda:
                    devices.add(piece.data.device)
                held[place] = into
                found.append(replace(piece, data=into))
        self._held = held
        self._events = []
        for device in devices:
            with torch.cuda.device(device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._events.append(event)
        return found

    def settle(self) -> None:
        """Wait until the copies are whole."""
        for event in self._events:
            event.synchronize()
        self._events = []


def _fits(held: torch.Tensor, data: torch.Tensor) -> bool:
    return held.shape == data.shape and held.dtype == data.dtype


def _new(data: torch.Tensor) -> torch.Tensor:
    return torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)
