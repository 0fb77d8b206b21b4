"""The run of a whole pipeline on paper: when each action begins and ends, and the messages between ranks.

Pure; called by the executor once for each kind of step, and by whoever wants to know a bubble. All messages
of a pipeline have one order here, by the time at which they are made, and each rank sends and receives in
that order. So no two ranks can wait for each other, also where messages of a rank queue up behind one another
(NCCL runs those of a pair of ranks one by one), and whatever the real times are: a rank waits only for what
lies earlier in the one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_train.sharded.pipelining.schedules import Action, Pass

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Timeline:
    """Begin and end of each action, in any unit of time, by rank and in each rank's order."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def total(self) -> float:
        """The end of the last action."""
        return max(end for rank in self.spans for _, _, end in rank)

    def bubble(self, rank: int) -> float:
        """Return the idle share of a rank: its waiting over its work."""
        work = sum(end - begin for _, begin, end in self.spans[rank])
        return self.total / work - 1.0

    def in_flight(self, rank: int) -> int:
        """Return how many micro-batches, each through one stage, ``rank`` keeps activations of at most."""
        most = kept = 0
        for action, _, _ in self.spans[rank]:
            kept += 1 if action.way is Pass.FORWARD else -1
            most = max(most, kept)
        return most


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of ``action`` (output or gradient of the input) on its way to the neighbour ``peer``."""

    action: Action
    peer: int
    is_send: bool


Step = Action | Transfer


def simulate(
    orders: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0
) -> Timeline:
    """Run the orders of all ranks, each action as early as can be; a message takes no time.

    Raises ValueError where ranks wait for each other.
    """
    seconds = {Pass.FORWARD: forward, Pass.BACKWARD: backward}
    stages = 1 + max(action.stage for order in orders for action in order)
    done: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in orders]
    waiting: dict[Action, int] = {}  # what a rank waits for -> the rank
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        mine = spans[rank]
        for action in orders[rank][len(mine) :]:
            needed = _needed(action, stages)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            begin = max(mine[-1][2] if mine else 0.0, done[needed] if needed else 0.0)
            end = done[action] = begin + seconds[action.way]
            mine.append((action, begin, end))
            if action in waiting:
                runnable.append(waiting.pop(action))
    if waiting:
        stuck = ", ".join(f"rank {rank} for {action}" for action, rank in waiting.items())
        raise ValueError(f"the ranks of this schedule wait for each other: {stuck}")
    return Timeline(tuple(map(tuple, spans)))


def steps(timeline: Timeline, rank: int) -> list[Step]:
    """Return what ``rank`` does, in order: its actions, a send behind each, a receive before each reader.

    A receive is posted before the action during which its message is made, to go on beside it.
    """
    messages = _messages(timeline, rank)
    order: list[Step] = []
    number = 0
    for action, _, end in timeline.spans[rank]:
        while number < len(messages) and messages[number][0] < (end, rank):
            order.append(messages[number][1])
            number += 1
        order.append(action)
    return order + [transfer for _, transfer in messages[number:]]


def _messages(timeline: Timeline, rank: int) -> list[tuple[tuple[float, int], Transfer]]:
    """Return the messages from and to ``rank``, in the one order of all: by time, then by sender."""
    ranks = len(timeline.spans)
    stages = 1 + max(action.stage for mine in timeline.spans for action, _, _ in mine)
    found = []
    for owner, mine in enumerate(timeline.spans):
        for action, _, end in mine:
            reader = _reader(action, stages)
            if reader is None:
                continue
            if rank == owner:
                found.append(((end, owner), Transfer(action, reader % ranks, is_send=True)))
            elif rank == reader % ranks:
                found.append(((end, owner), Transfer(action, owner, is_send=False)))
    return sorted(found, key=lambda entry: entry[0])


def _needed(action: Action, stages: int) -> Action | None:
    needed = action.needs
    return None if needed is None or needed.stage == stages else needed


def _reader(action: Action, stages: int) -> int | None:
    """Return the stage that reads what an action makes."""
    stage = action.stage + (1 if action.way is Pass.FORWARD else -1)
    return stage if 0 <= stage < stages else None
