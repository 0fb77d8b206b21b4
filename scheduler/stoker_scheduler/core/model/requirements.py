"""The requirements of a lease on its node: the part of a demand on which placement depends.

Demands with equal requirements fit on the same nodes. That lets the scheduler look at each requirements
once per event, however many requests wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter, itemgetter

from stoker_scheduler.core.model.devices import check_gpu_units
from stoker_scheduler.core.model.labels import Term
from stoker_scheduler.core.model.node_filters import NodeFilter
from stoker_scheduler.core.model.resources import (
    CPU,
    GPU,
    GPU_MEMORY,
    InvalidDemandError,
    Units,
    to_units,
    units_text,
)
from stoker_scheduler.core.model.taints import Tolerations

ANY_BUNDLE = -1
"""Stands for whichever bundle of a placement group has room."""


class PlacementPolicy(StrEnum):
    """Policy by which a lease chooses among the nodes that fit; ``scoring.NODE_ORDERS`` says how."""

    HYBRID = "hybrid"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Requirements:
    """Resources and constraints of one lease.

    ``items`` are all resources but GPUs, in units and ordered by name; ``gpu_memory`` are bytes of one
    GPU, instead of ``gpu``. ``terms`` are ordered by label. ``node_id`` pins the lease to a node, or only
    prefers it if ``soft``. ``env`` names the runtime environment, which a node may fail to make while it
    takes work with others. With a ``group_id`` the lease goes into a bundle of that placement group:
    number ``bundle``, or any. ``reads`` are the resources of which a node filter asks how much is free.
    ``extenders`` are the services outside that are asked about nodes for it. ``background`` work has what
    other work leaves free, and is ended when that needs it. ``tolerations`` are of the taints of nodes.
    """

    items: tuple[tuple[str, int], ...] = ()
    gpu: int = 0
    terms: tuple[Term, ...] = ()
    node_id: str | None = None
    soft: bool = False
    policy: PlacementPolicy = PlacementPolicy.HYBRID
    env: str = ""
    group_id: str = ""
    bundle: int = ANY_BUNDLE
    gpu_memory: int = 0
    node_filters: tuple[NodeFilter, ...] = ()
    extenders: tuple[str, ...] = ()
    background: bool = False
    tolerations: Tolerations = ()
    names: frozenset[str] = field(default=frozenset(), compare=False)
    without_cpu: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    reads: frozenset[str] = field(default=frozenset(), compare=False)
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Requirements are dict keys on every step; hashing nested tuples each time cost a third of it.
        parts = (self.items, self.gpu, self.terms, self.node_id, self.soft, self.policy, self.env)
        where = (self.group_id, self.bundle, self.gpu_memory)
        asked = (self.node_filters, self.extenders, self.background, self.tolerations)
        object.__setattr__(self, "_hash", hash((parts, where, asked)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def units(self) -> Units:
        """All resources in units, GPUs included."""
        return dict(self.vector)

    @property
    def vector(self) -> tuple[tuple[str, int], ...]:
        """All resources in units as pairs, GPUs included."""
        if self.gpu_memory:
            return (*self.items, (GPU_MEMORY, self.gpu_memory))
        return (*self.items, (GPU, self.gpu)) if self.gpu else self.items

    @property
    def kinds(self) -> tuple[Requirements, ...]:
        """Itself alone; a gang has one for each kind of bundle."""
        return (self,)

    @property
    def needs_gpu(self) -> bool:
        """Whether it asks for GPUs, or a part of one."""
        return bool(self.gpu or self.gpu_memory)

    def amount(self, name: str) -> int:
        """Return the units of ``name`` among ``items``, 0 if it is not asked for."""
        at = bisect_left(self.items, name, key=itemgetter(0))
        found = self.items[at : at + 1]
        return found[0][1] if found and found[0][0] == name else 0

    def term(self, label: str) -> Term:
        """Return the condition on ``label``, which must be there."""
        return self.terms[bisect_left(self.terms, label, key=attrgetter("label"))]

    @property
    def text(self) -> str:
        """The resources in words."""
        return units_text(self.vector)


def make_requirements(
    resources: Mapping[str, float],
    *,
    terms: tuple[Term, ...] = (),
    node_id: str | None = None,
    soft: bool = False,
    policy: PlacementPolicy = PlacementPolicy.HYBRID,
    env: str = "",
    group_id: str = "",
    bundle: int = ANY_BUNDLE,
    node_filters: tuple[NodeFilter, ...] = (),
    extenders: tuple[str, ...] = (),
    background: bool = False,
    tolerations: Tolerations = (),
) -> Requirements:
    """Return the requirements of a demand; raise :class:`InvalidDemandError` for what makes no sense.

    ``terms`` are ordered by label.
    """
    units = to_units(resources)
    gpu = units.pop(GPU, 0)
    gpu_memory = units.pop(GPU_MEMORY, 0)
    check_gpu_units(gpu)
    if gpu and gpu_memory:
        raise InvalidDemandError(
            f"resources.{GPU_MEMORY}", "resources: give GPU or gpu_memory, not both"
        )
    if background and group_id:
        raise InvalidDemandError(
            "background", "background: what is in a placement group has its bundle for itself"
        )
    items = tuple(units.items())
    return Requirements(
        items=items,
        gpu=gpu,
        terms=terms,
        node_id=node_id or None,
        soft=soft,
        policy=policy,
        env=env,
        group_id=group_id,
        bundle=bundle,
        gpu_memory=gpu_memory,
        node_filters=node_filters,
        extenders=extenders,
        background=background,
        tolerations=tolerations,
        names=frozenset(units) | ({GPU} if gpu or gpu_memory else set()),
        without_cpu=tuple((name, count) for name, count in items if name != CPU),
        reads=frozenset().union(*(one.reads for one in node_filters)),
    )
