"""``init()`` with Ray's keywords: mapped, accepted without effect, or warned of once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import stoker
from stoker.exceptions import BadRequestError, UnknownOptionError
from stoker.ray.mapping.lacking import warn_once
from stoker.ray.runtime_env import mapped_env
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from typing import Self

RAY_VERSION = "2.60.0"
"""The version of Ray whose names these are."""
MAPPED = (
    *("address", "num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "namespace"),
    *("runtime_env", "log_to_driver", "ignore_reinit_error", "local_mode", "job_config", "_memory"),
    *("dashboard_port", "include_dashboard", "memory"),
)
ACCEPTED = frozenset(
    {
        *("configure_logging", "logging_level", "logging_format", "logging_config", "verbose"),
        *("dashboard_host", "include_webui", "webui_host", "_node_name", "_node_ip_address"),
        *("_metrics_export_port", "_driver_object_store_memory", "driver_object_store_memory"),
        *("plasma_directory", "_plasma_directory", "huge_pages", "_redis_max_memory"),
        *("_redis_password", "_redis_username", "redis_password", "redis_max_memory", "lru_evict"),
        *("_enable_object_reconstruction", "_use_ray_client", "allow_multiple", "_lru_evict"),
        *("enable_object_reconstruction", "node_ip_address", "_tracing_startup_hook"),
    }
)
"""Keywords about what Stoker does not need to be told, or does not do: no result depends on them."""
WARNED = {
    "_temp_dir": "sessions lie where STOKER_SESSION_ROOT says",
    "temp_dir": "sessions lie where STOKER_SESSION_ROOT says",
    "storage": "give put() or durability= a path",
    "_storage": "give put() or durability= a path",
    "_system_config": "but for memory_usage_threshold settings are variables: `stoker config`",
    "_internal_config": "settings are variables: `stoker config`",
    "object_spilling_directory": "STOKER_SPILL_DIR names it",
    "_object_spilling_directory": "STOKER_SPILL_DIR names it",
    "enable_resource_isolation": "memory= is a limit of a worker",
    "_cgroup_path": "memory= is a limit of a worker",
    "system_reserved_cpu": "num_cpus= says what work may have",
    "system_reserved_memory": "memory= says what work may have",
}
SYSTEM_CONFIG = {"memory_usage_threshold": "STOKER_MEMORY_THRESHOLD"}
"""Keys of ``_system_config`` that are settings of the cluster that ``init()`` starts; of others it warns."""
OWN = ("queue", "priority", "token", "port")
"""Arguments that only ``stoker.init`` has."""


class RayContext(Mapping[str, Any]):
    """The result of ``init()``: a mapping of addresses, and a context that shuts down at its end."""

    def __init__(self, info: stoker.ClusterInfo) -> None:
        self.info = info
        self.address_info: dict[str, Any] = {**info.address_info, "redis_address": None}
        self.dashboard_url = info.dashboard_url
        self.python_version = ".".join(map(str, sys.version_info[:3]))
        self.ray_version = RAY_VERSION
        self.ray_commit = f"stoker-{stoker.__version__}"
        self.protocol_version = None

    def disconnect(self) -> None:
        """Leave the cluster, as ``shutdown()`` does."""
        stoker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        stoker.shutdown()

    def __getitem__(self, name: str) -> Any:
        return self.address_info[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def __repr__(self) -> str:
        return f"RayContext(dashboard_url={self.dashboard_url!r}, address={self.info.address!r})"


def init(address: str | None = None, **options: Any) -> RayContext:
    """Connect to a cluster, or start one on this machine, as Ray's ``init`` does.

    ``address`` is None, ``"auto"``, ``"local"``, ``"host:port"``, ``"http://..."`` or ``"ray://..."``: the
    address of a gcs, or of a gateway. A keyword that neither Ray nor Stoker has is an error.
    """
    _check_names(options)
    taken = stoker_options(options)
    address = stoker_address(address)
    with _settings(options.get("_system_config")):
        return RayContext(stoker.init(address, **taken))


@contextlib.contextmanager
def _settings(system_config: Any) -> Iterator[None]:
    """Have a cluster that is started meanwhile take what of ``_system_config`` is a setting here."""
    given = system_config if isinstance(system_config, Mapping) else {}
    settings = {SYSTEM_CONFIG[name]: str(given[name]) for name in SYSTEM_CONFIG if name in given}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_names(options: Mapping[str, Any]) -> None:
    known = {*MAPPED, *ACCEPTED, *WARNED, *OWN}
    for name, value in options.items():
        if name not in known:
            raise UnknownOptionError(
                f"init() has no argument {name!r}\n{suggestion(name, known)}", field=name
            )
        if (
            name == "_system_config"
            and isinstance(value, Mapping)
            and set(value) <= set(SYSTEM_CONFIG)
        ):
            continue
        if name in WARNED and value:
            warn_once(f"init({name}=...) has no effect in Stoker: {WARNED[name]}", stacklevel=4)


_SAME = (
    *("num_cpus", "num_gpus", "resources", "labels", "namespace", "memory", "object_store_memory"),
    *OWN,
)


def stoker_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``stoker.init`` for those of Ray's."""
    taken = {name: options[name] for name in _SAME if options.get(name) is not None}
    _map_accelerators(taken)
    taken["ignore_reinit_error"] = bool(options.get("ignore_reinit_error"))
    if options.get("log_to_driver") is not None:
        taken["log_to_driver"] = options["log_to_driver"]
    if options.get("_memory"):
        taken["memory"] = options["_memory"]
    if options.get("dashboard_port") and options.get("include_dashboard") is not False:
        taken["port"] = options["dashboard_port"]
    if options.get("local_mode"):
        taken["local_mode"] = True
    config = options.get("job_config")
    env = options.get("runtime_env") or getattr(config, "runtime_env", None)
    taken["runtime_env"] = mapped_env(env, of_job=True)
    if "namespace" not in taken and getattr(config, "ray_namespace", None):
        taken["namespace"] = config.ray_namespace  # type: ignore[union-attr]
    return taken


def _map_accelerators(taken: dict[str, Any]) -> None:
    """Make labels of resources that say what the GPUs of the node are."""
    prefix = "accelerator_type:"
    kinds = [name for name in taken.get("resources") or () if name.startswith(prefix)]
    if kinds:
        taken["resources"] = {
            name: amount for name, amount in taken["resources"].items() if name not in kinds
        }
        kind = {"accelerator_type": kinds[0].removeprefix(prefix)}
        taken["labels"] = {**kind, **(taken.get("labels") or {})}


def stoker_address(address: Any) -> str | None:
    """Return the address that ``stoker.init`` takes for one of Ray's."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        return None
    if not isinstance(address, str):
        raise BadRequestError(f"init(): address={address!r} is no text", field="address")
    if address in ("auto", "local"):
        return address
    scheme, found, rest = address.partition("://")
    if not found:
        return f"http://{address}"
    if scheme == "ray":
        return f"http://{rest.partition('/')[0]}"
    return address
