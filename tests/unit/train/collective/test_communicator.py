"""Tensors on different devices: ranks that give such to one collective are named, and nobody hangs.

A tensor of torch's device ``meta`` stands for one of a GPU: it has a shape, a type and a device, no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.collective import headers
from stoker_train.collective.communicator import Communicator

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_train.collective.headers import Call


class Lane:
    """Takes the calls of one rank, and does nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def submit(self, call: Call, run: Any, inline: Any = None, **options: Any) -> Lane:
        self.calls.append(call)
        return self

    def then(self, function: Any) -> Lane:
        return self

    def wait(self) -> torch.Tensor:
        return torch.zeros(2, 1)

    def lane(self, source: int, to: int) -> Lane:
        return self


CALLS: dict[str, Callable[[Communicator, torch.Tensor], Any]] = {
    "all_reduce": lambda group, one: group.all_reduce_async(one),
    "reduce": lambda group, one: group.reduce(one, 1),
    "broadcast": lambda group, one: group.broadcast(one, 0),
    "all_gather": lambda group, one: group.all_gather(one),
    "reduce_scatter": lambda group, one: group.reduce_scatter(one),
    "send": lambda group, one: group.send(one, 1),
    "grouped_all_reduce": lambda group, one: group.grouped_all_reduce([one, one]),
    "grouped_broadcast": lambda group, one: group.grouped_broadcast([one, one]),
}


@pytest.mark.parametrize("operation", CALLS)
def test_ranks_whose_tensors_are_on_different_devices_are_named(operation: str) -> None:
    sent = b""
    for rank, device in enumerate(("cpu", "meta", "cpu")):
        lane: Any = Lane()
        CALLS[operation](Communicator("g", (0, 1, 2), 0, lane, lane), torch.zeros(3, device=device))
        (call,) = lane.calls
        sent += headers.encode(call, 1, rank)
    assert not headers.agree(sent)
    said, apart = headers.differences(sent, (0, 1, 2))
    assert apart == (1,)
    assert [line.endswith(" on meta") for line in said.splitlines()] == [False, True], said
