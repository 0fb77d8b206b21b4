"""States taken apart and put together again: what is in them, and what they refuse."""

from __future__ import annotations

import io
import threading
from collections import Counter, OrderedDict
from enum import IntEnum
from typing import Any

import pytest
import torch

from stoker.exceptions import SerializationError
from stoker_train.elastic.state.trees import flatten, from_portable, to_portable, unflatten


class Color(IntEnum):
    RED = 1


STATE = {
    "weight": torch.arange(6.0).view(2, 3),
    0: {"step": torch.tensor(3), "betas": (0.9, 0.99)},
    "list": [None, True, 1, 2.5, "text", b"bytes", b"", 1 + 2j],
    "types": [torch.float64, torch.Size([2, 3])],
    "other": Counter("aab"),
    "enum": Color.RED,
    "empty": torch.empty(0, 4),
    "ordered": OrderedDict(a=1),
    "nothing": {},
}


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other) or isinstance(other, OrderedDict)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif type(one) is dict:
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif type(one) in (list, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def test_a_state_is_what_it_was() -> None:
    flat = flatten(STATE, "state")
    assert flat.paths == ["state.weight", "state.0.step", "state.empty"]
    assert_equal(unflatten(flat.skeleton, flat.tensors), STATE)


def test_what_is_written_is_read_without_running_code() -> None:
    flat = flatten(STATE)
    file = io.BytesIO()
    torch.save(to_portable(flat.skeleton, flat.tensors), file)
    file.seek(0)
    assert_equal(from_portable(torch.load(file, weights_only=True)), STATE)


def test_objects_are_kept_as_they_were() -> None:
    counter = Counter("aab")
    flat = flatten({"counter": counter})
    counter["z"] = 9
    assert unflatten(flat.skeleton, []) == {"counter": Counter("aab")}


def test_tensors_that_are_one_in_memory_are_one() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    flat = flatten({"in": weight, "out": weight, "part": weight[:2]})
    assert [tuple(one.shape) for one in flat.tensors] == [(3,), (2,)]
    assert not any(one.requires_grad for one in flat.tensors)
    assert flat.nbytes == 20


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SerializationError) as caught:
        flatten({"loop": {"lock": threading.Lock()}}, "state")
    assert "state.loop.lock" in str(caught.value)
