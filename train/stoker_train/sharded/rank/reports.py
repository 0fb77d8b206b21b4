"""Reports of a rank to its controller. Pickled; made by the loop's thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank's process is there, on this node."""

    rank: int
    gang: int
    node_id: str
    gpus: tuple[int, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state is there: of the checkpoint of ``step``, or new (0)."""

    rank: int
    gang: int
    step: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """``step`` steps are done; rank 0 says so."""

    rank: int
    gang: int
    step: int
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint of ``step`` counts, or could not be written: ``problem`` says why."""

    rank: int
    gang: int
    step: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The loop has ended by an error: ``kind`` is ``"loop"``, or ``"lost"`` where another rank did not come.

    ``"fenced"``: another training has taken the folder of checkpoints over.

    ``where``: what the rank was at.
    """

    rank: int
    gang: int
    kind: str
    error: str
    where: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Returned:
    """The loop has ended well, all that it has saved is written."""

    rank: int
    gang: int
    step: int
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a rank is gone; made by the controller."""

    rank: int
    gang: int
    why: str
