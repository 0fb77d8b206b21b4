"""The lease machine: which worker serves which lease, decided without IO, clock or randomness.

``step(state, event)`` changes the state and returns commands; the shell (``workers.py``) turns
messages and exits into events and carries the commands out. Ids and times come in events.
"""

from __future__ import annotations

from stoker_nodelet.core.machine import step
from stoker_nodelet.core.state import Policy, State, Worker, WorkerPhase

__all__ = ("Policy", "State", "Worker", "WorkerPhase", "step")
