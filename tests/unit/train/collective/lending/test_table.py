"""The order of requests for lent tensors: whatever order and however often they are heard in."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from stoker.exceptions import ObjectLostError, SerializationError
from stoker_train.collective.errors import CollectiveError
from stoker_train.collective.lending.loans import Loan
from stoker_train.collective.lending.table import Lent, Wanted


class Recorder:
    """A lane that notes what it is given; its handles have the result at once."""

    def __init__(self, label: str, ranks: tuple[int, ...], fails: bool = False) -> None:
        self.label, self.ranks, self.fails = label, ranks, fails
        self.calls: list[str] = []

    def submit(self, call: Any, run: Any) -> Any:
        if self.fails:
            raise CollectiveError("the group has failed")
        self.calls.append(call.detail)
        return self

    def wait(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.uint8)


def lender(**options: bool) -> tuple[Lent, dict[str, Recorder], list[tuple[str, Any]]]:
    lanes: dict[str, Recorder] = {}
    told: list[tuple[str, Any]] = []

    def make(label: str, ranks: tuple[int, ...]) -> Any:
        lanes[label] = Recorder(label, ranks, **options)
        return lanes[label]

    return Lent(0, make, lambda what, value: told.append((what, value))), lanes, told


def test_each_request_is_served_once_in_the_order_of_its_reader(seed: int) -> None:
    draw = random.Random(seed)
    lent, lanes, _ = lender()
    wanted = [
        Wanted(0, reader, number, bytes([reader, number])) for reader in (1, 2) for number in range(9)
    ]  # fmt: skip
    heard = [*wanted, *draw.sample(wanted, 6)]
    draw.shuffle(heard)
    for one in heard:
        lent.take(msgspec.msgpack.encode(one))
    for reader in (1, 2):
        lane = lanes[f"lent 0->{reader}"]
        assert lane.ranks == (0, reader)
        assert lane.calls == [bytes([reader, number]).hex() for number in range(9)]


def test_a_reader_numbers_its_requests_by_lender() -> None:
    lent, lanes, told = lender()
    for number in range(3):
        for owner in (1, 2):
            lent.fetch(owner, bytes([owner, number]), 4, is_cuda=False)
    assert lanes["lent 1->0"].calls == [bytes([1, number]).hex() for number in range(3)]
    assert [what for what, _ in told] == [
        f"want/{owner}/0/{number}" for number in range(3) for owner in (1, 2)
    ]
    assert all(value.number == int(what.rpartition("/")[2]) for what, value in told)


def test_own_tensors_need_no_way_and_are_gone_when_dropped() -> None:
    lent, lanes, _ = lender()
    token = lent.keep(torch.arange(3, dtype=torch.int32))
    found = lent.fetch(0, token, 12, is_cuda=False)
    assert found.view(torch.int32).tolist() == [0, 1, 2]
    found.zero_()
    assert lent.fetch(0, token, 12, is_cuda=False).any(), "each reader has a copy"
    lent.drop(token)
    with pytest.raises(ObjectLostError, match="was freed with its object"):
        lent.fetch(0, token, 12, is_cuda=False)
    assert not lanes


def test_a_group_that_failed_sends_nothing_and_raises_nothing() -> None:
    lent, _, _ = lender(fails=True)
    lent.take(msgspec.msgpack.encode(Wanted(0, 1, 0, b"t")))


def test_outside_of_the_group_it_cannot_be_read() -> None:
    with pytest.raises(
        SerializationError, match="of collective group 'nobody' cannot be read here"
    ):
        Loan("nobody", "id", 1, b"t", 4, False).borrow()
