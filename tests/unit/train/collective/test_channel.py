"""Channels: what is refused before anything is exchanged."""

from __future__ import annotations

import pytest
import torch

from stoker.exceptions import BadRequestError
from stoker_train.collective.channel import (
    Backend,
    ReduceOp,
    check_reducible,
    combined,
    reduce_op,
    usable,
)


def test_names_of_operations_and_backends() -> None:
    assert reduce_op("SUM") is ReduceOp.SUM
    assert reduce_op("average") is reduce_op(ReduceOp.MEAN) is ReduceOp.MEAN
    assert usable("GLOO") is Backend.GLOO
    with pytest.raises(BadRequestError, match="there is no op 'xor'"):
        reduce_op("xor")
    with pytest.raises(BadRequestError, match="there is no backend 'mpi'"):
        usable("mpi")


def test_a_backend_that_cannot_work_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usable(None) is Backend.GLOO
    with pytest.raises(BadRequestError, match="NCCL cannot be used by this process"):
        usable("nccl")


def test_what_is_combined_here_keeps_its_dtype() -> None:
    for dtype in (torch.float16, torch.float64, torch.int8, torch.int64):
        table = torch.tensor([[3, 1], [2, 5], [4, 3]], dtype=dtype)
        found = {op: combined(table, op) for op in ReduceOp if op is not ReduceOp.MEAN}
        assert {op: one.tolist() for op, one in found.items()} == {
            ReduceOp.SUM: [9, 9],
            ReduceOp.PRODUCT: [24, 15],
            ReduceOp.MIN: [2, 1],
            ReduceOp.MAX: [4, 5],
        }
        assert all(one.dtype is dtype for one in found.values())
    assert combined(torch.tensor([[1.0], [2.0]]), ReduceOp.MEAN).tolist() == [1.5]


def test_dtypes_that_cannot_be_reduced() -> None:
    check_reducible(torch.ones(2), ReduceOp.MEAN)
    check_reducible(torch.ones(2, dtype=torch.int64), ReduceOp.SUM)
    with pytest.raises(BadRequestError, match=r"torch\.bool cannot be reduced"):
        check_reducible(torch.ones(2, dtype=torch.bool), ReduceOp.SUM)
    with pytest.raises(BadRequestError, match=r"a mean of torch\.int64"):
        check_reducible(torch.ones(2, dtype=torch.int64), ReduceOp.MEAN)
