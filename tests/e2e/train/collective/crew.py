"""Crews for the tests of ``stoker.collective``: actors that run what a test sends them, in groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import stoker
from stoker import collective
from tests.e2e._cluster import WAIT_S
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable


@stoker.remote(num_cpus=0, max_concurrency=4)
class Member:
    """Runs what a test sends it."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


class Crew:
    """Some members, and what they are told to do."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members

    def start(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [member.run.remote(function, *args) for member in self.members]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank."""
        return stoker.get(self.start(function, *args), timeout=2 * WAIT_S)

    def form(self, name: str = "default", **options: Any) -> None:
        collective.init_group(self.members, name=name, **{"timeout_s": WAIT_S, **options})

    def pids(self) -> list[int]:
        return stoker.get([member.pid.remote() for member in self.members], timeout=WAIT_S)


class Pool:
    """The living actors of the module."""

    def __init__(self) -> None:
        self.free: list[Any] = []

    def take(self, count: int) -> list[Any]:
        while len(self.free) < count:
            self.free.append(Member.remote())
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def leave_all() -> None:
    from stoker_train.collective import joining

    for name in list(joining._GROUPS._by_name):
        joining.destroy_group(name=name)


def by_value(*functions: Callable[..., Any]) -> None:
    """Have functions of this module, which no worker can import, travel as they are."""
    for function in functions:
        function.__module__ = "__main__"


def outcome() -> tuple[str, str, list[int]]:
    """What a reduction of one member ends with."""
    import numpy as np

    import stoker

    try:
        stoker.collective.group().all_reduce(np.ones(1000), name="grad")
    except stoker.collective.CollectiveError as error:
        return type(error).__name__, str(error), error.extra.get("ranks", [])
    return "", "", []


by_value(leave_all, outcome)


def until_waiting(crew: Crew, *ranks: int) -> None:
    """Return once those ranks are in a collective."""

    def waiting() -> bool:
        from stoker_train.collective import joining

        found = joining.group()
        return any(lane.current is not None for lane in found._lanes)

    by_value(waiting)
    for rank in ranks:
        until(
            lambda rank=rank: stoker.get(crew.members[rank].run.remote(waiting), timeout=WAIT_S),
            WAIT_S,
            f"rank {rank} is in a collective",
        )
