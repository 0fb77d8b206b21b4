"""Servers that die: they go on from their save, a push is applied once, and one gone for good is named."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker_train.parameter_server.errors import ServerLostError, ServerTimeoutError
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable

ps = stoker.ps


def pid_of(server: Any) -> int:
    """The process of a server."""
    found: int = stoker.get(server.__stoker_call__.remote(lambda _: os.getpid()), timeout=40)
    return found


def test_pushes_while_servers_are_killed_are_applied_once_each(start: Callable[..., Any]) -> None:
    """A server that saves before it answers loses nothing, and does nothing twice."""
    group = start(2, save_interval_s=0)
    table = group.sparse("s", 4, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    keys = np.arange(200)
    servers = group.actors
    done, errors = threading.Event(), []

    def kill() -> None:
        try:
            for number in (0, 1, 0):
                pid, before = pid_of(servers[number]), pushed
                until(lambda before=before: pushed > before, 60, "pushes go on")
                os.kill(pid, signal.SIGKILL)
        except BaseException as error:
            errors.append(error)
        done.set()

    pushed = 0
    killer = threading.Thread(target=kill)
    killer.start()
    while not done.is_set() or pushed < 10:
        table.push(keys, -np.ones((200, 4)))
        pushed += 1
    killer.join(60)
    assert not errors
    assert np.array_equal(np.unique(table.pull(keys)), [pushed])


def step_with(group: Any, rank: int, steps: int) -> list[float]:
    with group.worker(rank, 2, reduce="sum") as worker:
        for _ in range(steps):
            worker.push("s", np.arange(50), -np.ones((50, 1)))
            worker.step()
    return sorted({float(one) for one in worker.pull("s", np.arange(50))[:, 0]})


def test_workers_in_step_go_on_past_a_server_that_dies(start: Callable[..., Any]) -> None:
    """A server that saves now and then goes on from an earlier step; nobody waits for what is past."""
    group = start(2, save_interval_s=0.2)
    table = group.sparse("s", 1, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    task = stoker.remote(num_cpus=0)(step_with)
    refs = [task.remote(group, rank, 80) for rank in range(2)]
    pid = pid_of(group.actors[1])
    until(lambda: table.pull([3])[0, 0] >= 20, 60, "steps go on")
    os.kill(pid, signal.SIGKILL)
    stoker.get(refs, timeout=120)
    rows = table.pull(np.arange(50))[:, 0]
    assert rows.max() == 160  # the server that lived has all
    assert (rows <= 160).all()


def test_new_servers_that_die_before_they_have_saved_ask_those_before_again(
    start: Callable[..., Any],
) -> None:
    group = start(2, save_interval_s=None)
    table = group.sparse("s", 2, optimizer=ps.Adagrad(0.1))
    keys = np.arange(300)
    table.push(keys, np.ones((300, 2)))
    rows = np.array(table.pull(keys))
    absent: Any = ps.connect(group.name).table("s")  # by whom the rows are still where they were
    absent.push([-1], np.ones((1, 2)))
    before = group.actors
    group.resize(3)
    for server in group.actors:
        os.kill(pid_of(server), signal.SIGKILL)
    assert np.array_equal(table.pull(keys), rows)
    for server in before:  # one that starts again asks what it had applied before its rows moved
        os.kill(pid_of(server), signal.SIGKILL)
    absent.push([-1], np.ones((1, 2)))
    twice = group.sparse("twice", 2, optimizer=ps.Adagrad(0.1))
    for _ in range(2):
        twice.push([-1], np.ones((1, 2)))
    assert np.array_equal(table.pull([-1]), twice.pull([-1]))


def test_a_server_that_is_gone_for_good_is_named(start: Callable[..., Any]) -> None:
    group = start(2, timeout_s=3)
    table = group.sparse("s", 1)
    keys = np.arange(100)
    table.pull(keys)
    servers = group.actors
    os.kill(pid := pid_of(servers[0]), signal.SIGSTOP)
    try:
        with pytest.raises(
            ServerTimeoutError, match=r"(?s)server 0.*may have been applied"
        ) as late:
            table.push(keys, np.ones((100, 1)))
        assert late.value.extra["servers"] == [0]
    finally:
        os.kill(pid, signal.SIGCONT)
    stoker.kill(servers[1])
    for request in (
        lambda: table.pull(keys),
        lambda: table.push(keys, np.ones((100, 1))),
        lambda: group.worker(0, 1),
        lambda: ps.connect(group.name).table("s"),
    ):
        with pytest.raises(ServerLostError, match=f"parameter server 1 of {group.name}") as lost:
            request()
        assert lost.value.extra["server"] == 1


def test_changes_wait_while_anybody_holds_them_back_whoever_restarts(
    start: Callable[..., Any],
) -> None:
    """Else what is pushed during a resize would be lost: to rows that have been read already."""
    group = start(1, save_interval_s=0)
    table = group.sparse("s", 1, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    table.push([1], [[-1.0]])
    other: Any = ps.connect(group.name).table("s")
    pushing = threading.Thread(target=lambda: other.push([1], [[-1.0]]))
    with group._frozen():
        with ps.connect(group.name)._frozen():
            pass
        os.kill(pid_of(group.actors[0]), signal.SIGKILL)
        assert table.pull([1]).tolist() == [[1.0]]  # it is back
        pushing.start()
        pushing.join(0.5)
        assert table.pull([1]).tolist() == [[1.0]]
    pushing.join(60)
    assert table.pull([1]).tolist() == [[2.0]]
    # One of the next set has saved before the rows moved: it is told to come again, and nothing ends.
    assert stoker.get(group.actors[0].release.remote(0, 1), timeout=40) is False
