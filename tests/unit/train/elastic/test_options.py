"""Options of an elastic trainer that make no sense: each is refused with its field and what to do."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from stoker_train.elastic.sync import AdaComm, OverlapLocalSGD, make_strategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAN, INF = math.nan, math.inf
COUNTS = ("8", None, True, 1.5, NAN, [1], 0, -1)
TIMES = ("1", None, True, NAN, INF, 0, -1.0)
FLAGS = (None, 1, "yes")
GROUPS = {"scaling": Scaling, "checkpoint": Checkpoint, "failure": Failure}
WRONG: dict[str, tuple[Any, ...]] = {
    "scaling.min_replicas": COUNTS,
    "scaling.max_replicas": COUNTS,
    "scaling.base_batch": COUNTS,
    "scaling.max_batch": tuple(one for one in COUNTS if one is not None),
    "scaling.local_batch": (8, "18", (1,), (1, 2, 3), (0, 8), (1.5, 8), (True, 8), (8, 1), (64, 99)),
    "scaling.resources": (
        3, None, {}, {"CPU": "1"}, {"CPU": NAN}, {"CPU": INF}, {"CPU": True}, {"CPU": -1},
        {"CPU": 0}, {"": 1}, {1: 1}, {"GPU": 2}, [("CPU", 1)],
    ),
    "scaling.adapt": (None, True, 1, "batch", ["none"]),
    "scaling.lr": (None, True, 0.1, NAN, "cube", ["sqrt"]),
    "scaling.grace_s": TIMES,
    "scaling.interval_s": TIMES,
    "scaling.reuse_measurements": FLAGS,
    "checkpoint.path": (3, b"folder", True, "a\0b"),
    "checkpoint.every": COUNTS,
    "checkpoint.commit_every": COUNTS,
    "checkpoint.keep": COUNTS,
    "checkpoint.resume": FLAGS,
    "failure.hang_s": TIMES,
    "failure.collective_timeout_s": TIMES,
    "failure.start_s": TIMES,
    "failure.retries": tuple(one for one in COUNTS if one != 0 or one is False),
    "failure.rehearse": FLAGS,
    "loop": (None, 3, "loop"),
    "scaling": (3, {"min_replicas": 1}, False),
    "checkpoint": (3, b"folder", False),
    "failure": (3, False),
    "queue": (None, 3, b"queue", True),
    "name": (None, 3, True, "a b", "x" * 81),
    "seed": (None, True, "0", 0.0, NAN, -1, 2**63),
    "policies": (None, 3, "policy", {}),
    "policies[0]": ([3], [str], (None,)),
    "runtime_env": (3, "env", []),
    "sync": (
        3, True, NAN, [], "gossip", {}, {"name": "local_sgd"}, {"name": "local_sgd", "every": NAN},
        {"name": "local_sgd", "every": True}, {"name": "local_sgd", "every": "2"},
        {"name": "local_sgd", "every": 2, "block_momentum": NAN}, {"name": 3},
        {"name": "post_local_sgd", "every": 2, "after": -1},
        {"name": "adacomm", "tau0": 2, "every_s": NAN}, {"name": "all_reduce", "compression": 3},
    ),
}  # fmt: skip
"""Each field, and values that it cannot have."""


def loop(ctx: Any) -> None:
    """Do nothing."""


def trainer(field: str, value: Any) -> ElasticTrainer:
    """Make a trainer with one option."""
    group, _, option = field.partition(".")
    given: dict[str, Any] = {"loop": loop, "scaling": Scaling(resources={"CPU": 1})}
    if not option:
        given[group.partition("[")[0]] = value
    elif group == "scaling":
        given[group] = Scaling(**{"resources": {"CPU": 1}, option: value})
    else:
        given[group] = GROUPS[group](**{option: value})
    return ElasticTrainer(given.pop("loop"), **given)


@pytest.mark.parametrize("field", WRONG)
def test_a_value_that_an_option_cannot_have_is_refused_with_field_and_fix(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(BadRequestError, match=f"^{re.escape(field)} ") as caught:
            trainer(field, value)
        error = caught.value
        assert error.field == field, value
        first, fix = str(error).split("\n")
        assert len(first) <= 80
        assert re.search(r"\b(give|use|lower|exchange|raise|must|has other options)\b", fix), fix
    assert isinstance(WrongTypeError("x"), TypeError), "what is of the wrong type is a TypeError"


def test_each_option_is_tried() -> None:
    options = {f"{group}.{one.name}" for group, kind in GROUPS.items() for one in fields(kind)}
    assert options - set(WRONG) == set()


def test_what_makes_sense_is_taken(tmp_path: Path) -> None:
    for field, value in (
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("scaling.lr", lambda ratio, gain: ratio),
        ("scaling.local_batch", (1, 8)),
        ("scaling.resources", {"CPU": 0.5, "disk": 0}),
        ("failure.retries", 0),
        ("failure.hang_s", 3),
        ("checkpoint", tmp_path),
        ("checkpoint.path", tmp_path),
        ("checkpoint.path", None),
        ("sync", None),
        ("sync", AdaComm(2, 1)),
    ):
        trainer(field, value)


def test_a_trainer_that_runs_is_asked_for_what_makes_sense() -> None:
    one = trainer("seed", 1)
    asks: dict[str, Callable[[], object]] = {
        "replicas": lambda: one.resize(True),
        "batch": lambda: one.set_batch_size(0),
        "rank": lambda: one.replace(-1),
        "timeout_s": lambda: one.result(NAN),
        "sync": lambda: one.set_sync(3),
    }
    for field, ask in asks.items():
        with pytest.raises(BadRequestError, match=f"^{field} ") as caught:
            ask()
        assert caught.value.field == field


def test_what_a_strategy_cannot_have_is_named() -> None:
    for spec, name in (
        ({"name": "overlap_local_sgd", "tau": 2, "alpha": NAN}, "alpha"),
        ({"name": "overlap_local_sgd", "tau": 2, "anchor_momentum": 1.0}, "anchor_momentum"),
        ({"name": "adacomm", "tau0": 2, "every_s": INF}, "every_s"),
        ({"name": "adacomm", "tau0": 2, "every_s": 1, "shrink": True}, "shrink"),
        ({"name": "all_reduce", "bucket_nbytes": 0.5}, "bucket_nbytes"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is "):
            make_strategy(spec)
    assert OverlapLocalSGD(2, alpha=1).alpha == 1
