"""Parts of a replica's state: the fence of checkpoints, and what a compressor has not sent yet."""

from __future__ import annotations

from typing import Any

from stoker_train.elastic.replica.settings import Fence, StrategyMemory, StrategyState
from stoker_train.elastic.sync.strategy import Strategy


class Remembers(Strategy):
    """A strategy with a memory, without a compressor's kernels."""

    name = "all_reduce"
    memory = 0.0

    def rank_state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_rank_state_dict(self, state: Any) -> None:
        self.memory = state["memory"]


def test_the_memory_of_a_strategy_comes_back_with_it() -> None:
    one = Remembers("int8")
    one.memory = 0.5
    kept = StrategyMemory(StrategyState(one)).state_dict()
    other = Remembers("int8")
    StrategyMemory(StrategyState(other)).load_state_dict(kept)
    assert other.memory == 0.5
    unlike = Remembers("topk")
    StrategyMemory(StrategyState(unlike)).load_state_dict(kept)
    assert unlike.memory == 0.0, "the memory of another strategy is none of its"


def test_a_fence_rises_with_generations_and_with_jobs() -> None:
    first = Fence()
    assert [first.of(generation) for generation in (1, 2, 7)] == [1, 2, 7]
    first.passes(7, 8)  # of the same job, which has gone back to a checkpoint
    assert first.of(8) == 8
    resumed = Fence()
    resumed.load_state_dict(first.state_dict())
    resumed.passes(8, 1)  # a new job that goes on from it
    assert resumed.of(1) == 9
    again = Fence()
    again.load_state_dict(resumed.state_dict())
    again.passes(9, 2)
    assert again.of(2) == 10
