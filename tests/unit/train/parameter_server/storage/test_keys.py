"""Keys once each, sums of their rows, and the servers that have them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_train.parameter_server.storage.keys import (
    dense_bounds,
    server_of,
    split,
    sum_equal,
    unique,
)

SOME_KEYS = st.lists(st.integers(-30, 30), max_size=50).map(lambda keys: np.array(keys, np.int64))


@given(SOME_KEYS)
def test_unique_gives_each_once_and_their_places(keys: np.ndarray) -> None:
    once, places = unique(keys)
    assert sorted(once.tolist()) == sorted(set(keys.tolist()))
    assert (keys if places is None else once[places.ravel()]).tolist() == keys.tolist()


@given(SOME_KEYS)
def test_rows_of_equal_keys_are_added_in_the_order_in_which_they_come(keys: np.ndarray) -> None:
    rows = np.sin(np.arange(2 * keys.size, dtype=np.float32)).reshape(-1, 2)
    model: dict[int, np.ndarray] = {}
    for key, row in zip(keys.tolist(), rows, strict=True):
        model[key] = model[key] + row if key in model else row
    once, sums = sum_equal(keys, rows)
    assert len(model) == once.size
    for key, total in zip(once.tolist(), sums, strict=True):
        assert np.allclose(total, model[key], atol=1e-6)
    again = sum_equal(keys, rows)
    assert sums.tobytes() == again[1].tobytes()


@given(SOME_KEYS, st.integers(1, 9))
def test_each_key_has_one_server(keys: np.ndarray, servers: int) -> None:
    places = split(keys, servers)
    assert sorted(np.concatenate(places).tolist()) == list(range(keys.size))
    for number, at in enumerate(places):
        assert (server_of(keys[at], servers) == number).all()
        assert (np.diff(at) > 0).all()


@pytest.mark.parametrize("keys", [np.arange(60_000), np.arange(60_000) << 16])
def test_servers_have_equal_shares(keys: np.ndarray) -> None:
    for servers in (2, 3, 7):
        counts = np.bincount(server_of(keys, servers), minlength=servers)
        assert counts.min() > 0.95 * keys.size / servers


@given(st.integers(0, 100), st.integers(1, 9))
def test_blocks_of_a_dense_table_are_all_of_it(size: int, servers: int) -> None:
    bounds = dense_bounds(size, servers)
    assert [one for low, high in bounds for one in range(low, high)] == list(range(size))
