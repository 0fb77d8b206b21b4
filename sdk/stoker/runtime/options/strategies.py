"""The values of ``scheduling_strategy``, and their form in a demand."""

from typing import Annotated, Any, Protocol

import msgspec

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime.options.documentation import Option, documented
from stoker_wire.messages.common import SpreadPolicy, Strategy

# Annotations are evaluated in this module: what is made of them needs no second pass.


@documented
class NodeAffinity(msgspec.Struct, frozen=True, kw_only=True):
    """A value of ``scheduling_strategy``: run on one node."""

    node_id: Annotated[
        str,
        Option(
            "The id of the node, as in `stoker.nodes()`; for one that is gone `on_infeasible` decides.",
            by="scheduler",
            default="none: must be given",
            example='NodeAffinity(node_id="n_5f3a")',
        ),
    ]
    soft: Annotated[
        bool,
        Option(
            "Prefer the node, and run elsewhere if it cannot take the work now.",
            by="scheduler",
            example='NodeAffinity(node_id="n_5f3a", soft=True)',
        ),
    ] = False


class GroupHandle(Protocol):
    """A placement group, as far as options know it."""

    @property
    def id(self) -> str:
        """The group's id."""

    @property
    def bundle_count(self) -> int:
        """The number of bundles."""


@documented
class PlacementGroupSchedulingStrategy(msgspec.Struct, frozen=True):
    """A value of ``scheduling_strategy``: run in a bundle of a placement group."""

    placement_group: Annotated[
        Any,
        Option(
            "The group, as `stoker.placement_group` returned it.",
            by="scheduler",
            default="none: must be given",
            takes="a PlacementGroup",
            example="PlacementGroupSchedulingStrategy(group)",
        ),
    ]
    placement_group_bundle_index: Annotated[
        int,
        Option(
            "The number of the bundle; -1 takes the first with room.",
            by="scheduler",
            example="PlacementGroupSchedulingStrategy(group, 0)",
        ),
    ] = -1
    placement_group_capture_child_tasks: Annotated[
        bool,
        Option(
            "What the task or actor starts runs in the group as well, unless it has a "
            "`scheduling_strategy` of its own.",
            by="caller",
            example="PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raise for what is no placement group, or not one of its bundles."""
        index, count = self.placement_group_bundle_index, _bundle_count(self.placement_group)
        if isinstance(index, bool) or not isinstance(index, int):
            raise WrongTypeError(
                f"placement_group_bundle_index={index!r} is not a number",
                field="placement_group_bundle_index",
            )
        if not -1 <= index < count:
            raise BadRequestError(
                f"placement_group_bundle_index={index} is none of the {count} bundles\n"
                f"give 0 to {count - 1}, or -1 for any",
                field="placement_group_bundle_index",
            )


def _bundle_count(group: Any) -> int:
    count = getattr(group, "bundle_count", None)
    if not isinstance(count, int):
        raise WrongTypeError(
            f"placement_group={group!r} is no placement group\n"
            "give what stoker.placement_group() returned",
            field="placement_group",
        )
    return count


def strategy_of(value: Any) -> Strategy:
    """Return the scheduling strategy that a user wrote as a name or a ``NodeAffinity``."""
    if value is None or value == "DEFAULT":
        return Strategy()
    if value == "SPREAD":
        return Strategy(policy=SpreadPolicy.SPREAD)
    if isinstance(value, NodeAffinity):
        return Strategy(node_id=value.node_id, soft=value.soft)
    if isinstance(value, PlacementGroupSchedulingStrategy):
        return Strategy(
            group_id=str(value.placement_group.id),
            bundle=value.placement_group_bundle_index,
            capture_child_tasks=value.placement_group_capture_child_tasks,
        )
    raise BadRequestError(
        f"scheduling_strategy={value!r} is no strategy\n"
        "use 'DEFAULT', 'SPREAD', NodeAffinity(node_id=...) or "
        "PlacementGroupSchedulingStrategy(group)",
        field="scheduling_strategy",
    )
