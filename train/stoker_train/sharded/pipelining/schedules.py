"""The order in which each rank of a pipeline runs its micro-batches forward and backward.

Pure: numbers in, lists out. :mod:`.timeline` puts the messages between, the executor runs them. GPipe: Huang
et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021, section 2.2. The orders are those of
``torch.distributed.pipelining``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker.exceptions import BadRequestError


class Kind(StrEnum):
    """A schedule. All have the same result, and need other amounts of memory and waiting."""

    GPIPE = "gpipe"
    """All forward, then all backward: every micro-batch is kept."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward: a stage keeps ``pipeline - stage`` micro-batches."""
    INTERLEAVED = "interleaved"
    """1F1B in which each rank has several stages: a shorter bubble for more messages."""


class Pass(StrEnum):
    """A direction through a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One micro-batch through one stage. Stages are numbered over the whole pipeline."""

    way: Pass
    stage: int
    micro_batch: int

    @property
    def needs(self) -> Action | None:
        """The action of a neighbour whose result this one reads; None for inputs of the whole model.

        The backward pass of the last stage reads what its own forward pass kept, as all do.
        """
        if self.way is Pass.FORWARD:
            return Action(self.way, self.stage - 1, self.micro_batch) if self.stage else None
        return Action(self.way, self.stage + 1, self.micro_batch)

    def __str__(self) -> str:
        return f"{self.stage}{self.way[0].upper()}{self.micro_batch}"


def kind_of(interleave: int) -> Kind:
    """Return the schedule of a strategy."""
    return Kind.INTERLEAVED if interleave > 1 else Kind.ONE_F_ONE_B


def schedule(
    kind: Kind | str, pipeline: int, micro_batches: int, rank: int, interleave: int = 1
) -> list[Action]:
    """Return what ``rank`` of a pipeline of ``pipeline`` ranks runs, in order.

    Rank r has the stages r, r + pipeline, ... (``interleave`` of them). Raises BadRequestError for numbers
    that do not go together. Interleaved, ``micro_batches`` are run in rounds of equal size, which are the
    pipeline's length where that divides them.
    """
    kind = _checked(kind, pipeline, micro_batches, rank, interleave)
    total = micro_batches * interleave
    if kind is Kind.GPIPE:
        first = total
    elif kind is Kind.ONE_F_ONE_B:
        first = pipeline - rank - 1
    else:
        first = (interleave - 1) * _round(pipeline, micro_batches) + 2 * (pipeline - rank - 1)
    first = min(first, total)
    size = _round(pipeline, micro_batches) if kind is Kind.INTERLEAVED else micro_batches
    places = [
        (local * pipeline + rank, start + number)
        for start in range(0, micro_batches, size)
        for local in range(interleave)
        for number in range(size)
    ]
    forward = [Action(Pass.FORWARD, *place) for place in places]
    # Backward through a rank's stages in the reverse order, within the same rounds.
    last = (interleave - 1) * pipeline + 2 * rank
    backward = [Action(Pass.BACKWARD, last - stage, number) for stage, number in places]
    order = forward[:first]
    for number in range(first, total):
        order += (forward[number], backward[number - first])
    return order + backward[total - first :]


def forward_only(
    kind: Kind | str, pipeline: int, micro_batches: int, rank: int, interleave: int = 1
) -> list[Action]:
    """Return the forward passes of :func:`schedule`, for evaluation."""
    whole = schedule(kind, pipeline, micro_batches, rank, interleave)
    return [action for action in whole if action.way is Pass.FORWARD]


def _round(pipeline: int, micro_batches: int) -> int:
    """Return how many micro-batches go through one stage of a rank before its next stage has its turn."""
    return micro_batches // max(1, micro_batches // pipeline)


def _checked(kind: str, pipeline: int, micro_batches: int, rank: int, interleave: int) -> Kind:
    try:
        kind = Kind(kind)
    except ValueError:
        raise BadRequestError(
            f"schedule {kind!r} is not known\nwrite one of: {', '.join(Kind)}", field="schedule"
        ) from None
    numbers = {"pipeline": pipeline, "micro_batches": micro_batches, "interleave": interleave}
    for field, value in numbers.items():
        if value < 1:
            raise BadRequestError(f"{field} must be at least 1, got {value}", field=field)
    if not 0 <= rank < pipeline:
        raise BadRequestError(
            f"rank must lie in 0..{pipeline - 1} of the pipeline, got {rank}", field="rank"
        )
    if (interleave > 1) != (kind is Kind.INTERLEAVED):
        raise BadRequestError(
            f"interleave {interleave} does not go with the schedule {kind}\n"
            "the interleaved schedule takes 2 or more stages a rank, the others take 1",
            field="interleave",
        )
    rounds = max(1, micro_batches // pipeline)
    if kind is Kind.INTERLEAVED and micro_batches % rounds:
        raise BadRequestError(
            f"micro_batches {micro_batches} do not make {rounds} rounds of equal size\n"
            f"take a multiple of pipeline {pipeline}",
            field="micro_batches",
        )
    return kind
