"""Messages between the ranks of a pipeline: no order of waiting deadlocks, on whatever lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from stoker_train.sharded.pipelining.schedules import Action, Pass
from stoker_train.sharded.pipelining.timeline import Transfer, simulate, steps
from tests.unit.train.sharded.pipelining.drawn import orders_of, pipelines

if TYPE_CHECKING:
    from stoker_train.sharded.pipelining.schedules import Kind
    from stoker_train.sharded.pipelining.timeline import Step


def run_blocking(orders: list[list[Step]]) -> None:
    """Run with the least that lines can do: a send and its receive meet, and block both ranks until then."""
    places = [0] * len(orders)

    def at(rank: int) -> Step | None:
        return orders[rank][places[rank]] if places[rank] < len(orders[rank]) else None

    while any(at(rank) is not None for rank in range(len(orders))):
        moved = False
        for rank in range(len(orders)):
            step = at(rank)
            if isinstance(step, Action):
                places[rank] += 1
                moved = True
            elif (
                step is not None
                and step.is_send
                and at(step.peer) == Transfer(step.action, rank, is_send=False)
            ):
                places[rank] += 1
                places[step.peer] += 1
                moved = True
        assert moved, [str(at(rank)) for rank in range(len(orders))]


@settings(deadline=None)
@given(pipelines())
def test_ranks_never_wait_for_each_other(one: tuple[Kind, int, int, int]) -> None:
    timeline = simulate(orders_of(*one))
    orders = [steps(timeline, rank) for rank in range(one[1])] if one[1] > 1 else []
    run_blocking(orders)
    for rank, order in enumerate(orders):
        computed = [step for step in order if isinstance(step, Action)]
        assert computed == [action for action, _, _ in timeline.spans[rank]]
        come: set[Action] = set()
        made: set[Action] = set()
        for step in order:
            if isinstance(step, Transfer):
                assert step.peer != rank
                assert step.is_send == (step.action in made)
                come |= set() if step.is_send else {step.action}
                continue
            made.add(step)
            needed = step.needs
            last = one[1] * one[3] - 1
            if needed is not None and needed.stage <= last:
                assert needed in come, "what a pass reads has been asked for before it"


def test_a_receive_is_posted_before_the_pass_during_which_its_message_is_made() -> None:
    timeline = simulate(orders_of("1f1b", 2, 2, 1))  # type: ignore[arg-type]
    first = [str(s) if isinstance(s, Action) else s for s in steps(timeline, 0)]
    second = steps(timeline, 1)

    def forward(number: int) -> Action:
        return Action(Pass.FORWARD, 0, number)

    assert second[:3] == [
        Transfer(forward(0), 0, is_send=False),
        Transfer(forward(1), 0, is_send=False),
        Action(Pass.FORWARD, 1, 0),
    ]
    assert first[:4] == [
        "0F0",
        Transfer(forward(0), 1, is_send=True),
        "0F1",
        Transfer(forward(1), 1, is_send=True),
    ]


def test_one_rank_alone_sends_nothing() -> None:
    timeline = simulate(orders_of("1f1b", 1, 3, 1))  # type: ignore[arg-type]
    assert all(isinstance(step, Action) for step in steps(timeline, 0))
    assert timeline.bubble(0) == pytest.approx(0.0)
