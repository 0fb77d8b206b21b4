"""Loops in Horovod's elastic style, over a replica that resizes and loses members when it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stoker.train
from stoker.exceptions import BadRequestError, ConflictError
from stoker.train import elastic
from stoker_train.elastic import horovod
from stoker_train.elastic.replica.current import set_current
from stoker_train.elastic.state.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Iterator


class LostError(Exception):
    """What a collective raises when a member is gone."""


class Replica:
    """A replica's context: ``changes`` are the commits at which the membership changes, and to how many."""

    def __init__(self, changes: dict[int, int] | None = None) -> None:
        self.rank, self.world_size, self.generation = 0, 2, 1
        self.device = torch.device("cpu")
        self.changes = changes or {}
        self.commits = self.recovered = self.joined = 0
        self.train_state = TrainState()
        self.recorded: list[tuple[Any, ...]] = []

    def record_samples(self, *entry: Any) -> None:
        self.recorded.append(entry)

    def state(self, **objects: Any) -> TrainState:
        self.train_state = TrainState(**objects)
        self.train_state.commit(0)
        return self.train_state

    def join(self) -> None:
        self.joined += 1

    def commit(self) -> bool:
        self.commits += 1
        self.train_state.commit(self.commits)
        return self.check_orders()

    def check_orders(self) -> bool:
        world = self.changes.pop(self.commits, None)
        if world is not None:
            self.world_size, self.generation = world, self.generation + 1
        return world is not None

    def recover(self, error: BaseException) -> None:
        if not isinstance(error, LostError):
            raise error
        self.recovered += 1
        self.world_size -= 1
        self.train_state.restore(max(self.train_state.committed_steps))


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica()
    set_current(replica)
    yield replica
    set_current(None)


def test_the_names_of_horovod_are_where_users_look_for_them() -> None:
    for name in horovod.__all__:
        assert getattr(elastic, name) is getattr(horovod, name)
    assert stoker.train.elastic is elastic
    with pytest.raises(AttributeError):
        _ = elastic.nothing


def test_a_loop_goes_on_through_changes_and_losses(replica: Replica) -> None:
    replica.changes = {2: 3, 5: 1}
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    seen: list[tuple[int, int, int]] = []
    resets: list[int] = []
    failures = iter([4, 9])
    fails_at = next(failures)

    @elastic.run
    def train(state: Any) -> str:
        nonlocal fails_at
        for state.epoch in range(state.epoch, 2):  # noqa: B020
            for state.batch in range(state.batch, 4):  # noqa: B020
                seen.append((state.epoch, state.batch, horovod.size()))
                if len(seen) == fails_at:
                    fails_at = next(failures, -1)
                    with torch.no_grad():
                        model.weight.fill_(float("nan"))
                    raise LostError
                with torch.no_grad():
                    model.weight.add_(1.0)
                state.batch += 1
                state.commit()
            state.batch = 0
        return "done"

    state = horovod.TorchState(model=model, epoch=0, batch=0)
    state.register_reset_callbacks([lambda: resets.append(horovod.size())])
    start = model.weight.detach().clone()
    assert train(state) == "done"
    assert replica.joined == 1
    assert replica.recovered == 2
    assert resets == [3, 2, 1, 0]
    # Each batch's update counts once: the two that failed were undone and done again.
    assert torch.equal(model.weight.detach(), start + 8)
    assert (state.epoch, state.batch) == (1, 0)


def test_a_mistake_of_the_loop_is_raised(replica: Replica) -> None:
    @elastic.run
    def train(state: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(horovod.ObjectState(x=1))
    with pytest.raises(TypeError, match="must be a State"):
        train(3)


def test_outside_a_replica_the_error_says_where_to_call_it() -> None:
    with pytest.raises(ConflictError, match="runs no loop of an elastic trainer"):
        horovod.ObjectState(x=1)


def test_save_and_restore_alone(replica: Replica) -> None:
    state = horovod.ObjectState(x=1)
    state.x = 2
    state.save()
    state.x = 3
    state.restore()
    assert state.x == 2
    with pytest.raises(AttributeError):
        state.y = 1


def test_the_sampler_shares_out_what_is_left(replica: Replica) -> None:
    used: list[int] = []
    sampler = horovod.ElasticSampler(list(range(23)), seed=3)
    state = horovod.TorchState(sampler=sampler, epoch=0)

    def shares() -> list[list[int]]:
        found = []
        for rank in range(replica.world_size):
            replica.rank = rank
            state.on_reset()
            found.append(list(sampler))
        replica.rank = 0
        state.on_reset()
        return found

    sampler.set_epoch(1)
    replica.world_size = 2
    for share in shares():
        used += share[:6]
    sampler.record_batch(0, 6)
    replica.world_size = 3
    left = shares()
    assert len({len(share) for share in left}) == 1
    assert len(sampler) == len(left[0]) == 4
    for share in left:
        used += share
    assert set(used) == set(range(23))
    assert len(used) == 24  # one was used twice, to be as many on all ranks
    saved = sampler.state_dict()
    sampler.set_epoch(2)
    assert len(sampler) == 8
    sampler.load_state_dict(saved)
    assert len(sampler) == 4


def test_what_a_sampler_records_is_in_the_ledger_once_it_is_committed(replica: Replica) -> None:
    sampler = horovod.ElasticSampler(list(range(10)), seed=3)
    other = horovod.ElasticSampler(list(range(4)))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = horovod.TorchState(model, optimizer, other=other, sampler=sampler)
    sampler.set_epoch(0)
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 1)
    assert sampler.processed_indices == [*map(int, sampler._order()[:6])]
    assert not replica.recorded
    state.commit()
    assert replica.recorded == [(0, 0, 6, 10, 6, 0.5)], "of two batches, by both ranks"
    state.commit()
    sampler.record_indices(sampler._order()[6:7])
    sampler.record_batch(2, 2)  # one of these is filled up
    sampler.set_epoch(1)
    sampler.record_batch(0, 1)
    state.commit()
    assert replica.recorded[1:] == [(0, 6, 4, 10, 5, 0.5), (1, 0, 2, 10, 2, 0.5)]
    with pytest.raises(BadRequestError, match="indices are not the next 1 samples of epoch 1"):
        sampler.record_indices(sampler._order()[5:6])
    # What was recorded, and then lost, is not in the ledger.
    sampler.record_batch(1, 1)
    state.restore()
    assert sampler.processed_num == 2
    state.commit()
    assert len(replica.recorded) == 3


def test_what_a_loop_records_and_does_not_commit_is_in_the_ledger_at_its_end(
    replica: Replica,
) -> None:
    sampler = horovod.ElasticSampler(list(range(4)), shuffle=False)

    @elastic.run
    def train(state: Any) -> None:
        for number, _ in enumerate(list(sampler)):
            state.sampler.record_batch(number, 1)

    train(horovod.TorchState(sampler=sampler))
    assert replica.recorded == [(0, 0, 4, 4, 4, 0.0)]
