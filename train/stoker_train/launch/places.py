"""Places for the nodes of ``stoker launch``: a gang of fixed size, or the replicas of an elastic job.

Asked by the driver's loop; nothing here waits but :func:`open_places`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from stoker.api.placement_groups import placement_group, remove_placement_group
from stoker.exceptions import BadRequestError, ConflictError
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker.train import elastic

if TYPE_CHECKING:
    from stoker.api.placement_groups import PlacementGroup
    from stoker_train.launch.spec import Spec

_SLACK_S = 3.0
_LINEAR = (1e-3, 1.0, 1e-2, 1e-3, 1e-2, 1e-3, 1.0)
"""Theta of a step that gets faster with each node. A script of others measures nothing; who gives MIN:MAX
says that it is worth it. The policy still lets it grow to four times what it has run with at most."""
Strategies = dict[str, PlacementGroupSchedulingStrategy]


class Places(Protocol):
    """The bundles of a run by name, which may change."""

    @property
    def held(self) -> Strategies:
        """The bundles that are the run's now."""

    @property
    def leaving(self) -> frozenset[str]:
        """Those of them that it is asked to leave."""

    @property
    def leave_by_s(self) -> float:
        """The seconds that are left for that."""

    def accept(self) -> None:
        """Take what is offered; what was to be left is gone then."""

    def ran(self, nodes: int, restart_s: float) -> None:
        """Hear that it runs with so many nodes, and how long the change to that took."""

    def close(self) -> None:
        """Give all back."""


class FixedPlaces:
    """A placement group of as many bundles as the run has nodes."""

    def __init__(self, group: PlacementGroup, count: int) -> None:
        self._group = group
        self._held = {
            f"{group.id}-{index}": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            for index in range(count)
        }

    @property
    def held(self) -> Strategies:
        """All bundles."""
        return self._held

    @property
    def leaving(self) -> frozenset[str]:
        """None of them."""
        return frozenset()

    @property
    def leave_by_s(self) -> float:
        """No time: there is nothing to leave."""
        return 0.0

    def accept(self) -> None:
        """Do nothing: nothing is offered."""

    def ran(self, nodes: int, restart_s: float) -> None:
        """Do nothing: nobody asks."""

    def close(self) -> None:
        """Remove the group."""
        remove_placement_group(self._group)


class ElasticPlaces:
    """The replicas of an elastic job, as the scheduler's policy gives and takes them."""

    def __init__(self, session: elastic.Session) -> None:
        self._session = session
        self._held: Strategies = {}
        self._most = 0

    @property
    def held(self) -> Strategies:
        """The replicas of the generation that lives; none after they were taken away."""
        alive = _strategies(self._session.generation)
        self._held = {name: one for name, one in self._held.items() if name in alive}
        return self._held

    @property
    def leaving(self) -> frozenset[str]:
        """Replicas that are not in the open offer."""
        offer = self._session.offer
        return frozenset() if offer is None else frozenset(self._held) - set(_strategies(offer))

    @property
    def leave_by_s(self) -> float:
        """Seconds until an offer that takes some away takes all."""
        offer = self._session.offer
        if offer is None or offer.must_answer_by_s is None:
            return 0.0
        return max(0.0, offer.must_answer_by_s - time.time() - _SLACK_S)

    def accept(self) -> None:
        """Begin the generation that is offered, if one is and it is not void."""
        offer = self._session.offer
        if offer is not None:
            try:
                self._held = _strategies(self._session.accept(offer))
            except ConflictError:
                return  # the next one is under way

    def ran(self, nodes: int, restart_s: float) -> None:
        """Report it to the policy."""
        self._most = max(self._most, nodes)
        self._session.report(params=_LINEAR, profiled_replicas=self._most, restart_s=restart_s)

    def close(self) -> None:
        """Make the job rigid again."""
        self._session.close()


def open_places(spec: Spec) -> Places:
    """Ask for the nodes of a run; returns when there are some to run on.

    BadRequestError where the scheduler cannot vary their number.
    """
    if spec.min_nodes == spec.max_nodes:
        selectors = [spec.label_selector] * spec.min_nodes if spec.label_selector else None
        group = placement_group(
            [spec.bundle] * spec.min_nodes,
            bundle_label_selector=selectors,
            node_filter=spec.node_filter,
        )
        group.wait(None)
        return FixedPlaces(group, spec.min_nodes)
    if spec.bundle.get("GPU", 0.0) > 1:
        nodes = f"{spec.min_nodes * spec.nproc}:{spec.max_nodes * spec.nproc}"
        raise BadRequestError(
            f"nnodes: elastic nodes have one GPU each, not {spec.nproc}\n"
            f"give --nnodes {nodes} --nproc-per-node 1, or a fixed number of nodes",
            field="nnodes",
        )
    session = elastic.join(
        base_batch=spec.max_nodes,
        max_local_batch=spec.max_nodes,
        min_replicas=spec.min_nodes,
        max_replicas=spec.max_nodes,
        resources=spec.bundle,
        label_selector=spec.label_selector,
        node_filter=spec.node_filter,
    )
    return ElasticPlaces(session)


def _strategies(generation: elastic.Generation) -> Strategies:
    names = [f"{one.group_id}-{one.bundle}" for one in generation.replicas]
    return dict(zip(names, generation.strategies(), strict=True))
