"""Installed policies, made known to the core when a queue names one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from stoker_scheduler.core.queueing.policies import Key, WaitingRequest, add_policy
from stoker_wire.policies import installed

_log = logging.getLogger(__name__)


def load_policies() -> None:
    """Import the installed policies; one that cannot be imported is logged and left out."""
    for entry_point in installed():
        try:
            policy = entry_point.load()
        except Exception as error:
            _log.error(
                "policy %s is not usable: %s: %s", entry_point.name, entry_point.value, error
            )
            continue
        add_policy(entry_point.name, _guarded(entry_point.name, policy))


def _guarded(name: str, policy: Callable[[WaitingRequest], Any]) -> Callable[[WaitingRequest], Key]:
    """Return the policy, in whose place the order is by priority whenever it fails; that is logged once."""
    failed = False

    def key(waiting: WaitingRequest) -> Key:
        nonlocal failed
        try:
            return tuple(float(part) for part in policy(waiting))
        except Exception as error:
            if not failed:
                _log.error("policy %s failed, and orders by priority: %r", name, error)
            failed = True
            return -waiting.aged_priority, waiting.share, waiting.since_s

    return key
