"""Fusion: each tensor goes once, in order, and no buffer is larger than asked for."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker_train.collective.fusion import buckets, fused

sizes = st.lists(st.tuples(st.sampled_from(["f", "d"]), st.integers(0, 50)), max_size=40)


@given(sizes, st.integers(1, 60))
def test_buckets_hold_each_tensor_once_and_no_more_than_fits(
    given_sizes: list[tuple[object, int]], limit: int
) -> None:
    found = buckets(given_sizes, limit)
    assert sorted(place for bucket in found for place in bucket) == list(range(len(given_sizes)))
    for bucket in found:
        assert bucket == sorted(bucket)
        assert len({given_sizes[place][0] for place in bucket}) == 1
        assert len(bucket) == 1 or sum(given_sizes[place][1] for place in bucket) <= limit
    for kind in (
        "f",
        "d",
    ):  # a kind fills its buckets in turn: none could have taken the next tensor too
        own = [bucket for bucket in found if given_sizes[bucket[0]][0] == kind]
        for bucket, following in itertools.pairwise(own):
            held = sum(given_sizes[place][1] for place in bucket)
            assert held + given_sizes[following[0]][1] > limit


def test_a_function_in_place_reaches_all_tensors() -> None:
    strided = torch.arange(12.0).view(3, 4).t()
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), strided, torch.ones(0)]
    before = [one.clone() for one in tensors]
    calls = []

    def double(buffer: torch.Tensor) -> None:
        calls.append(buffer.dtype)
        buffer.mul_(2)

    fused(tensors, double)
    assert calls == [torch.float32, torch.float64]
    assert all(torch.equal(one, 2 * old) for one, old in zip(tensors, before, strict=True))
