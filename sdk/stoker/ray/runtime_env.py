"""``RuntimeEnv``, and Ray's keys of a ``runtime_env`` as Stoker's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.exceptions import BadRequestError
from stoker.ray.mapping.lacking import NotInStokerError, is_loaded, warn_once

SAME = (
    *("env_vars", "working_dir", "py_modules", "excludes", "setup"),
    *("worker_process_setup", "preload", "kernels"),
)
WITHOUT_EFFECT = {
    "config": "",
    "_validate": "",
    "_ray_release": "",
    "_ray_commit": "",
    "_inject_current_ray": "",
    "nsight": "run the profiler around `stoker start`",
    "rocprof_sys": "run the profiler around `stoker start`",
}
REFUSED = {
    "conda": "Stoker makes environments with pip: give pip=[...]",
    "container": "run the nodelet in the container",
    "image_uri": "run the nodelet in the container",
    "java_jars": "Stoker runs Python",
    "py_executable": "workers run the Python of their node, with pip= in an environment of their own",
    "mpi": "start ranks as actors of a placement group",
}
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
            mapped[name] = _packages(name, value)
        elif name == "worker_process_setup_hook":
            mapped["worker_process_setup"] = _hook(value)
        elif name in REFUSED:
            raise NotInStokerError(
                f"runtime_env has no key {name!r}\n{REFUSED[name]}", field=f"runtime_env.{name}"
            )
        elif name in WITHOUT_EFFECT:
            if value and (way := WITHOUT_EFFECT[name]):
                warn_once(f"runtime_env[{name!r}] has no effect in Stoker: {way}", stacklevel=5)
        else:
            _check_local(name, value)
            mapped[name] = value
    return mapped


def _hook(value: Any) -> Any:
    """Return Ray's "module.function" as Stoker's "module:function"."""
    if isinstance(value, str) and ":" not in value:
        module, _, name = value.rpartition(".")
        return f"{module}:{name}"
    return value


def _packages(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "packages" not in value:
        raise BadRequestError(f"runtime_env.{name} has no 'packages'", field=f"runtime_env.{name}")
    return value["packages"]


def _check_local(name: str, value: Any) -> None:
    """Raise for the address of an archive, which Stoker does not fetch."""
    given = value if isinstance(value, (list, tuple)) else [value]
    for each in given:
        if name in ("working_dir", "py_modules") and isinstance(each, str) and "://" in each:
            raise NotInStokerError(
                f"runtime_env.{name}: {each!r} is not on this machine\n"
                "fetch it, and give the folder; it is uploaded once",
                field=f"runtime_env.{name}",
            )
