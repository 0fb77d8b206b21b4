"""``ray.util.metrics``: counters, gauges and histograms with Ray's interface, kept in their process.

Stoker does not export them: a program that counts runs on, and a warning says so once. What a node, a
task or an actor does is in Stoker's own ``/metrics``.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.ray.mapping.lacking import attribute_error, warn_once

__all__ = ("Count", "Counter", "Gauge", "Histogram", "Metric")


class Metric:
    """A named value, or one for each combination of tags."""

    def __init__(
        self, name: str, description: str = "", tag_keys: Sequence[str] | None = None
    ) -> None:
        if not name:
            raise BadRequestError(f"a metric needs a name, not {name!r}", field="name")
        if isinstance(tag_keys, str) or not all(isinstance(key, str) for key in tag_keys or ()):
            raise WrongTypeError(f"tag_keys={tag_keys!r}: give a tuple of texts", field="tag_keys")
        self._name = name
        self._description = description
        self._tag_keys = tuple(tag_keys or ())
        self._default_tags: dict[str, str] = {}
        self.values: dict[tuple[str, ...], Any] = {}
        """The values by those of the tags, of this process."""
        warn_once("ray.util.metrics: Stoker keeps the values in their process, and exports none")

    @property
    def info(self) -> dict[str, Any]:
        """The name, the description and the tags."""
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Metric:
        """Set tags of all records that have none of their own."""
        self._check(default_tags)
        self._default_tags = dict(default_tags)
        return self

    def _check(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            if key not in self._tag_keys:
                raise BadRequestError(
                    f"metric {self._name} has no tag {key!r}: {self._tag_keys}", field="tags"
                )
            if not isinstance(value, str):
                raise WrongTypeError(f"tag {key}={value!r}: give a text", field="tags")

    def _key(self, tags: Mapping[str, str] | None) -> tuple[str, ...]:
        self._check(tags or {})
        given = {**self._default_tags, **(tags or {})}
        missing = [key for key in self._tag_keys if key not in given]
        if missing:
            raise BadRequestError(
                f"metric {self._name}: no value for {', '.join(missing)}", field="tags"
            )
        return tuple(given[key] for key in self._tag_keys)


class Counter(Metric):
    """A value that grows."""

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to it."""
        if value <= 0:
            raise BadRequestError(f"Counter.inc({value}): give more than 0", field="value")
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0.0) + value


Count = Counter


class Gauge(Metric):
    """A value that is set."""

    def set(self, value: float | None, tags: Mapping[str, str] | None = None) -> None:
        """Set it."""
        self.values[self._key(tags)] = value


class Histogram(Metric):
    """Counts of values between boundaries."""

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, description, tag_keys)
        self.boundaries = sorted(boundaries or ())
        if not self.boundaries or self.boundaries[0] <= 0:
            raise BadRequestError("a Histogram needs boundaries above 0", field="boundaries")

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value."""
        counts = self.values.setdefault(self._key(tags), [0] * (len(self.boundaries) + 1))
        counts[bisect.bisect_left(self.boundaries, value)] += 1


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
