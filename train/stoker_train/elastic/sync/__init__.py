"""Exchange between replicas: gradients in every step, or parameters every so often.

Strategies are made from plain values, in any process; :mod:`stoker_train.elastic.sync.exchange`, which needs
torch, is imported by the replicas alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_train.elastic.sync.hierarchical import Hierarchical
from stoker_train.elastic.sync.local_sgd import AdaComm, LocalSGD, PostLocalSGD
from stoker_train.elastic.sync.overlap import OverlapLocalSGD
from stoker_train.elastic.sync.strategy import AllReduce, Strategy

__all__ = (
    "AdaComm",
    "AllReduce",
    "Hierarchical",
    "LocalSGD",
    "OverlapLocalSGD",
    "PostLocalSGD",
    "Strategy",
    "make_strategy",
)

_STRATEGIES: tuple[type[Strategy], ...] = (
    AllReduce,
    LocalSGD,
    PostLocalSGD,
    AdaComm,
    OverlapLocalSGD,
    Hierarchical,
)


def make_strategy(spec: str | Mapping[str, Any] | Strategy | None) -> Strategy:
    """Return a new strategy from its name, its ``spec()``, or one that is copied; all-reduce for None.

    Raises ``ValueError`` that lists the names, or names the option that is wrong or missing.
    """
    if spec is None:
        return AllReduce()
    if isinstance(spec, Strategy):
        return make_strategy(spec.spec())
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    for kind in _STRATEGIES:
        if kind.name == name:
            try:
                return kind(**options)
            except TypeError as error:
                raise ValueError(f"strategy {name!r} has other options: {error}") from None
    known = ", ".join(kind.name for kind in _STRATEGIES)
    raise ValueError(f"there is no strategy {name!r}: sync must be one of {known}")
