"""``RuntimeEnv``, and Ray's keys of a ``runtime_env`` as Stoker's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.ray.mapping.lacking import NotInStokerError, is_loaded, warn_once
from stoker_wire.constraints.ray_environments import (
    REFUSED,
    WITHOUT_EFFECT,
    process_setup,
    requirements,
)

SAME = (
    *("env_vars", "working_dir", "py_modules", "excludes", "setup", "conda"),
    *("image_uri", "worker_process_setup", "preload", "kernels"),
)
_CODE = ("working_dir", "py_modules")
AS_RAY = "stoker.ray.mapping.as_ray"


class RuntimeEnv(dict[str, Any]):
    """A ``runtime_env`` by keywords: ``RuntimeEnv(pip=["numpy"], env_vars={"A": "1"})``."""

    def __init__(self, **keys: Any) -> None:
        super().__init__({name: value for name, value in keys.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return the same as a plain mapping."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(self),)


def _restored(keys: dict[str, Any]) -> RuntimeEnv:
    return RuntimeEnv(**keys)


class RuntimeEnvConfig(dict[str, Any]):
    """The key ``config`` of a ``runtime_env``: accepted, without effect."""


def mapped_env(env: Any, *, of_job: bool = False) -> Any:
    """Return a ``runtime_env`` with Ray's keys as Stoker takes it.

    That of a job tells workers to answer ``import ray`` where this process does.
    """
    if env is not None and not isinstance(env, Mapping):
        return env  # the error for it is stoker's
    mapped = _mapped_keys(env or {})
    if of_job and is_loaded("ray") and is_loaded(AS_RAY):
        mapped["preload"] = [AS_RAY, *mapped.get("preload", ())]
    return mapped or None


def _mapped_keys(env: Mapping[str, Any]) -> dict[str, Any]:
    mapped: dict[str, Any] = {}
    for name, value in env.items():
        if value is None:
            continue
        if name in ("pip", "uv"):
            mapped[name] = requirements(name, value)
        elif name == "worker_process_setup_hook":
            mapped["worker_process_setup"] = process_setup(value)
        elif name in REFUSED:
            raise NotInStokerError(
                f"runtime_env has no key {name!r}\n{REFUSED[name]}", field=f"runtime_env.{name}"
            )
        elif name in WITHOUT_EFFECT:
            if value and (way := WITHOUT_EFFECT[name]):
                warn_once(f"runtime_env[{name!r}] has no effect in Stoker: {way}", stacklevel=5)
        else:
            _check_package(name, value)
            mapped[name] = value
    return mapped


def _check_package(name: str, value: Any) -> None:
    """Raise for the address of a package that a cluster of Ray has."""
    given = value if isinstance(value, (list, tuple)) else [value]
    for each in given:
        if name in _CODE and isinstance(each, str) and each.startswith("gcs://"):
            raise NotInStokerError(
                f"runtime_env.{name}: {each!r} is in a cluster of Ray\n"
                "give the folder of which it was made; it is uploaded once",
                field=f"runtime_env.{name}",
            )
