"""Reports of a replica beside the events of the generation machine. Pickled; made by its loop's thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker_train.elastic.core.ledger import Entry


@dataclass(frozen=True, slots=True)
class Beat:
    """The sign that a replica's process lives."""

    worker: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps that rank 0 has made: their ledger entries, the tables of all ranks, the last values."""

    worker: int
    generation: int
    entries: tuple[Entry, ...]
    lengths: dict[int, int] = field(default_factory=dict)
    """Samples of each epoch that has begun."""
    tables: tuple[Any, ...] = ()
    """(ranks, fields) float64 each, see optimization.table."""
    metrics: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable checkpoint was written, or could not be."""

    worker: int
    generation: int
    step: int
    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """The seconds for which a survivor did not train as its membership changed."""

    worker: int
    generation: int
    kind: str
    pause_s: float
    step: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Wish:
    """Requests of policies, see policies.policy.Request."""

    worker: int
    generation: int
    requests: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A pass of ``local`` samples did not fit into the device's memory."""

    worker: int
    generation: int
    local: int


@dataclass(frozen=True, slots=True)
class Value:
    """The return value of rank 0's loop, pickled by cloudpickle; empty where ``problem`` says why."""

    worker: int
    value: bytes
    problem: str = ""

    def load(self) -> tuple[Any, str]:
        """Return what the loop returned, and why it is not here if it is not."""
        import cloudpickle

        if not self.value:
            return None, self.problem
        try:
            return cloudpickle.loads(self.value), self.problem
        except Exception as error:  # a CUDA tensor here, where no GPU may be
            return None, (
                f"what the loop returned cannot be read by its controller: {error}\n"
                "return numbers, texts or arrays of the CPU"
            )
