"""Ray's keywords and addresses of ``init`` as Stoker's."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import BadRequestError, UnknownOptionError
from stoker.ray.mapping import init as mapping


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, None),
        ("auto", "auto"),
        ("local", "local"),
        ("10.0.0.1:6379", "http://10.0.0.1:6379"),
        ("ray://head:10001", "http://head:10001"),
        ("ray://head:10001/path", "http://head:10001"),
        ("https://head:7601", "https://head:7601"),
    ],
)
def test_addresses(given: str | None, taken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert mapping.stoker_address(given) == taken


def test_the_variable_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:1")
    assert mapping.stoker_address(None) == "http://head:1"
    assert mapping.stoker_address("local") == "local"
    with pytest.raises(BadRequestError, match="is no text"):
        mapping.stoker_address(7)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"num_cpus": 2, "num_gpus": None}, {"num_cpus": 2}),
        ({"_memory": 10**9}, {"memory": 10**9}),
        ({"log_to_driver": False}, {"log_to_driver": False}),
        ({"dashboard_port": 8265}, {"port": 8265}),
        ({"dashboard_port": 8265, "include_dashboard": False}, {}),
        ({"local_mode": True}, {"local_mode": True}),
        (
            {"resources": {"accelerator_type:V100": 1, "disk": 2}, "labels": {"a": "b"}},
            {"resources": {"disk": 2}, "labels": {"accelerator_type": "V100", "a": "b"}},
        ),
        (
            {"job_config": SimpleNamespace(runtime_env={"pip": ["x"]}, ray_namespace="mine")},
            {"runtime_env": {"pip": ["x"]}, "namespace": "mine"},
        ),
        ({"logging_level": "error", "include_webui": False, "_redis_password": "x"}, {}),
    ],
)
def test_keywords(given: dict[str, Any], taken: dict[str, Any]) -> None:
    common = {"ignore_reinit_error": False, "runtime_env": None}
    assert mapping.stoker_options(given) == {**common, **taken}


def test_a_keyword_that_nobody_has_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="num_cpus"):
        mapping.init(num_cpu=1)


def test_each_keyword_without_effect_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            mapping._check_names({"storage": "/x", "_temp_dir": None, "logging_level": 3})
    assert [str(one.message).partition(" has")[0] for one in caught] == ["init(storage=...)"]


def test_the_memory_threshold_of_the_system_config_is_a_setting_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def started(*_: Any, **__: Any) -> Any:
        seen.append(os.environ.get("STOKER_MEMORY_THRESHOLD"))
        return SimpleNamespace(address_info={}, dashboard_url="")

    monkeypatch.setattr(mapping.stoker, "init", started)
    monkeypatch.delenv("STOKER_MEMORY_THRESHOLD", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapping.init(_system_config={"memory_usage_threshold": 0.4})
    assert "STOKER_MEMORY_THRESHOLD" not in os.environ
    monkeypatch.setenv("STOKER_MEMORY_THRESHOLD", "0.9")
    with pytest.warns(UserWarning, match="memory_usage_threshold"):
        mapping.init(_system_config={"memory_usage_threshold": 0.4, "other": 1})
    mapping.init()
    assert seen == ["0.4", "0.4", "0.9"]
    assert os.environ["STOKER_MEMORY_THRESHOLD"] == "0.9"
