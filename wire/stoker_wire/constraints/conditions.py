"""Conditions of nodes that keep new work away, as in Kubernetes: it reports when they begin and end."""

from __future__ import annotations

from enum import StrEnum

from stoker_wire.messages.common import Record, Time


class ConditionKind(StrEnum):
    """Kind of a condition under which a node takes no new work; the values are those of Kubernetes."""

    MEMORY_PRESSURE = "MemoryPressure"
    DISK_PRESSURE = "DiskPressure"


class NodeCondition(Record):
    """A condition of a node that keeps new work away, in words; ``at_s`` is since when."""

    kind: ConditionKind
    reason: str
    at_s: Time = 0.0
