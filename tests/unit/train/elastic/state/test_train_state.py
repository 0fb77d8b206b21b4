"""The state of a loop: commits, restores and what is written, over real modules."""

from __future__ import annotations

import copy
import io
import math
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stoker.exceptions import BadRequestError, NameTakenError, NotFoundError, SerializationError
from stoker_train.elastic.data.cursor import Cursor
from stoker_train.elastic.state.train_state import TrainState

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses


class Momentum:
    """An optimizer without torch.optim, which would import Triton here."""

    def __init__(self, module: nn.Module, lr: float = 0.1) -> None:
        self.params, self.lr = list(module.parameters()), lr
        self.state: dict[int, torch.Tensor] = {}

    def step(self) -> None:
        with torch.no_grad():
            for n, one in enumerate(self.params):
                if one.grad is not None:
                    kept = self.state.setdefault(n, torch.zeros_like(one))
                    kept.mul_(0.9).add_(one.grad)
                    one.sub_(self.lr * kept)
                    one.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "state": dict(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr, self.state = state["lr"], dict(state["state"])  # takes the tensors as they are


class Training:
    """A model with buffers and dropout, whose next losses depend on all that a state must hold."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.optimizer = Momentum(self.model)
        self.cursor = Cursor()
        self.average = torch.zeros(8, 4)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, best=math.inf, average=self.average
        )
        self.state.register("cursor", self.cursor)

    def step(self) -> float:
        rows = torch.randn(6, 4)
        loss = self.model(rows).square().mean()
        loss.backward()
        loss = loss.detach()
        self.optimizer.step()
        self.cursor.advance(6)
        self.average.lerp_(self.model[0].weight.detach(), 0.1)  # type: ignore[union-attr, operator]
        self.state.best = min(self.state.best, float(loss) + random.random() * 1e-6)
        return float(loss)

    def values(self) -> tuple[Any, ...]:
        sums = [float(one.double().sum()) for one in self.model.state_dict().values()]
        return (*sums, self.state.best, float(self.average.sum()), self.cursor.step)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
    random.setstate(before)
    torch.set_num_threads(threads)


def test_after_a_restore_all_is_as_it_was() -> None:
    one = Training()
    one.step()
    one.state.commit(1)
    values = one.values()
    losses = [one.step() for _ in range(3)]
    after = one.values()
    one.state.restore(1)
    assert one.values() == values
    assert [one.step() for _ in range(3)] == losses
    assert one.values() == after
    assert one.cursor.jumps == 1
    # And again: what was restored does not share memory with the commit.
    one.state.restore(1)
    assert one.values() == values
    assert [one.step() for _ in range(3)] == losses


def test_of_random_histories_each_restore_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    one = Training()
    seen: dict[int, tuple[Any, ...]] = {}
    step = 0
    for _ in range(40):
        match draw.randrange(4):
            case 0 | 1:
                step += 1
                one.step()
            case 2:
                one.state.commit(step)
                seen[step] = one.values()
            case 3 if one.state.committed_steps:
                step = draw.choice(one.state.committed_steps)
                one.state.restore(step)
                assert one.values() == seen[step]
                assert max(one.state.committed_steps) == step
    assert len(one.state.committed_steps) <= 2


def test_tensors_keep_their_places() -> None:
    one = Training()
    one.step()
    weight, average = one.model[0].weight.data_ptr(), one.average  # type: ignore[union-attr, operator]
    kept = one.optimizer.state[0].data_ptr()
    one.state.commit(1)
    one.step()
    one.state.restore(1)
    assert one.model[0].weight.data_ptr() == weight  # type: ignore[union-attr, operator]
    assert one.state.average is average
    assert one.optimizer.state[0].data_ptr() == kept


def test_a_restore_of_what_is_not_kept() -> None:
    with pytest.raises(NotFoundError, match="no commit of step 3"):
        TrainState().restore(3)


def test_what_is_written_is_read_by_torch_alone_and_goes_on_exactly() -> None:
    one = Training()
    one.step()
    file = io.BytesIO()
    torch.save(one.state.state_dict(), file)
    losses = [one.step() for _ in range(3)]
    file.seek(0)
    payload = torch.load(file, weights_only=True)
    assert payload["version"] == 1
    assert set(payload["per_rank"]) == {"rng"}
    assert torch.equal(
        payload["shared"]["model"]["0.weight"], payload["shared"]["model"]["0.weight"]
    )
    other = Training()
    other.state.load_state_dict(payload)
    assert [other.step() for _ in range(3)] == losses
    # The payload is still the caller's.
    third = Training()
    third.state.load_state_dict(payload)
    assert [third.step() for _ in range(3)] == losses


def test_a_commit_is_written_as_it_was_while_training_goes_on() -> None:
    one = Training()
    one.step()
    one.state.commit(1)
    values = one.values()
    with one.state.committed(1) as payload:
        for step in range(2, 7):
            one.step()
            one.state.commit(step)
        kept = copy.deepcopy(payload)
    other = Training()
    other.state.load_state_dict(kept)
    assert other.values() == values


def test_another_ranks_own_part_may_take_the_place_of_the_written_one() -> None:
    one = TrainState(x=1)
    one.register("memory", torch.ones(2), per_rank=True)
    payload = one.state_dict()
    assert one.shared_names == ("x",)
    mine = {"memory": torch.full((2,), 5.0), "rng": payload["per_rank"]["rng"]}
    one.load_state_dict(payload, per_rank=mine)
    assert one.memory.tolist() == [5.0, 5.0]


def test_what_is_registered_late_is_loaded_then() -> None:
    one = TrainState(x=1)
    one.register("policy", {"grown": 3})
    other = TrainState(x=2)
    other.load_state_dict(one.state_dict())
    other.register("policy", {"grown": 0})
    assert other.policy == {"grown": 3}
    assert other.x == 1


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    one = TrainState(model=nn.Linear(2, 2))
    payload = one.state_dict()
    with pytest.raises(BadRequestError, match="has no 'best'"):
        TrainState(model=nn.Linear(2, 2), best=1).load_state_dict(payload)
    with pytest.raises(BadRequestError, match="version 7"):
        one.load_state_dict({**payload, "version": 7})


def test_names_are_taken_once_and_unknown_ones_are_no_attributes() -> None:
    one = TrainState(best=1.0, model=nn.Linear(1, 1))
    assert isinstance(one.model, nn.Linear)
    for name in ("best", "model", "rng", "commit", "sync"):
        with pytest.raises(NameTakenError) as caught:
            one.register(name, 1)
        assert caught.value.field == name
    with pytest.raises(AttributeError, match="give it to ctx"):
        one.bets = 2
    with pytest.raises(AttributeError):
        _ = one.bets
    with pytest.raises(AttributeError):
        one.model = 3


def test_what_cannot_be_pickled_is_refused_with_its_name() -> None:
    with pytest.raises(SerializationError, match=r"connection\[1\]"):
        TrainState(connection=[1, threading.Lock()])


def test_reset_callbacks_run_in_order() -> None:
    calls: list[int] = []
    one = TrainState()
    one.on_reset(lambda: calls.append(1))
    one.on_reset(lambda: calls.append(2))
    one.run_reset_callbacks()
    assert calls == [1, 2]


def test_a_warm_state_is_as_it_was() -> None:
    one = Training()
    values = one.values()
    one.state.warm()
    assert one.values() == values
    assert one.state.committed_steps == ()
    one.state.commit(0)
    assert one.state.committed_steps == (0,)


def trains_from_a_warm_state(rank: int, world: int, seed: int, name: str) -> bool:
    """Whether a warm state that begins anew takes the same steps as one that was never warm."""
    options = {"lr": 0.1} if name == "Adam" else {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    models = []
    for warm in (False, True):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        state = TrainState(model=model, optimizer=optimizer)
        if warm:
            state.warm()
            state.begin_anew()
            assert not optimizer.state
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    return all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_who_begins_anew_trains_as_if_nothing_was_warm(
    ranks: RankProcesses, seed: int, name: str
) -> None:
    assert ranks.run(trains_from_a_warm_state, 1, seed % 10_000, name) == [True]


def test_what_is_a_ranks_own_is_written_and_read_alone() -> None:
    one, other = Training(), Training()
    one.step()
    one.state.commit(1)
    with one.state.committed_own(1) as own:
        buffer = io.BytesIO()
        torch.save(own, buffer)
    buffer.seek(0)
    values = other.values()
    payload = torch.load(buffer, weights_only=True)
    assert payload.keys() == {"version", "per_rank"}
    other.state.load_own(payload)
    assert other.values() == values, "what all share is as it was"
    drawn = torch.rand(3)
    other.state.load_own(payload)
    assert torch.equal(torch.rand(3), drawn), "the random numbers are those of the commit"
