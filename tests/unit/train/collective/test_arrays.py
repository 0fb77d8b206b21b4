"""Arrays: NumPy's and torch's are one to the collectives, and come back as what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker_train.collective.arrays import as_tensor, check_writable, like, signature, write_back


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.float32([[1, 2]])[:, ::2],
        np.array(3),
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.zeros(0, 4),
    ],
)
def test_a_result_is_written_to_what_was_given(value: Any) -> None:
    wanted = np.asarray(value) + 10
    tensor = as_tensor(value)
    assert tensor.is_contiguous()
    tensor.add_(10)
    assert write_back(value, tensor) is value
    assert np.array_equal(np.asarray(value), wanted)


def test_a_parameter_is_filled_without_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2).t())
    tensor = as_tensor(parameter)
    assert not tensor.requires_grad
    write_back(parameter, tensor + 1)
    assert parameter.tolist() == [[2, 2], [2, 2]]


def test_a_result_is_of_the_kind_that_was_given() -> None:
    assert isinstance(like(torch.ones(1), np.ones(1)), np.ndarray)
    assert isinstance(like(torch.ones(1), torch.ones(1)), torch.Tensor)


def test_an_array_that_is_read_only_can_be_sent_and_not_filled() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    assert as_tensor(array).tolist() == [1, 1, 1]
    with pytest.raises(BadRequestError, match="read-only"):
        check_writable(array)


@pytest.mark.parametrize("value", [3, [1.0], np.array(["a"]), np.array([None])])
def test_what_is_no_array_of_numbers_is_refused(value: object) -> None:
    with pytest.raises(WrongTypeError):
        as_tensor(value)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(WrongTypeError, match="layout"):
        as_tensor(torch.eye(2).to_sparse())


def test_signatures_tell_lists_apart() -> None:
    one = [torch.ones(2), torch.ones(3)]
    others = ([torch.ones(3), torch.ones(2)], [torch.ones(2).double(), torch.ones(3)], one[:1])
    assert signature(one) == signature([torch.zeros(2), torch.zeros(3)])
    assert all(signature(one) != signature(other) for other in others)
