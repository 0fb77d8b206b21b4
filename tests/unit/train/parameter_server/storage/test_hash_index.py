"""Slots by key, against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_train.parameter_server.storage.hash_index import HashIndex

KEYS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 40),
    st.integers(-20, 20).map(lambda n: n << 50),
)


@given(st.lists(st.lists(KEYS, max_size=60), max_size=8), st.lists(KEYS, max_size=40))
@settings(max_examples=80)
def test_it_is_a_dictionary(batches: list[list[int]], absent: list[int]) -> None:
    index = HashIndex()
    model: dict[int, int] = {}
    for batch in batches:
        new = np.array([key for key in dict.fromkeys(batch) if key not in model], np.int64)
        slots = index.add(new)
        assert slots.tolist() == list(range(len(model), len(model) + new.size))
        model |= dict(zip(new.tolist(), slots.tolist(), strict=True))
    asked = [*model, *absent, *absent]
    found = index.find(np.array(asked, np.int64))
    assert found.tolist() == [model.get(key, -1) for key in asked]
    assert len(index) == len(model)


def test_many_keys_that_come_at_once_each_have_a_place(seed: int) -> None:
    keys = np.unique(np.random.default_rng(seed).integers(-(2**62), 2**62, 50_000))
    for some in (keys, np.arange(50_000), np.arange(50_000) << 32):
        index = HashIndex()
        index.add(some[:100])
        index.add(some[100:])
        assert (index.find(some) == np.arange(some.size)).all()
        assert index.find(some ^ (1 << 62 | 1)).max() == -1
        assert index.nbytes <= 12 * 4 * some.size
