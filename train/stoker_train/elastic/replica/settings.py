"""The settings of a training that orders change, as a part of its state: all ranks have the same.

Kept, restored and sent to newcomers with the rest of the state, so that a decision outlives who took it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker_train.elastic.core.ledger import Entry
from stoker_train.elastic.core.membership import (
    Action,
    SetBatch,
    SetLocal,
    SetLr,
    SetShares,
    SetSync,
)
from stoker_train.elastic.core.sampler import shares
from stoker_train.elastic.data.loader import StepPlan
from stoker_train.elastic.sync import Strategy, make_strategy

__all__ = ("Fence", "LedgerTail", "Settings", "StrategyMemory", "StrategyState")


class Settings:
    """M, the largest pass, the user's factor on the learning rate, and the ranks' weights."""

    def __init__(self, batch: int, local: int) -> None:
        self.batch, self.local = batch, local
        self.lr_factor = 1.0
        self.weights: tuple[float, ...] = ()
        self.schedule_credit = 0.0
        """What steps were worth to the learning rate's schedule, beyond the steps that it has made."""
        self.skipped = 0
        """Steps that were not finite."""

    def apply(self, action: Action) -> None:
        """Change what an order says."""
        match action:
            case SetBatch():
                self.batch, self.local = action.batch, action.local
            case SetLocal():
                self.local = action.local
            case SetLr():
                self.lr_factor = action.factor
            case SetShares():
                self.weights = action.weights
            case _:
                raise TypeError(f"{action!r} is no setting")

    def plan(self, rank: int, world_size: int, left: int) -> StepPlan:
        """Return a rank's part of the next step, of an epoch with ``left`` samples to go."""
        count = min(self.batch, left)
        weights = self.weights if len(self.weights) == world_size else (1.0,) * world_size
        offset, size = shares(count, weights)[rank]
        return StepPlan(count, offset, size, self.local)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {**vars(self), "weights": list(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        vars(self).update(state)
        self.weights = tuple(state["weights"])


class StrategyState:
    """The strategy of synchronisation that is in use, which orders may replace."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def switch(self, order: SetSync) -> None:
        """Go on with another one."""
        import cloudpickle

        self.strategy = make_strategy(cloudpickle.loads(order.strategy))

    def state_dict(self) -> dict[str, Any]:
        """Return which one it is, and its state."""
        return {"spec": self.strategy.spec(), "state": self.strategy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, with another kind if it was that."""
        if state["spec"] != self.strategy.spec():
            self.strategy = make_strategy(state["spec"])
        self.strategy.load_state_dict(state["state"])


class StrategyMemory:
    """The part of a strategy's state that is a rank's own: what its compressor has not sent yet."""

    def __init__(self, kind: StrategyState) -> None:
        self._kind = kind

    def state_dict(self) -> dict[str, Any]:
        """Return whose memory it is, and the memory."""
        strategy = self._kind.strategy
        return {"spec": strategy.spec(), "state": strategy.rank_state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; the memory of another strategy counts for nothing."""
        strategy = self._kind.strategy
        if state["spec"] == strategy.spec():
            strategy.load_rank_state_dict(state["state"])


class Fence:
    """The number that checkpoints are fenced by: it rises with generations, also from job to job."""

    def __init__(self) -> None:
        self.before = 0
        """Generations of the jobs before, whose checkpoints this one has gone on from."""

    def of(self, generation: int) -> int:
        """Return the number of a generation."""
        return self.before + generation

    def passes(self, found: int, generation: int) -> None:
        """Have ``generation``, which goes on from a checkpoint of number ``found``, come after that."""
        self.before = max(self.before, found + 1 - generation)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.before = int(state["before"])


class LedgerTail:
    """The newest ledger entries, which every rank has: what a rank 0 that died had not sent yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.entries: list[Entry] = []
        self.lengths: dict[int, int] = {}

    def add(self, entry: Entry) -> None:
        """Append an entry; the oldest go."""
        self.entries.append(entry)
        if len(self.entries) > 2 * self._most:
            del self.entries[: -self._most]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries as bytes, so that a commit copies them at once."""
        return {"entries": msgspec.msgpack.encode(self.entries), "lengths": dict(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.entries = msgspec.msgpack.decode(bytes(state["entries"]), type=list[Entry])
        self.lengths = {int(epoch): length for epoch, length in state["lengths"].items()}
