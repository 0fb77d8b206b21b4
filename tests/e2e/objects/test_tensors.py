"""Tensors and large bytes end to end: through calls, results, actors and the arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stoker
from tests.e2e.conftest import WAIT_S, get

torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

pytestmark = pytest.mark.usefixtures("cluster")

LARGE = 300_000
TORCH_IMPORT_S = 2 * WAIT_S
TARGET = 10.0


@stoker.remote
def doubled(value: Any) -> Any:
    """In place: what arrived is this task's own."""
    return value.mul_(2)


@stoker.remote
def same(*values: Any, **more: Any) -> Any:
    return [*values, *more.values()]


class LocalTrainer:
    """Takes a model's state, trains, gives it back.

    What is learned is far from what a fresh model answers, in small steps: a loss that comes
    near zero is a difference of near numbers, and says how many threads added them up.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(batch) - TARGET).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> Any:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


Trainer = stoker.remote(LocalTrainer)


@pytest.mark.parametrize("count", [10, LARGE], ids=["inline", "stored"])
def test_what_a_task_writes_to_its_argument_nobody_else_sees(count: int) -> None:
    sent = torch.arange(count, dtype=torch.bfloat16)
    ref = stoker.put(sent)
    found = get([doubled.remote(ref), doubled.remote(ref), doubled.remote(sent)], TORCH_IMPORT_S)
    assert all(torch.equal(f, sent * 2) for f in found)
    mine = get(ref)
    assert torch.equal(mine, sent)
    mine.zero_()
    assert torch.equal(get(ref), sent)


def test_a_stored_tensor_lies_in_shared_memory() -> None:
    ref = stoker.put(torch.ones(LARGE))
    found = get(ref)
    (line,) = [line for line in mappings() if line[0] <= found.data_ptr() < line[1]]
    assert line[2].endswith(ref.id)


def mappings() -> list[tuple[int, int, str]]:
    """Begin, end and file of what this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        (int(begin, 16), int(end, 16), line.split()[-1])
        for line in lines
        for begin, _, end in [line.split()[0].partition("-")]
    ]


def test_a_model_trains_in_an_actor_and_its_state_comes_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 1))
    batch = torch.ones(4, 300)
    trainer = Trainer.remote(model)
    losses = get([trainer.step.remote(batch) for _ in range(3)], TORCH_IMPORT_S)
    state = get(trainer.state.remote())
    next_loss = get(trainer.step.remote(batch))
    stoker.kill(trainer)
    here = LocalTrainer(model)
    assert [here.step(batch) for _ in range(3)] == pytest.approx(losses, rel=1e-4)
    again = LocalTrainer(model)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    assert again.step(batch) == pytest.approx(next_loss, rel=1e-4)


def test_large_bytes_as_arguments_and_results() -> None:
    for size in (70_000, 1_000_000):
        content = bytes(range(250)) * (size // 250)
        found = get(same.remote(content, bytearray(content), [content], named=content))
        assert found == [content, bytearray(content), [content], content]
        assert [type(f) for f in found] == [bytes, bytearray, list, bytes]
        assert get(stoker.put(bytearray(content))) == content
