"""``ray.util.scheduling_strategies``: where a task or an actor is to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.exceptions import BadRequestError
from stoker.ray.mapping.lacking import attribute_error
from stoker.runtime.options.strategies import NodeAffinity, PlacementGroupSchedulingStrategy

NODE = "node:"
HEAD = "__internal_head__"
LABELS = {
    "ray.io/node-id": "stoker.io/node-id",
    "ray.io/accelerator-type": "accelerator_type",
    "ray.io/head": "stoker.io/head",
}
"""Labels that nodes have by themselves, and their names here."""

__all__ = (
    "HEAD",
    "LABELS",
    "NODE",
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
)


class NodeAffinitySchedulingStrategy:
    """Run on one node. Makes a ``stoker.NodeAffinity``."""

    def __new__(
        cls,
        node_id: Any,
        soft: bool = False,
        _spill_on_unavailable: bool = False,
        _fail_on_unavailable: bool = False,
    ) -> Any:
        """Return the strategy for the node of this id."""
        return NodeAffinity(node_id=str(node_id), soft=soft or _spill_on_unavailable)


class In:
    """One of these values."""

    def __init__(self, *values: str) -> None:
        self.values = values

    def condition(self, field: str) -> str:
        """Return the condition on a label as a node filter."""
        return f"{field} in ({_texts(self.values)})"


class NotIn(In):
    """None of these values."""

    def condition(self, field: str) -> str:
        """Return the condition on a label as a node filter."""
        return f"({field} not in ({_texts(self.values)}) or {field} is null)"


class Exists:
    """Any value."""

    def condition(self, field: str) -> str:
        """Return the condition on a label as a node filter."""
        return f"{field} is not null"


class DoesNotExist:
    """No value."""

    def condition(self, field: str) -> str:
        """Return the condition on a label as a node filter."""
        return f"{field} is null"


class NodeLabelSchedulingStrategy:
    """Conditions on the labels of the node. ``soft`` ones, which Stoker does not have, are left out."""

    def __init__(
        self, hard: Mapping[str, Any] | None = None, soft: Mapping[str, Any] | None = None
    ) -> None:
        if not hard and not soft:
            raise BadRequestError("NodeLabelSchedulingStrategy: give conditions on labels")
        self.hard = dict(hard or {})
        self.soft = dict(soft or {})

    @property
    def node_filter(self) -> str:
        """The conditions that must hold, as a node filter."""
        return " and ".join(
            one.condition(f'labels."{label}"') for label, one in sorted(self.hard.items())
        )


def _texts(values: tuple[str, ...]) -> str:
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
