"""The lease machine: which worker serves which lease, decided without IO, clock or randomness.

``step(state, event)`` changes the state and returns commands; the shell
(:mod:`stoker_nodelet.workers.workers`) turns messages and exits into events and carries the commands
out. Ids and times come in events. No type of the wire is known here, so that a replay of the events
alone gives the same state: the shell keeps what travels (addresses, resources, specs) and translates.
"""

from __future__ import annotations

from stoker_nodelet.core.commands import Outbox
from stoker_nodelet.core.leases import LeaseTerms, WorkKind
from stoker_nodelet.core.machine import step
from stoker_nodelet.core.state import Policy, Rung, State, WorkerEntry, WorkerPhase

__all__ = (
    "LeaseTerms",
    "Outbox",
    "Policy",
    "Rung",
    "State",
    "WorkKind",
    "WorkerEntry",
    "WorkerPhase",
    "step",
)
