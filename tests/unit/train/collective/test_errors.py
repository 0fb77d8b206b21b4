"""Errors of collectives: what a failure's record becomes on each member."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from stoker.exceptions import StokerError
from stoker_train.collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    Failure,
    MemberLostError,
    MismatchError,
)


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (CollectiveError, RuntimeError),
        (MemberLostError, ConnectionError),
        (CollectiveTimeoutError, TimeoutError),
        (MismatchError, ValueError),
    ],
)
def test_a_failure_is_the_same_error_everywhere(
    kind: type[CollectiveError], built_in: type[Exception]
) -> None:
    failure = Failure(code=kind.code, text="rank 1 died\nso it says", ranks=(1,), actors=("a_1",))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)
    error = pickle.loads(pickle.dumps(sent.error()))
    assert type(error) is kind
    assert isinstance(error, built_in)
    assert isinstance(error, StokerError)
    assert str(error) == "rank 1 died.\nso it says"
    assert error.extra == {"ranks": [1], "actors": ["a_1"]}
    assert sent.error() is not sent.error()


def test_a_code_of_a_later_version_is_the_general_error() -> None:
    assert type(Failure(code="new", text="x").error()) is CollectiveError
