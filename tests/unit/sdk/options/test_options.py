"""The options of ``@remote``: checked where they are given, and turned into a demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from scripts.docs import OPTIONS, options_page
from stoker.exceptions import BadRequestError, UnknownOptionError
from stoker.runtime.options.actor_options import ActorOptions, MethodOptions
from stoker.runtime.options.demands import check_options, merged, resources_of
from stoker.runtime.options.documentation import options_of, with_options
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.options.strategies import NodeAffinity, strategy_of

if TYPE_CHECKING:
    import msgspec


def test_options_are_checked_by_name_and_type() -> None:
    made = check_options(TaskOptions, {"num_cpus": 2, "timeout": 1.5}, what="f")
    assert (made.num_cpus, made.timeout, made.max_retries) == (2, 1.5, 3)
    assert merged(made, {"num_cpus": 3}, what="f").timeout == 1.5
    with pytest.raises(UnknownOptionError, match="did you mean 'max_restarts'"):
        check_options(ActorOptions, {"max_restart": 1}, what="class A")
    with pytest.raises(BadRequestError, match="option 'max_retries' of f is -2"):
        check_options(TaskOptions, {"max_retries": -2}, what="f")
    with pytest.raises(
        BadRequestError, match="'dynamik'; of texts it takes 'streaming' or 'dynamic'"
    ):
        check_options(TaskOptions, {"num_returns": "dynamik"}, what="f")
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
        ({"gpu_memory": "10GiB"}, {"CPU": 1, "gpu_memory": 10 * 2.0**30}),
        ({"gpu_memory": 1e9, "num_gpus": 0}, {"CPU": 1, "gpu_memory": 1e9}),
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


# -- what is written at the fields -------------------------------------------------------------------

KINDS = (NodeAffinity, TaskOptions, ActorOptions, MethodOptions)
PROCESSES = ("caller", "gcs", "scheduler", "nodelet", "worker")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_is_documented_with_an_example_that_is_taken(
    kind: type[msgspec.Struct],
) -> None:
    documented = options_of(kind)
    assert tuple(documented) == kind.__struct_fields__
    for name, option in documented.items():
        assert option.meaning.endswith("."), name
        assert option.takes and option.default, name
        assert all(each.startswith(PROCESSES) for each in option.by.split(", ")), name
        if kind is NodeAffinity:
            assert name in option.example
            assert isinstance(eval(option.example), NodeAffinity)
            continue
        given = eval(f"dict({option.example})")
        assert tuple(given) == (name,)
        made = check_options(kind, given, what="an example")
        assert getattr(made, name) == given[name] != getattr(kind(), name), name


def test_docstrings_list_the_options() -> None:
    for kind in KINDS:
        for name, option in options_of(kind).items():
            assert f"\n{name}: {option.takes}" in (kind.__doc__ or "")

    @with_options(TaskOptions, MethodOptions)
    def remote() -> None:
        """Do it."""

    said = remote.__doc__ or ""
    assert said.startswith("Do it.\n\nOptions of a remote function")
    assert "\nstart_deadline: number, at least 0 (seconds)\n" in said
    assert "\nconcurrency_group: text\n" in said


def test_the_page_of_options_is_current() -> None:
    assert OPTIONS.read_text() == options_page(), "run `make docs`"
