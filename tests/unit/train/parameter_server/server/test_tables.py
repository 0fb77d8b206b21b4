"""What messages change: once each, summed over ranks in their order, and nothing if they are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.exceptions import BadRequestError, ConflictError, NotFoundError
from stoker_train.parameter_server.server.messages import Part
from stoker_train.parameter_server.server.tables import Tables, pack_spec, unpack_spec
from stoker_train.parameter_server.storage.initializers import Normal
from stoker_train.parameter_server.storage.optimizers import SGD, Adam
from stoker_train.parameter_server.storage.spec import TableSpec

SPARSE = TableSpec(name="s", width=2, optimizer=SGD(1.0))
DENSE = TableSpec(name="d", shape=(3,), optimizer=SGD(1.0))


def rows(keys: list[int], value: float) -> Part:
    return Part(SPARSE, np.array(keys), np.full((len(keys), 2), value, np.float32))


def array(value: float) -> Part:
    return Part(DENSE, np.array([0, 3]), np.full(3, value, np.float32))


@pytest.mark.parametrize(("reduce", "scale"), [("sum", 1.0), ("mean", 0.5)])
def test_what_ranks_pushed_is_one_gradient(reduce: str, scale: float) -> None:
    tables = Tables(0, 1)
    tables.push_of_ranks(
        [[rows([1, 2], 4.0), array(1.0)], [rows([2], 2.0), array(3.0)]], 0.0, reduce, Part
    )
    pulled = tables.pull(SPARSE, np.array([1, 2]), 0.0, True, np.empty)
    assert pulled[:, 0].tolist() == [-4 * scale, -6 * scale]
    assert tables.pull(DENSE, None, 0.0, True, np.empty).tolist() == [-4 * scale] * 3


def test_a_push_counts_once_for_each_of_the_last_clients() -> None:
    tables = Tables(0, 1)
    assert [tables.is_new("a", order) for order in (1, 1, 3, 2, 4)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert tables.counts["duplicates"] == 2
    for number in range(10_000):
        tables.is_new(f"c{number}", 1)
    assert "a" not in tables.seen and len(tables.seen) == 10_000


def test_wrong_messages_change_nothing() -> None:
    tables = Tables(0, 1)
    tables.shard(SPARSE)
    with pytest.raises(ConflictError, match="another width"):
        tables.check(
            [Part(TableSpec(name="s", width=3), np.array([1]), np.zeros((1, 3), np.float32))]
        )
    with pytest.raises(BadRequestError, match="values for table 's'"):
        tables.check([Part(SPARSE, np.array([1, 2]), np.zeros((1, 2), np.float32))])
    with pytest.raises(NotFoundError, match=r"(?s)no table 'x'.*tables: s"):
        tables.spec("x")
    assert len(tables.shards["s"]) == 0


def test_a_specification_travels_in_a_file() -> None:
    spec = TableSpec(name="ü", width=3, optimizer=Adam(0.5), initializer=Normal(std=2.0, seed=9))
    assert unpack_spec(pack_spec(spec)) == spec
