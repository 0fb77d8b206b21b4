"""Errors of a rank: its loop's own, and those that say that another rank is lost."""

from __future__ import annotations

import pytest

from stoker.exceptions import DeadlineExceededError, UnavailableError
from stoker_train.sharded.rank.actor import is_of_others


def test_errors_of_a_lost_rank_are_told_from_a_loops_own() -> None:
    torch = pytest.importorskip("torch")
    text = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    for error in (
        RuntimeError(text),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms"),
        DeadlineExceededError("rank 1 waited"),
        UnavailableError("the gcs is away"),
        torch.distributed.DistNetworkError("reset"),
    ):
        assert is_of_others(error), error
    wrapped = ValueError("of a library")
    wrapped.__cause__ = RuntimeError(text)
    assert is_of_others(wrapped)
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("gloo"),
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyError("loss"),
    ):
        assert not is_of_others(error), error
