"""The policies that a queue may name: those of Stoker, and those that are installed.

An installed one is an entry point of the group ``stoker.policies``: a function that takes a
``stoker_scheduler.core.queueing.policies.WaitingRequest`` and returns a sort key. It is to be installed
where the gcs and the schedulers run.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "stoker.policies"
BUILT_IN = ("priority", "fifo", "fair", "smallest")


def installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of installed policies; those of Stoker's own names are left out."""
    return tuple(one for one in entry_points(group=GROUP) if one.name not in BUILT_IN)


def known() -> tuple[str, ...]:
    """Return all names that a queue may give."""
    return (*BUILT_IN, *(one.name for one in installed()))
