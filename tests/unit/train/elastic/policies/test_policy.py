"""Actions as plain values, and what a policy keeps."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from stoker_train.elastic.policies import Actions, Metrics, Policy
from stoker_train.elastic.sync import LocalSGD


def test_of_one_kind_the_last_request_counts() -> None:
    actions = Actions()
    actions.resize(2)
    actions.set_lr(0.5)
    actions.resize(4, "more")
    taken = actions.take()
    assert [(one.kind, one.value, one.reason) for one in taken] == [
        ("set_lr", 0.5, ""),
        ("resize", 4, "more"),
    ]
    assert actions.take() == ()


def test_requests_are_plain_values() -> None:
    actions = Actions()
    actions.set_batch_size(256)
    actions.set_sync(LocalSGD(8))
    actions.set_shares((1, 2.5, 0))
    actions.request_stop("enough")
    taken = pickle.loads(pickle.dumps(actions.take()))
    values = {one.kind: one.value for one in taken}
    assert values["set_sync"] == LocalSGD(8).spec()
    assert values["set_shares"] == (1.0, 2.5, 0.0)
    assert values["set_batch_size"] == 256
    assert values["stop"] is None


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda a: a.resize(0), "replicas is 0"),
        (lambda a: a.resize(1.5), "replicas is 1.5"),
        (lambda a: a.set_batch_size(-1), "batch is -1"),
        (lambda a: a.set_lr(0), "factor is 0"),
        (lambda a: a.set_lr(math.nan), "factor is nan"),
        (lambda a: a.set_sync("other"), "no strategy 'other'"),
        (lambda a: a.set_shares(()), "weights are"),
        (lambda a: a.set_shares((0.0, 0.0)), "weights are all 0"),
        (lambda a: a.set_shares((1.0, -1.0)), "weights are"),
    ],
)
def test_a_wrong_request_is_named_where_it_is_made(ask: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ask(Actions())


def test_a_policy_keeps_its_attributes() -> None:
    class Counts(Policy):
        def __init__(self) -> None:
            self.steps = 0

        def after_step(self, metrics: Metrics, actions: Actions) -> None:
            self.steps += 1

    one, other = Counts(), Counts()
    for hook in ("train", "epoch", "step"):
        getattr(one, f"before_{hook}")(Metrics(), Actions())
        getattr(one, f"after_{hook}")(Metrics(), Actions())
    other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
    assert other.steps == 1
