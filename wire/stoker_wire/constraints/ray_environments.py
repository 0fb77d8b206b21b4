"""Translation of the keys of Ray's ``runtime_env``, for ``stoker.ray`` and for the job API of Ray.

Pure. Keys that are not here mean in Stoker what they mean in Ray, or there are none of their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_wire.errors import BadRequestError

WITHOUT_EFFECT = {
    "config": "",
    "_validate": "",
    "_ray_release": "",
    "_ray_commit": "",
    "_inject_current_ray": "",
    "nsight": "run the profiler around `stoker start`",
    "rocprof_sys": "run the profiler around `stoker start`",
}
"""Keys that change nothing, and the way to have what they ask for, if they ask for something."""
REFUSED = {
    "container": "give the name of the image as image_uri",
    "java_jars": "Stoker runs Python",
    "py_executable": "workers run the Python of their node, with pip= in an environment of their own",
    "mpi": "start ranks as actors of a placement group",
}
"""Keys without which a job would be another one, and the way that Stoker has."""


def requirements(name: str, value: Any) -> Any:
    """Return the packages of ``pip`` or ``uv``, which Ray takes as a list or as a mapping with more."""
    if not isinstance(value, Mapping):
        return value
    if "packages" not in value:
        raise BadRequestError(
            f"runtime_env.{name} has no 'packages'\ngive {name}=[...], or {{'packages': [...]}}",
            field=f"runtime_env.{name}",
        )
    return value["packages"]


def process_setup(hook: Any) -> Any:
    """Return a ``worker_process_setup_hook``: Ray's "module.function" is Stoker's "module:function"."""
    if isinstance(hook, str) and ":" not in hook:
        module, _, name = hook.rpartition(".")
        return f"{module}:{name}"
    return hook
