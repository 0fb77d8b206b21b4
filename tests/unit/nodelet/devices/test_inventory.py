"""The names by which CUDA is told of a lease's GPUs."""

from __future__ import annotations

from stoker_nodelet.devices.inventory import visible_mask


def test_cuda_knows_slices_by_their_uuid_alone() -> None:
    assert visible_mask({2: 0.5, 0: 1.0}, {}) == "0,2"
    assert visible_mask({9: 1.0}, {9: "MIG-1"}) == "MIG-1"
    assert visible_mask({}, {}) == ""
