"""Counts of worker processes: how many were started, how long that took, and of what they ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker_wire.process.metrics import START_BOUNDS, Distribution

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import WorkerExit


class ExitCause(StrEnum):
    """The kind of a process's end, as far as a label can tell; its exit has the sentence."""

    STOPPED = "stopped"
    """Stoker ended it: idle, or with its job, its actor or the node."""
    FINISHED = "finished"
    FAILED = "failed"
    """It ended by itself, with another exit code than 0."""
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    """Its task did not end at its timeout."""
    PREEMPTED = "preempted"


@dataclass(slots=True)
class WorkerCounts:
    """The counts of one node since its nodelet started."""

    starts: int = 0
    start_s: Distribution = field(default_factory=lambda: Distribution(START_BOUNDS))
    exits: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in ExitCause})

    def ended(self, exit_: WorkerExit) -> None:
        """Count an end."""
        self.exits[cause_of(exit_).value] += 1


def cause_of(exit_: WorkerExit) -> ExitCause:
    """Return of what kind an end was."""
    if exit_.oom:
        return ExitCause.OUT_OF_MEMORY
    if exit_.overdue:
        return ExitCause.TIMEOUT
    if exit_.preempted:
        return ExitCause.PREEMPTED
    if exit_.expected:
        return ExitCause.STOPPED
    if exit_.signal is not None:
        return ExitCause.SIGNAL
    return ExitCause.FAILED if exit_.exit_code else ExitCause.FINISHED
