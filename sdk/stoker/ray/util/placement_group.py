"""``ray.util.placement_group``: groups with Ray's keywords, and their table in Ray's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import stoker
from stoker.api import placement_groups
from stoker.exceptions import BadRequestError
from stoker.ray.mapping.ids import Id
from stoker.ray.mapping.lacking import attribute_error
from stoker.ray.util.scheduling_strategies import LABELS

VALID_PLACEMENT_GROUP_STRATEGIES = placement_groups.STRATEGIES

__all__ = (
    "VALID_PLACEMENT_GROUP_STRATEGIES",
    "PlacementGroup",
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
)


class PlacementGroup(placement_groups.PlacementGroup):
    """A handle to a placement group."""

    __slots__ = ()

    @property
    def id(self) -> Id:
        """The group's id, as in ``stoker list placement-groups``."""
        return Id(self._id)

    def wait(self, timeout_seconds: float | None = 30.0) -> bool:
        """Return True once all bundles are reserved, False if the time passes before."""
        return super().wait(timeout_seconds)

    @property
    def is_empty(self) -> bool:
        """Whether it has no bundles."""
        return not self.bundle_count

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementGroup, (self._id, self.bundle_specs)


def placement_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str | None = "PACK",
    name: str = "",
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
    topology_strategy: Any = None,
    **options: Any,
) -> PlacementGroup:
    """Reserve bundles of resources, all or none; return a handle at once."""
    if topology_strategy:
        raise BadRequestError(
            "placement_group(): topology_strategy is not in Stoker\n"
            "say which nodes with bundle_label_selector or node_filter",
            field="topology_strategy",
        )
    selectors = bundle_label_selector and [
        {LABELS.get(label, label): text for label, text in one.items()}
        for one in bundle_label_selector
    ]
    options.pop("_max_cpu_fraction_per_node", None)
    group = stoker.placement_group(
        bundles,
        strategy or "PACK",
        name,
        lifetime,
        bundle_label_selector=selectors or None,
        **options,
    )
    return _of_ray(group)


def _of_ray(group: placement_groups.PlacementGroup) -> PlacementGroup:
    return PlacementGroup(group.id, group.bundle_specs)


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the living group of this name; ``ValueError`` if there is none."""
    return _of_ray(stoker.get_placement_group(placement_group_name))


def get_current_placement_group() -> PlacementGroup | None:
    """Return the placement group in which the calling code runs, or None."""
    group = stoker.get_current_placement_group()
    return None if group is None else _of_ray(group)


def remove_placement_group(placement_group: placement_groups.PlacementGroup) -> None:
    """Give the bundles back; what runs in them ends."""
    stoker.remove_placement_group(placement_group)


def placement_group_table(
    placement_group: placement_groups.PlacementGroup | None = None,
) -> dict[str, Any]:
    """Return the record of one group, or of all by their ids, in Ray's shape."""
    if placement_group is not None:
        return _record(stoker.placement_group_table(placement_group))
    return {group_id: _record(one) for group_id, one in stoker.placement_group_table().items()}


def _record(group: Mapping[str, Any]) -> dict[str, Any]:
    bundles = list(enumerate(group["bundles"]))
    return {
        "placement_group_id": group["group_id"],
        "name": group["name"],
        "bundles": {index: dict(bundle["resources"]) for index, bundle in bundles},
        "bundles_to_node_id": {
            int(index): place["node_id"] for index, place in group["placements"].items()
        },
        "strategy": group["strategy"],
        "state": group["state"],
        "stats": {"scheduling_state": group["state"]},
    }


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
