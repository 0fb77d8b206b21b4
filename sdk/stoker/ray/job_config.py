"""``ray.job_config``."""

from __future__ import annotations

from typing import Any

from stoker.ray.mapping.lacking import attribute_error

__all__ = ("JobConfig",)


class JobConfig:
    """The ``job_config`` of ``init``: a namespace, a ``runtime_env``, and metadata."""

    def __init__(
        self,
        runtime_env: dict[str, Any] | None = None,
        ray_namespace: str | None = None,
        metadata: dict[str, str] | None = None,
        **_options: Any,
    ) -> None:
        self.runtime_env = runtime_env or {}
        self.ray_namespace = ray_namespace
        self.metadata = metadata or {}

    def set_runtime_env(self, runtime_env: dict[str, Any] | None, validate: bool = False) -> None:
        """Set the job's environment."""
        self.runtime_env = runtime_env or {}

    def set_ray_namespace(self, ray_namespace: str) -> None:
        """Set the job's namespace."""
        self.ray_namespace = ray_namespace

    def set_metadata(self, key: str, value: str) -> None:
        """Note something about the job."""
        self.metadata[key] = value


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
