"""One state for all ranks, over real process groups: newcomers, survivors, and ranks that differ."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stoker.exceptions import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.train.elastic.rank_processes import RankProcesses


def make(rank: int, seed: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """A state with an optimizer that has none of its own yet, unless it has stepped."""
    from stoker_train.elastic.data.cursor import Cursor
    from stoker_train.elastic.state.train_state import TrainState

    torch.manual_seed(seed + rank)
    model = nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 300_000 // 8)
    )
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (rank + 1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = TrainState(
        model=model, optimizer=optimizer, scheduler=schedule, best=float(rank), words=["a"] * rank
    )
    state.register("cursor", Cursor(step=rank))
    state.register("memory", torch.full((3,), float(rank)), per_rank=True)
    return state


def train(state: Any, steps: int) -> None:
    for _ in range(steps):
        loss = state.model(torch.randn(3, 4, dtype=state.model[0].weight.dtype)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()


def digest(state: Any) -> Any:
    """All shared tensors' sums and all else, for comparison between processes."""
    from stoker_train.elastic.state.trees import flatten

    flat = flatten({name: state.state_of(name) for name in state.shared_names})
    sums = [float(one.double().sum()) for one in flat.tensors]
    return flat.paths, sums, repr(flat.skeleton)


def joins(rank: int, world: int, seed: int, source: int, how: str) -> Any:
    state = make(rank, seed)
    if rank == source or (how == "survivors" and rank != 2):
        torch.manual_seed(seed)
        if how == "survivors":  # they have all the same
            same = make(0, seed).capture()
            state.adopt({name: same[name] for name in state.shared_names})
        train(state, 3)
    elif how == "warm":
        before = digest(state)[1][:4]
        state.warm()
        assert digest(state)[1][:4] == before
        assert state.optimizer.state
    step = None
    if how == "commit":
        step = 3
        if rank == source:
            state.commit(3)
            train(state, 1)  # the commit is what is sent
            state.restore(3)
    with counted(reads=how != "wire") as sent:
        state.sync(None, source, step=step, needed=how != "survivors" or rank == 2)
    answer = digest(state), state.memory.tolist(), sent
    torch.manual_seed(seed)
    train(state, 2)  # and it goes on in the same way
    return (*answer, digest(state))


@contextmanager
def counted(*, reads: bool) -> Iterator[dict[str, int]]:
    """Count the messages that carry tensors of the state; whether ranks can read the source's memory."""
    from unittest.mock import patch

    import torch.distributed as dist

    from stoker_train.elastic.state import synchronization

    sent = {"broadcast": 0, "p2p": 0}
    broadcast, isend, mapped = dist.broadcast, dist.isend, synchronization._mapped

    def counted_broadcast(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent["broadcast"] += tensor.dtype == torch.float32
        return broadcast(tensor, *args, **kwargs)

    def counted_isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent["p2p"] += 1
        return isend(tensor, *args, **kwargs)

    with (
        patch.object(dist, "broadcast", counted_broadcast),
        patch.object(dist, "isend", counted_isend),
        patch.object(synchronization, "_mapped", mapped if reads else lambda plan: None),
    ):
        yield sent


@pytest.mark.parametrize("how", ["read", "commit", "wire", "warm", "survivors"])
def test_all_ranks_have_the_state_of_the_source(ranks: RankProcesses, seed: int, how: str) -> None:
    source = 0 if how == "survivors" else seed % 3
    answers = ranks.run(joins, 3, seed % 10_000, source, how)
    for after, memory, sent, later in answers:
        assert after == answers[source][0]
        assert later == answers[source][3]
        assert sent["p2p"] == 0
        # On one machine no tensor goes over the group, unless it cannot be read.
        assert (sent["broadcast"] > 0) == (how == "wire")
        assert memory in ([0.0] * 3, [1.0] * 3, [2.0] * 3)
    assert [memory[0] for _, memory, _, _ in answers] == [0.0, 1.0, 2.0]


def joins_alone(rank: int, world: int, seed: int) -> Any:
    state = make(0 if rank < 2 else rank, seed)
    if rank < 2:
        torch.manual_seed(seed)
        train(state, 2)
    with counted(reads=False) as sent:
        state.sync(needed=rank == 2)
    return digest(state), sent["p2p"]


def test_a_newcomer_alone_is_sent_the_state_alone(ranks: RankProcesses, seed: int) -> None:
    answers = ranks.run(joins_alone, 3, seed % 10_000)
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert answers[0][1] > 0
    assert answers[1][1] == answers[2][1] == 0


def differs(rank: int, world: int, seed: int, how: str) -> str:
    odd = rank == 1
    state = make(
        rank,
        seed,
        width=16 if odd and how == "shape" else 8,
        dtype=torch.float64 if odd and how == "type" else torch.float32,
    )
    if odd and how == "name":
        state.register("extra", 1)
    try:
        state.sync()
    except ConflictError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("shape", "model.0.weight has shape (16, 4), at the source (8, 4)"),
        ("type", "model.0.weight has type torch.float64, at the source torch.float32"),
        ("name", "'extra' is in the state of this rank only"),
    ],
)
def test_a_rank_that_differs_is_named_on_all_ranks(
    ranks: RankProcesses, seed: int, how: str, says: str
) -> None:
    answers = ranks.run(differs, 3, seed % 10_000, how)
    assert len(set(answers)) == 1
    assert answers[0].startswith("the state of rank 1 cannot be synced")
    assert says in answers[0]


def alone(rank: int, world: int, seed: int) -> bool:
    state = make(rank, seed)
    before = digest(state)
    state.sync()
    return bool(digest(state) == before)


def test_one_rank_alone_has_nothing_to_do(ranks: RankProcesses, seed: int) -> None:
    assert ranks.run(alone, 1, seed % 10_000) == [True]
