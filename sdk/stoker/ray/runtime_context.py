"""``get_runtime_context()``: Stoker's, with the names that only Ray has."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import stoker
from stoker.ray.mapping.ids import Id
from stoker.runtime import current

_IDS = ("job_id", "node_id", "task_id", "actor_id", "worker_id")


class RuntimeContext:
    """The place in which the calling code runs; names that are not here are of ``stoker.RuntimeContext``."""

    def __init__(self) -> None:
        self._here = stoker.get_runtime_context()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._here, name)
        return Id(value) if name in _IDS else value

    @property
    def gcs_address(self) -> str:
        """The host and port of the gcs."""
        return urlsplit(self._here.gcs_url).netloc

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The environment of this task, actor or job."""
        env = current.runtime().job.runtime_env_of(None)
        given = {
            "env_vars": dict(env.env_vars),
            "working_dir": env.working_dir,
            "py_modules": list(env.py_modules),
            "pip": list(env.pip),
        }
        return {name: value for name, value in given.items() if value}

    def get_runtime_env_string(self) -> str:
        """Return ``runtime_env`` as JSON."""
        return json.dumps(self.runtime_env)

    def get_placement_group_id(self) -> str | None:
        """Return the id of the placement group in which this code runs, or None."""
        lease = current.runtime().job.lease
        return lease.group_id or None if lease is not None else None

    @property
    def current_placement_group_id(self) -> Id:
        """The id of the placement group in which this code runs; that of nothing outside of one."""
        return Id(self.get_placement_group_id() or "")

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """Whether what this code starts runs in its placement group."""
        return bool(current.runtime().job.captured_by)

    def get_resource_ids(self) -> dict[str, list[str]]:
        """Return the devices of this lease."""
        return self._here.get_accelerator_ids()

    def get_session_name(self) -> str:
        """Return the address of the cluster, which names it."""
        return self._here.gcs_url

    def get(self) -> dict[str, Any]:
        """Return ids by name, those that are known here."""
        ids = {name: Id(getattr(self._here, name)) for name in _IDS}
        known: dict[str, Any] = {name: value for name, value in ids.items() if value}
        return known | {"namespace": self._here.namespace}


def get_runtime_context() -> RuntimeContext:
    """Return where the calling code runs."""
    return RuntimeContext()
