"""Refs whose tensors stay with a member and go to others of its group: order, ends, and who may read."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import collective
from stoker.exceptions import (
    BadRequestError,
    NotFoundError,
    ObjectLostError,
    SerializationError,
    StokerError,
)
from tests.e2e._cluster import WAIT_S
from tests.e2e.train.collective.crew import Crew, by_value

if TYPE_CHECKING:
    from collections.abc import Callable


def put(seed: int, count: int, transport: str = "collective") -> list[Any]:
    import torch

    state = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, generator=state)
    value = {"a": whole, "half": whole[: count // 2], "n": torch.arange(seed, dtype=torch.int16)}
    return [stoker.put(value, tensor_transport=transport)]


def read(refs: list[Any], seed: int, count: int) -> bool:
    import torch

    value = stoker.get(refs[0])
    state = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, generator=state)
    value["a"] += 1  # a copy of the reader's own
    return bool(
        torch.equal(value["a"], whole + 1)
        and torch.equal(value["half"], whole[: count // 2])
        and torch.equal(value["n"], torch.arange(seed, dtype=torch.int16))
    )


def put_what_cannot_be_packed() -> str:
    import threading

    import torch

    try:
        stoker.put([torch.ones(3), threading.Lock()], tensor_transport="collective")
    except SerializationError as error:
        return type(error).__name__
    return "packed"


def put_and_ask(other: Any, seed: int, count: int) -> bool:
    """Read by another member while this one is inside of a call."""
    return bool(stoker.get(other.run.remote(read, put(seed, count), seed, count), timeout=40))


def read_many(refs: list[Any], first: int, count: int) -> bool:
    """From several threads at once, in an order of their own."""
    from concurrent.futures import ThreadPoolExecutor

    order = sorted(range(len(refs)), key=lambda number: (number * 7) % 11)
    with ThreadPoolExecutor(4) as threads:
        return all(threads.map(lambda n: read([refs[n]], first + n, count), order))


def put_many(first: int, count: int, size: int) -> list[Any]:
    return [put(first + number, size)[0] for number in range(count)]


def kept() -> int:
    return len(collective.group().lent._kept)


by_value(put, read, put_and_ask, put_what_cannot_be_packed, read_many, put_many, kept)


def test_members_read_what_another_has_put_and_others_do_not(
    crew: Callable[[int], Crew], seed: int
) -> None:
    count = 1_000_000
    one, other, outsider = crew(3).members
    Crew([one, other]).form()
    (refs,) = (stoker.get(one.run.remote(put, 7, count), timeout=WAIT_S),)
    assert stoker.get(other.run.remote(read, refs, 7, count), timeout=WAIT_S)
    assert stoker.get(one.run.remote(read, refs, 7, count), timeout=WAIT_S), "the lender's own"
    failed = stoker.get(one.run.remote(put_what_cannot_be_packed), timeout=WAIT_S)
    assert failed == "SerializationError"
    assert stoker.get(one.run.remote(kept), timeout=WAIT_S) == 3, (
        "and what was packed before is gone"
    )
    with pytest.raises(SerializationError, match="cannot be read here"):
        stoker.get(outsider.run.remote(read, refs, 7, count), timeout=WAIT_S)
    with pytest.raises(SerializationError, match="cannot be read here"):
        stoker.get(refs[0])
    assert stoker.get(one.run.remote(put_and_ask, other, 8, 1000), timeout=WAIT_S)
    with pytest.raises(NotFoundError, match="in no group 'another'"):
        stoker.get(one.run.remote(put, 7, 8, "collective:another"), timeout=WAIT_S)
    with pytest.raises(BadRequestError, match="is not known"):
        stoker.get(one.run.remote(put, 7, 8, "rdma"), timeout=WAIT_S)


def test_many_requests_keep_their_order_in_both_directions(
    crew: Callable[[int], Crew], seed: int
) -> None:
    pair = crew(2)
    pair.form()
    one, other = pair.members
    firsts = stoker.get(
        [member.run.remote(put_many, 100 * n, 24, 5000) for n, member in enumerate((one, other))],
        timeout=WAIT_S,
    )
    reads = [other.run.remote(read_many, firsts[0], 0, 5000)]
    reads += [one.run.remote(read_many, firsts[1], 100, 5000)]
    assert stoker.get(reads, timeout=2 * WAIT_S) == [True, True]
    assert (
        pair.run(lambda: collective.group().all_reduce(__import__("torch").ones(3)).tolist())
        == [[2.0] * 3] * 2
    ), "collectives of the group are not disturbed"


def test_what_was_freed_or_died_is_an_error(crew: Callable[[int], Crew], seed: int) -> None:
    trio = crew(3)
    one, other, third = trio.members
    Crew([one, other]).form()

    def forgotten() -> Any:
        import pickle

        from stoker_train.collective.lending.loans import lending_of

        lending = lending_of("default")
        loan = lending.lend(__import__("torch").ones(4))
        lending.revoke()
        return pickle.dumps(loan)

    def borrow(loan: bytes) -> Any:
        import pickle

        return len(pickle.loads(loan).borrow())

    loan = stoker.get(one.run.remote(forgotten), timeout=WAIT_S)
    for member in (one, other):
        with pytest.raises(ObjectLostError, match="was freed with its object"):
            stoker.get(member.run.remote(borrow, loan), timeout=WAIT_S)
    refs = stoker.get(one.run.remote(put, 3, 1000), timeout=WAIT_S)
    assert stoker.get(other.run.remote(read, refs, 3, 1000), timeout=WAIT_S), "the lane goes on"
    os.kill(stoker.get(one.pid.remote(), timeout=WAIT_S), signal.SIGKILL)
    with pytest.raises(StokerError):
        stoker.get(other.run.remote(read, refs, 3, 1000), timeout=2 * WAIT_S)
    trio.members.remove(one)
    assert third is trio.members[-1]
