"""The policies of elastic jobs by name: those of Stoker, and those that are installed.

An installed one is an entry point of the group ``stoker.elastic_policies``: a callable without arguments that
returns an :class:`~stoker_scheduler.core.elastic.jobs.ElasticPolicy`. It is to be installed where schedulers
run, or where one is simulated.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from stoker_scheduler.core.elastic.baselines import Fifo, Tiresias
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.pollux import Pollux
from stoker_scheduler.core.elastic.sia import Sia

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_scheduler.core.elastic.jobs import ElasticPolicy

_log = logging.getLogger(__name__)

GROUP = "stoker.elastic_policies"
BUILT_IN: dict[str, Callable[[int], ElasticPolicy]] = {
    "stoker": lambda seed: GoodputPolicy(),
    "sia": lambda seed: Sia(),
    "pollux": Pollux,
    "tiresias": lambda seed: Tiresias(),
    "fifo": lambda seed: Fifo(),
}
"""By name, what makes each of a seed."""


def installed() -> dict[str, Callable[[], ElasticPolicy]]:
    """Return what makes the installed policies; one that cannot be imported is logged and left out."""
    found: dict[str, Callable[[], ElasticPolicy]] = {}
    for one in entry_points(group=GROUP):
        if one.name in BUILT_IN:
            continue
        try:
            found[one.name] = one.load()
        except Exception as error:
            _log.error("elastic policy %s is not usable: %s: %s", one.name, one.value, error)
    return found


def make(name: str, fairness: float | None = None) -> ElasticPolicy:
    """Return a policy, one for each queue. ``stoker``, which has a ``fairness``, is for what is not there."""
    if name == "stoker":
        return GoodputPolicy(fairness=fairness)
    if name in BUILT_IN:
        return BUILT_IN[name](0)
    others = installed()
    if name in others:
        return others[name]()
    known = ", ".join((*BUILT_IN, *others))
    _log.error("there is no elastic policy %r: STOKER_ELASTIC_POLICY is one of %s", name, known)
    return GoodputPolicy()
