"""The ledger of loops that record their samples: told once committed, and exact after each way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker_train.elastic.core.ledger import Ledger
from stoker_train.elastic.options import Checkpoint, Scaling
from stoker_train.elastic.replica.context import Context
from stoker_train.elastic.replica.settings import Fence

LENGTH = 10


class LostError(Exception):
    """What a collective raises when a member is gone."""


class Engine:
    """The engine of rank 0, whose reports go to a ledger, as the controller keeps it."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.generation = 0, 2, 1
        self.device, self.fence, self.link = torch.device("cpu"), Fence(), self
        self.worker, self.durable_step, self.loses = 7, None, False
        self.state: Any = None
        self.after_join: Any = None
        self.ledger = Ledger()
        self.joined = True

    def report(self, progress: Any, *, urgent: bool = False) -> None:
        assert progress.generation == self.generation
        self.ledger.extend(progress.entries)
        for epoch, length in progress.lengths.items():
            self.ledger.set_length(epoch, length)

    def check_lives(self) -> None:
        pass

    def boundary(self) -> None:
        if self.loses:
            raise LostError

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, LostError)

    def recover(self, error: BaseException) -> None:
        self.loses = False
        self.go_back(1)

    def take_orders(self) -> list[Any]:
        return []

    def save(self, *, wait: bool = False) -> None:
        pass

    def go_back(self, commits: int, *, durable: bool = False) -> None:
        """Form the next generation with the state of so many commits ago."""
        step = self.state.committed_steps[-commits - 1 if durable else -1]
        self.state.restore(step)
        self.generation += 1
        self.durable_step = step if durable else None
        self.after_join()

    def used(self) -> list[tuple[int, int, int]]:
        return [(one.epoch, one.first, one.count) for one in self.ledger.entries]


@pytest.fixture
def made() -> tuple[Context, Engine]:
    engine: Any = Engine()
    scaling = Scaling(resources={"CPU": 1}, base_batch=4)
    context = Context(engine, scaling, Checkpoint("unused"))
    context.state(note=0)
    context.commit()
    return context, engine


def test_samples_are_told_once_all_have_committed_them(made: tuple[Context, Engine]) -> None:
    context, engine = made
    context.record_samples(0, 0, 4, LENGTH, 4, 0.5)
    assert engine.used() == []
    assert not context.commit()
    assert engine.used() == [(0, 0, 4)]
    context.commit()
    context.record_samples(0, 4, 6, LENGTH, 8, 0.5)
    context.record_samples(1, 0, 4, LENGTH, 4, 0.5)
    context.finish()
    assert engine.used() == [(0, 0, 4), (0, 4, 6), (1, 0, 4)]
    assert engine.ledger.verify() == []
    assert [one.lr for one in engine.ledger.entries] == [0.5] * 3


def test_what_was_recorded_and_lost_with_a_rank_is_not_in_the_ledger(
    made: tuple[Context, Engine],
) -> None:
    context, engine = made
    context.record_samples(0, 0, 4, LENGTH, 4, 0.5)
    context.commit()
    context.record_samples(0, 4, 2, LENGTH, 2, 0.5)
    engine.go_back(0)  # before it was committed
    assert engine.used() == [(0, 0, 4)]
    context.record_samples(0, 4, 6, LENGTH, 6, 0.5)
    context.commit()
    assert engine.used() == [(0, 0, 4), (0, 4, 6)]
    assert [one.generation for one in engine.ledger.entries] == [1, 2]
    engine.loses = True
    context.record_samples(1, 0, 4, LENGTH, 4, 0.5)
    assert context.commit(), "committed here, and not told: the next generation begins with it"
    assert engine.used() == [(0, 0, 4), (0, 4, 6), (1, 0, 4)]
    assert engine.ledger.verify() == []


def test_a_checkpoint_that_is_older_than_the_ledger_voids_what_comes_after_it(
    made: tuple[Context, Engine],
) -> None:
    context, engine = made
    context.record_samples(0, 0, 4, LENGTH, 4, 0.5)
    context.commit()
    context.record_samples(0, 4, 6, LENGTH, 6, 0.5)
    context.commit()
    assert engine.used() == [(0, 0, 4), (0, 4, 6)]
    engine.go_back(1, durable=True)
    assert engine.used() == [(0, 0, 4)], "though nothing was recorded since"
    context.record_samples(0, 4, 3, LENGTH, 3, 0.5)
    context.commit()
    assert engine.used() == [(0, 0, 4), (0, 4, 3)]
    assert engine.ledger.verify() == []
