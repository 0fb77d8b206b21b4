"""Ray's keys of a ``runtime_env`` as Stoker's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from stoker.ray.mapping.lacking import NotInStokerError
from stoker.ray.runtime_env import RuntimeEnv, mapped_env


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, None),
        ({}, None),
        ({"uv": ["numpy"]}, {"uv": ["numpy"]}),
        ({"worker_process_setup_hook": "a.b.f"}, {"worker_process_setup": "a.b:f"}),
        ({"excludes": ["data/"]}, {"excludes": ["data/"]}),
        ({"image_uri": "x/y:1"}, {"image_uri": "x/y:1"}),
        ({"conda": {"dependencies": ["x"]}}, {"conda": {"dependencies": ["x"]}}),
        ({"working_dir": "https://x/y.zip"}, {"working_dir": "https://x/y.zip"}),
        (
            {"pip": {"packages": ["numpy"]}, "env_vars": {"A": "1"}},
            {"pip": ["numpy"], "env_vars": {"A": "1"}},
        ),
        ({"config": {"setup_timeout_seconds": 1}}, None),
        (RuntimeEnv(pip=["x"], conda=None), {"pip": ["x"]}),
    ],
)
def test_keys(given: Any, taken: Any) -> None:
    assert mapped_env(given) == taken


@pytest.mark.parametrize("given", [{"container": {}}, {"working_dir": "gcs://_ray_pkg_1.zip"}])
def test_what_is_lacking_names_the_way(given: dict[str, Any]) -> None:
    with pytest.raises(NotInStokerError, match="runtime_env"):
        mapped_env(given)


def test_it_travels() -> None:
    env = RuntimeEnv(env_vars={"A": "1"})
    assert pickle.loads(pickle.dumps(env)) == env
    assert env.to_dict() == {"env_vars": {"A": "1"}}
