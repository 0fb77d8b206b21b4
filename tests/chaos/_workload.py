"""Tasks and an actor for tests of faults; none may run twice. Workers import it, so it imports little."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

import stoker

if TYPE_CHECKING:
    from collections.abc import Iterator

GET_S = 40.0
SMALL = {"num_cpus": 0.5, "max_retries": 0}


@stoker.remote(**SMALL)
def double(number: int) -> int:
    return 2 * number


@stoker.remote(**SMALL)
def sum_of_doubles(numbers: list[int]) -> int:
    return sum(stoker.get([double.remote(number) for number in numbers], timeout=GET_S))


@stoker.remote(**SMALL)
def block(number: int) -> Any:
    return np.full(1 << 16, number, dtype=np.int32)


@stoker.remote(**SMALL)
def last_of(values: Any) -> int:
    return int(values[-1])


@stoker.remote(**SMALL)
def count_to(number: int) -> Iterator[Any]:
    for one in range(number):
        time.sleep(0.01)
        yield np.full(1 << 15, one, dtype=np.int32)


@stoker.remote(num_cpus=0, max_restarts=1, max_task_retries=0)
class Echo:
    def echo(self, number: int) -> int:
        return number


@stoker.remote(num_cpus=0, max_restarts=1, max_task_retries=0)
class Tally:
    """An actor whose state outlives its worker."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def __stoker_save__(self) -> int:
        return self.count

    def __stoker_restore__(self, state: int) -> None:
        self.count = state


@stoker.remote(**SMALL)
def version_of_worker() -> str:
    from stoker_wire import version

    return version.VERSION
