"""An array that processes share: updates without locks arrive, and errors where it cannot be mapped."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.errors import ParameterServerError
from stoker_train.parameter_server.shared import SharedArray, shared

ADD = """
import pickle, sys
array = pickle.load(sys.stdin.buffer).array
for _ in range(100):
    array[int(sys.argv[1])] += 1
"""


def test_processes_update_one_memory() -> None:
    made = shared((3, 4), "float64")
    with contextlib.ExitStack() as stack:
        adders = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", ADD, str(row)], stdin=subprocess.PIPE)
            )
            for row in range(3)
        ]
        for one in adders:
            one.communicate(pickle.dumps(made), timeout=60)
    assert [one.returncode for one in adders] == [0, 0, 0]
    assert (made.array == 100).all()


def test_it_is_the_same_memory_after_a_pickle_and_outlives_its_maker_where_it_was_read() -> None:
    made = shared(5)
    other, unread = pickle.loads(pickle.dumps((made, made)))[0], pickle.loads(pickle.dumps(made))
    other.array[2] = 3
    assert made.array.tolist() == [0, 0, 3, 0, 0]
    del made
    assert other.array[2] == 3
    with pytest.raises(ParameterServerError, match="shared array"):
        _ = unread.array


def test_another_node_is_an_error_that_says_so() -> None:
    with pytest.raises(ParameterServerError, match=r"(?s)cannot be mapped.*elsewhere.*on the node"):
        _ = SharedArray((1,), "<f4", ("elsewhere/0", 1, 3)).array


@pytest.mark.parametrize(
    ("shape", "dtype"), [((-1,), "float32"), ((2,), object), ((1.5,), "float32")]
)
def test_wrong_shapes_are_refused(shape: Any, dtype: Any) -> None:
    with pytest.raises(BadRequestError, match="shape"):
        shared(shape, dtype)


def test_an_empty_array_is_one() -> None:
    assert pickle.loads(pickle.dumps(shared((0, 3)))).array.shape == (0, 3)
    assert isinstance(shared(2, np.int32).array, np.ndarray)
