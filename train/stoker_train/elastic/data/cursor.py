"""The place of a job in its data: which sample of which epoch comes next.

A part of the train state, so it goes back with a commit; ``ctx.step`` moves it, the loader reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ("Cursor",)


@dataclass(slots=True)
class Cursor:
    """The next step: number ``step`` of the job, from sample ``first`` of ``epoch``.

    ``jumps`` counts how often it was set rather than moved, by a restore or a sync: who has read data for an
    earlier place knows by it that they are void.
    """

    epoch: int = 0
    step: int = 0
    first: int = 0
    jumps: int = field(default=0, compare=False)

    def advance(self, count: int) -> None:
        """Move past a step of ``count`` samples."""
        self.step += 1
        self.first += count

    def begin_epoch(self, epoch: int) -> None:
        """Move to the beginning of ``epoch``; the number of the step goes on."""
        self.epoch, self.first = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, step and first."""
        return {"epoch": self.epoch, "step": self.step, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Jump to where :meth:`state_dict` was called."""
        self.epoch, self.step, self.first = state["epoch"], state["step"], state["first"]
        self.jumps += 1
