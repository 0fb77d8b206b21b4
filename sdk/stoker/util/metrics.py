"""Metrics that a program counts, for Prometheus: counters, gauges and histograms.

::

    from stoker.util.metrics import Counter

    requests = Counter("requests", "Requests answered.", tag_keys=("route",))
    requests.inc(tags={"route": "/"})

Each node shows those of its processes at its ``/metrics``, a few seconds later. Counters and histograms are
sums over the processes of a job; a gauge has a value for each process. Metrics of one name are one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime.process.metric_values import MAX_METRICS, MAX_SERIES, TABLE, Values
from stoker_wire.messages.node_api import MetricKind

__all__ = ("Counter", "Gauge", "Histogram")

_NAME = re.compile(r"(?!stoker_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_TAG = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_TAGS = ("job_id", "process", "le")
_MAX_NAME, _MAX_TAGS, _MAX_TAG, _MAX_VALUE, _MAX_BOUNDARIES = 200, 32, 100, 500, 200


class _Metric:
    """A named value for each combination of tags."""

    kind: MetricKind
    prefix = ""

    def __init__(
        self,
        name: str,
        description: str = "",
        tag_keys: Sequence[str] | None = None,
        *,
        _boundaries: tuple[float, ...] = (),
    ) -> None:
        if not isinstance(name, str):
            raise WrongTypeError(f"name={name!r} of a metric is no text", field="name")
        if isinstance(tag_keys, str) or not all(isinstance(key, str) for key in tag_keys or ()):
            raise WrongTypeError(f"tag_keys={tag_keys!r}: give a tuple of texts", field="tag_keys")
        exported = self.prefix + name
        _check_name(name, exported)
        self._name = name
        self._description = description
        self._tag_keys = _checked_keys(name, tag_keys or ())
        self._default_tags: dict[str, str] = {}
        values = Values(exported, self.kind, description[:1000], self._tag_keys, _boundaries)
        shared = TABLE.add(values)
        if shared is None:
            raise BadRequestError(
                f"metric {name} is there with another meaning, or as one of {MAX_METRICS}\n"
                "give it the same kind, tags and boundaries, or another name",
                field="name",
            )
        self._values = shared

    @property
    def info(self) -> dict[str, Any]:
        """The name, the description and the tags."""
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Self:
        """Set tags of all records that have none of their own."""
        self._check(default_tags)
        self._default_tags = dict(default_tags)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        boundaries = {"boundaries": self._values.boundaries} if self._values.boundaries else {}
        return _restored, (
            type(self),
            {"name": self._name, "description": self._description, "tag_keys": self._tag_keys}
            | boundaries,
            self._default_tags,
        )

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
        return tuple(given[key][:_MAX_VALUE] for key in self._tag_keys)

    def _check_taken(self, taken: bool) -> None:
        if not taken:
            raise BadRequestError(
                f"metric {self._name} has {MAX_SERIES} combinations of tags\n"
                "use tags of few values",
                field="tags",
            )


class Counter(_Metric):
    """A value that grows."""

    kind = MetricKind.COUNTER

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to it."""
        number = _number(value, "Counter.inc")
        if number <= 0:
            raise BadRequestError(f"Counter.inc({value}): give more than 0", field="value")
        self._check_taken(TABLE.increase(self._values, self._key(tags), number))


class Gauge(_Metric):
    """A value that is set."""

    kind = MetricKind.GAUGE

    def set(self, value: float | None, tags: Mapping[str, str] | None = None) -> None:
        """Set it; None changes nothing."""
        key = self._key(tags)
        if value is not None:
            self._check_taken(TABLE.set(self._values, key, _number(value, "Gauge.set")))


class Histogram(_Metric):
    """Counts of values between boundaries."""

    kind = MetricKind.HISTOGRAM

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: Sequence[str] | None = None,
    ) -> None:
        self.boundaries = sorted({float(one) for one in boundaries or ()})
        if not self.boundaries or self.boundaries[0] <= 0:
            raise BadRequestError("a Histogram needs boundaries above 0", field="boundaries")
        if len(self.boundaries) > _MAX_BOUNDARIES or not math.isfinite(self.boundaries[-1]):
            raise BadRequestError(
                f"a Histogram has {_MAX_BOUNDARIES} finite boundaries at most", field="boundaries"
            )
        super().__init__(name, description, tag_keys, _boundaries=tuple(self.boundaries))

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value."""
        number = _number(value, "Histogram.observe")
        self._check_taken(TABLE.observe(self._values, self._key(tags), number))


def _restored(cls: Any, arguments: dict[str, Any], default_tags: dict[str, str]) -> Any:
    return cls(**arguments).set_default_tags(default_tags)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WrongTypeError(f"{what}({value!r}): give a number", field="value") from None
    if not math.isfinite(number):
        raise BadRequestError(f"{what}({value!r}): give a finite number", field="value")
    return number


def _check_name(name: str, exported: str) -> None:
    if not name or len(exported) > _MAX_NAME or not _NAME.fullmatch(exported):
        raise BadRequestError(
            f"a metric needs a name, not {name[:_MAX_NAME]!r}\n"
            "give letters, digits, '_' and ':', no digit first, and not 'stoker_' first",
            field="name",
        )


def _checked_keys(name: str, tag_keys: Sequence[str]) -> tuple[str, ...]:
    keys = tuple(tag_keys)
    good = all(_TAG.fullmatch(key) and len(key) <= _MAX_TAG for key in keys)
    if not good or len(set(keys)) != len(keys) or len(keys) > _MAX_TAGS:
        raise BadRequestError(
            f"metric {name}: tag_keys={keys!r}\n"
            f"give {_MAX_TAGS} names at most, of letters, digits and '_', each once",
            field="tag_keys",
        )
    taken = [key for key in keys if key in _OWN_TAGS]
    if taken:
        raise BadRequestError(
            f"metric {name}: the tag {taken[0]!r} is Stoker's own\ngive it another name",
            field="tag_keys",
        )
    return keys
