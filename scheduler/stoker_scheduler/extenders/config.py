"""The file that names extenders: the ``extenders`` of a KubeSchedulerConfiguration, in YAML or JSON.

Other parts of that configuration are not read, so that a file of kube-scheduler's can be used as it is.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stoker_wire.errors import BadRequestError

DEFAULT_TIMEOUT_S = 5.0
"""That of kube-scheduler."""
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|ns)")


class ManagedResource(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A resource by which an extender is asked about what requests it."""

    name: str
    ignored_by_scheduler: bool = False


class ExtenderConfig(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """One extender; fields as in kube-scheduler."""

    url_prefix: str
    filter_verb: str = ""
    prioritize_verb: str = ""
    preempt_verb: str = ""
    bind_verb: str = ""
    weight: int = 0
    enable_https: bool = msgspec.field(default=False, name="enableHTTPS")
    tls_config: dict[str, Any] | None = None
    http_timeout: str | int | None = None
    node_cache_capable: bool = False
    managed_resources: tuple[ManagedResource, ...] = ()
    ignorable: bool = False

    @property
    def timeout_s(self) -> float:
        """Seconds that each of its answers may take."""
        return DEFAULT_TIMEOUT_S if self.http_timeout is None else duration_s(self.http_timeout)


class _File(msgspec.Struct, frozen=True):
    extenders: tuple[ExtenderConfig, ...]


def read_extenders(path: str) -> tuple[ExtenderConfig, ...]:
    """Return the extenders of a file; BadRequestError, which names the field, for what cannot be used."""
    try:
        with open(path, "rb") as file:
            found = msgspec.yaml.decode(file.read(), type=_File).extenders
    except OSError as error:
        raise _unusable(path, f"it cannot be opened ({error.strerror})") from None
    except msgspec.ValidationError as error:
        raise _unusable(path, str(error)) from None
    except msgspec.DecodeError as error:
        raise _unusable(path, f"it is no YAML: {' '.join(str(error).split())}") from None
    for index, one in enumerate(found):
        _check(one, f"extenders[{index}]", path)
    return found


def duration_s(written: str | int) -> float:
    """Return the seconds of a duration as Go writes it (``1m30s``, ``100ms``; a number is of nanoseconds)."""
    if isinstance(written, int):
        return written * 1e-9
    parts = _PART.findall(written)
    if not parts or "".join(number + unit for number, unit in parts) != written:
        raise ValueError(f"{written!r} is no duration, such as 5s or 100ms")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _check(one: ExtenderConfig, at: str, path: str) -> None:
    if not one.url_prefix.startswith(("http://", "https://")):
        raise _unusable(path, f"{at}.urlPrefix must begin with http:// or https://")
    if not one.filter_verb and not one.prioritize_verb:
        raise _unusable(path, f"{at} needs a filterVerb or a prioritizeVerb")
    if one.prioritize_verb and one.weight <= 0:
        raise _unusable(path, f"{at}.weight must be above 0 beside a prioritizeVerb")
    for field, given in (
        ("preemptVerb", one.preempt_verb),
        ("bindVerb", one.bind_verb),
        ("tlsConfig", one.tls_config),
        ("ignoredByScheduler", any(r.ignored_by_scheduler for r in one.managed_resources)),
    ):
        if given:
            raise _unusable(path, f"{at}.{field} is not known here: leave it out")
    try:
        timeout_s = one.timeout_s
    except ValueError as error:
        raise _unusable(path, f"{at}.httpTimeout: {error}") from None
    if not 1e-3 <= timeout_s <= 60:
        raise _unusable(path, f"{at}.httpTimeout must be from 1ms to 60s, and is written like 5s")


def _unusable(path: str, what: str) -> BadRequestError:
    return BadRequestError(
        f"the file of extenders {path} cannot be used\n{what} (docs/extenders.md)",
        field="extenders",
    )
