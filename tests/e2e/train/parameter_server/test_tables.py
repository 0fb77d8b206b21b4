"""Tables on servers: their rows as those of one process, moved, saved, and refused where they do not fit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker.exceptions import BadRequestError, ConflictError, NotFoundError, TaskError
from stoker_train.parameter_server.storage.sparse import SparseShard
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ps = stoker.ps


def test_rows_are_those_of_one_process_whatever_the_servers(
    start: Callable[..., Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tables = [
        start(servers).sparse(
            "emb", 8, optimizer=ps.Adam(0.1), initializer=ps.Normal(seed=seed % 1000)
        )
        for servers in (1, 3)
    ]
    alone = SparseShard(tables[0].spec)
    for _ in range(5):
        keys = rng.integers(-50, 50, (6, 7))
        gradients = rng.standard_normal((6, 7, 8)).astype(np.float32)
        once = np.unique(keys)
        sums = np.zeros((once.size, 8), np.float32)
        np.add.at(sums, np.searchsorted(once, keys), gradients)
        alone.push(once, sums)
        for table in tables:
            table.push(keys, gradients)
            assert table.pull(keys).shape == (6, 7, 8)
            assert np.allclose(table.pull(once), alone.pull(once), atol=1e-5)
    absent = np.arange(1000, 1010)
    assert np.array_equal(
        tables[0].pull(absent, create=False), tables[1].pull(absent, create=False)
    )


def test_rows_move_to_other_servers_while_workers_push(start: Callable[..., Any]) -> None:
    """Each push adds 1 to every element: what is lost, or applied twice, shows in the sums."""
    group = start(2, save_interval_s=0.2, timeout_s=120)
    table = group.sparse("s", 4, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    dense = group.dense("d", 7, optimizer=ps.SGD(1.0))
    keys = np.arange(500)
    stop, pushed, errors = threading.Event(), [0, 0], []

    def push(which: int) -> None:
        mine = ps.connect(group.name)
        own: Any = mine.table("s")
        bias: Any = mine.table("d")
        try:
            while not stop.is_set():
                own.push(keys, -np.ones((500, 4)))
                bias.push(-np.ones(7))
                pushed[which] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(which,)) for which in range(2)]
    for one in threads:
        one.start()
    try:
        for servers in (3, 1, 2):
            group.resize(servers)
            assert group.statistics()["servers"] == servers
            assert not errors
    finally:
        stop.set()
        for one in threads:
            one.join(140)
    assert not errors
    total = sum(pushed)
    assert total > 0
    assert np.array_equal(np.unique(table.pull(keys)), [total])
    assert np.array_equal(np.unique(dense.pull()), [total])
    assert group.statistics()["tables"]["s"]["rows"] == 500

    def are_gone() -> bool:
        table.push(keys, np.ones((500, 4)))
        try:
            stoker.get_actor(f"ps:{group.name}:3:0")  # the set between the last two
        except NotFoundError:
            return True
        return False

    until(are_gone, 40, "the servers before end once the new ones have saved")


def test_a_save_is_loaded_by_any_number_of_servers(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    group, other = start(2), start(3)
    for one in (group, other):
        one.sparse("s", 2, optimizer=ps.Adagrad(0.1))
        one.dense("d", (2, 2), optimizer=ps.Adam(0.1))
    keys = np.arange(100)
    table, dense = group.table("s"), group.table("d")
    table.push(keys, np.ones((100, 2)))
    dense.push(np.ones((2, 2)))
    group.save(tmp_path / "save")
    saved = np.array(table.pull(keys)), np.array(dense.pull())
    table.push(keys, np.ones((100, 2)))
    dense.push(np.ones((2, 2)))
    other.load(tmp_path / "save")
    assert np.array_equal(other.table("s").pull(keys), saved[0])
    assert np.array_equal(other.table("d").pull(), saved[1])
    other.table("s").push(keys, np.ones((100, 2)))  # the optimizer's states came along
    other.table("d").push(np.ones((2, 2)))
    assert np.array_equal(other.table("s").pull(keys), table.pull(keys))
    assert np.array_equal(other.table("d").pull(), dense.pull())
    group.save(tmp_path / "save")
    other.load(tmp_path / "save")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["save"]
    with pytest.raises((NotFoundError, TaskError), match="no save of parameter servers"):
        group.load(tmp_path)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    start: Callable[..., Any],
) -> None:
    group = start(2)
    table = group.sparse("emb", 4)
    before = np.array(table.pull([1, 2]))
    with pytest.raises(ConflictError, match="another width"):
        group.sparse("emb", 5)
    with pytest.raises(ConflictError, match="another shape"):
        group.dense("emb", 4)
    with pytest.raises(NotFoundError, match=r"(?s)no table 'nope'.*emb"):
        group.table("nope")
    for wrong, field in (
        (lambda: table.push([1, 2], np.ones((2, 5))), "gradients"),
        (lambda: table.push([1, 2], np.full((2, 4), np.nan)), "gradients"),
        (lambda: table.push([0.5], np.ones((1, 4))), "keys"),
        (lambda: table.shrink(), "unused_s"),
        (lambda: group.sparse("x", 0), "width"),
        (lambda: group.worker(2, 2), "rank"),
        (lambda: group.worker(0, 2, mode="fast"), "mode"),
        (lambda: group.worker(0, 2, staleness=-1), "staleness"),
        (lambda: group.resize(0), "servers"),
        (lambda: ps.start(0), "servers"),
        (lambda: ps.start(1, timeout_s=0), "timeout_s"),
    ):
        with pytest.raises(BadRequestError) as raised:
            wrong()
        assert raised.value.field == field
    with pytest.raises(ConflictError, match="there are parameter servers named"):
        ps.start(1, name=group.name)
    assert np.array_equal(table.pull([1, 2]), before)
    assert table.shrink(max_norm=1e9) == 2
    assert group.statistics()["tables"]["emb"]["rows"] == 0
    group.stop()
    with pytest.raises(NotFoundError, match="no parameter servers named"):
        ps.connect(group.name)
