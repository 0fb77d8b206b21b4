"""Placement groups as the scheduler sees them: which bundles are held, each a place for leases of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.devices import Devices, Shares
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.nodes import NodeInfo
from stoker_scheduler.core.model.requirements import ANY_BUNDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker_scheduler.core.model.nodes import NodeSpec
    from stoker_scheduler.core.model.requirements import Requirements


@dataclass(slots=True)
class PlacementGroup:
    """A group that the gcs has not removed; ``bundles`` has those that are placed, ordered by number."""

    group_id: str
    job_id: str
    gang: Gang
    bundles: dict[int, NodeInfo] = field(default_factory=dict)
    released: dict[int, None] = field(default_factory=dict)
    """The numbers of bundles that it has given up."""
    closing: bool = False
    """Whether its bundles are to end for other work: nothing more goes into them."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in its bundles."""
        return not any(place.leases for place in self.bundles.values())

    def add(self, index: int, place: NodeInfo) -> None:
        """Add a bundle that is placed."""
        self.closing = False
        self.bundles = dict(sorted({**self.bundles, index: place}.items()))

    def places(self, requirements: Requirements) -> Iterable[NodeInfo]:
        """Return the placed bundles in which a lease with ``requirements`` may be."""
        if self.closing:
            return ()
        if requirements.bundle == ANY_BUNDLE:
            return self.bundles.values()
        place = self.bundles.get(requirements.bundle)
        return () if place is None else (place,)

    def wanted_bundles(self, requirements: Requirements) -> tuple[Requirements, ...]:
        """Return the bundles, placed or not, in which such a lease may be."""
        bundles = self.gang.bundles
        if requirements.bundle == ANY_BUNDLE:
            return bundles
        return bundles[requirements.bundle : requirements.bundle + 1]

    def best(self, requirements: Requirements, fits: Callable[[NodeInfo], bool]) -> NodeInfo | None:
        """Return the placed bundle with the lowest number that ``fits``, or None."""
        return next((place for place in self.places(requirements) if fits(place)), None)


def make_place(node: NodeInfo, lease_id: str, bundle: Requirements, gpus: Shares) -> NodeInfo:
    """Return the place that a bundle is on ``node``, with nothing in it yet."""
    place = NodeInfo(_spec(node.spec, bundle, gpus))
    place.devices = Devices(gpus, node.devices.facts)
    place.backoffs = node.backoffs
    place.slow_ranks = node.slow_ranks
    place.bundle_lease_id = lease_id
    return place


def follow_node(place: NodeInfo, spec: NodeSpec) -> None:
    """Apply the changed spec of its node to a bundle's place."""
    total, gpus = place.spec.total, place.spec.gpus
    place.spec = replace(_open(spec), total=total, gpus=gpus)
    place.devices.learn(spec.gpu_facts)


def _spec(spec: NodeSpec, bundle: Requirements, gpus: Shares) -> NodeSpec:
    return replace(_open(spec), total=dict(bundle.items), gpus=tuple(sorted(gpus)))


def _open(spec: NodeSpec) -> NodeSpec:
    """Return a node's spec as its bundles have it: a cordon or taint keeps bundles away, not what is in them.

    A drain does: what is there has to leave.
    """
    return replace(spec, taints=(), cordon=spec.cordon if spec.drain_until_s is not None else "")
