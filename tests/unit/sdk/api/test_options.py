"""The options of ``@remote``: checked where they are given, and turned into a demand."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.api.options import (
    ActorOptions,
    NodeAffinity,
    TaskOptions,
    check_options,
    merged,
    resources_of,
    strategy_of,
)
from stoker.exceptions import BadRequestError, UnknownOptionError


def test_options_are_checked_by_name_and_type() -> None:
    made = check_options(TaskOptions, {"num_cpus": 2, "timeout": 1.5}, what="f")
    assert (made.num_cpus, made.timeout, made.max_retries) == (2, 1.5, 3)
    assert merged(made, {"num_cpus": 3}, what="f").timeout == 1.5
    with pytest.raises(UnknownOptionError, match="did you mean 'max_restarts'"):
        check_options(ActorOptions, {"max_restart": 1}, what="class A")
    with pytest.raises(BadRequestError, match="option 'max_retries' of f is -2"):
        check_options(TaskOptions, {"max_retries": -2}, what="f")
    with pytest.raises(BadRequestError, match="'dynamic'; of texts it takes 'streaming'"):
        check_options(TaskOptions, {"num_returns": "dynamic"}, what="f")
    with pytest.raises(BadRequestError, match="takes 'detached' or 'non_detached'"):
        check_options(ActorOptions, {"lifetime": "x"}, what="class A")


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ({}, {"CPU": 1.0}),
        ({"num_cpus": 0}, {}),
        ({"num_gpus": 0.5}, {"CPU": 1.0, "GPU": 0.5}),
        (
            {"memory": 100, "resources": {"disk": 2, "tape": 0}},
            {"CPU": 1, "memory": 100, "disk": 2},
        ),
    ],
    ids=str,
)
def test_options_become_resources(options: dict[str, Any], resources: dict[str, float]) -> None:
    made = check_options(TaskOptions, options, what="f")
    assert resources_of(made, default_cpus=1.0) == resources


@pytest.mark.parametrize(
    "options",
    [{"num_gpus": 1.5}, {"resources": {"GPU": 1}}, {"num_cpus": float("inf")}],
    ids=str,
)
def test_amounts_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        resources_of(check_options(TaskOptions, options, what="f"), default_cpus=1.0)


def test_strategies_are_names_or_affinities() -> None:
    assert strategy_of(NodeAffinity(node_id="n_1", soft=True)).node_id == "n_1"
    assert strategy_of(None) == strategy_of("DEFAULT")
    with pytest.raises(BadRequestError, match="SPREAD"):
        strategy_of("spread")
