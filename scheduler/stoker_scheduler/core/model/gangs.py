"""Gangs: bundles of resources that are placed all or none, and the strategy that says where.

A placement group is a gang that has a name and a life; its bundles are leases, and each is a place where
leases of the group's tasks and actors go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.model.resources import (
    CPU,
    InvalidDemandError,
    Units,
    add,
    joined,
    units_text,
)

MAX_BUNDLES = 10_000


class GangStrategy(StrEnum):
    """The rule by which the bundles of a gang share nodes; the values are those of the wire."""

    PACK = "PACK"
    """As few nodes as can be."""
    SPREAD = "SPREAD"
    """As many nodes as can be."""
    STRICT_PACK = "STRICT_PACK"
    """One node."""
    STRICT_SPREAD = "STRICT_SPREAD"
    """A node for each."""


@dataclass(frozen=True)
class Gang:
    """The shape of a gang; gangs of equal shape fit on the same nodes.

    ``taken`` are the nodes of the group's other bundles, when only some are to be placed again.
    """

    bundles: tuple[Requirements, ...]
    strategy: GangStrategy
    taken: tuple[str, ...] = ()
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.bundles, self.strategy, self.taken)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def kinds(self) -> tuple[Requirements, ...]:
        """The different bundles, the largest first."""
        return tuple(sorted(dict.fromkeys(self.bundles), key=_largest_first))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of bundles of each kind."""
        return tuple(self.bundles.count(kind) for kind in self.kinds)

    @property
    def background(self) -> bool:
        """Whether it has only what other work leaves free: a gang never does."""
        return False

    @cached_property
    def vector(self) -> tuple[tuple[str, int], ...]:
        """The sum of all bundles in units as pairs, GPUs included."""
        return tuple(self.units.items())

    @property
    def units(self) -> Units:
        """The sum of all bundles in units, GPUs included."""
        total: Units = {}
        for bundle in self.bundles:
            add(total, bundle.vector)
        return dict(sorted(total.items()))

    @cached_property
    def names(self) -> frozenset[str]:
        """The resources that some bundle asks for."""
        return frozenset().union(*(bundle.names for bundle in self.bundles))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The resources of which a node filter of some bundle asks how much is free."""
        return frozenset().union(*(bundle.reads for bundle in self.bundles))

    @cached_property
    def extenders(self) -> tuple[str, ...]:
        """The extenders that are asked about some bundle."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.extenders))

    @cached_property
    def text(self) -> str:
        """The bundles in words: ``2 x {1 CPU, 1 GPU}, {4 CPU} (STRICT_SPREAD)``."""
        parts = [
            f"{f'{count} x ' if count > 1 else ''}{{{units_text(kind.vector)}}}"
            for kind, count in zip(self.kinds, self.counts, strict=True)
        ]
        return f"{joined(parts)} ({self.strategy})"


def _largest_first(bundle: Requirements) -> tuple[int, int, int, tuple[tuple[str, int], ...]]:
    # Whole GPUs before parts: a part may take what is left of a device, never the other way round.
    return -bundle.gpu, -bundle.gpu_memory, -bundle.amount(CPU), bundle.vector


def make_gang(
    bundles: Sequence[Requirements], strategy: GangStrategy, *, taken: Sequence[str] = ()
) -> Gang:
    """Return the gang of ``bundles``; raise InvalidDemandError if there is none, or too many."""
    if not bundles:
        raise InvalidDemandError("bundles", "bundles: at least one is needed")
    if len(bundles) > MAX_BUNDLES:
        raise InvalidDemandError("bundles", f"bundles: {len(bundles)} are too many ({MAX_BUNDLES})")
    for index, bundle in enumerate(bundles):
        if not bundle.vector:
            text = f"bundles: bundle {index} asks for nothing: give it a resource"
            raise InvalidDemandError(f"bundles.{index}", text)
    return Gang(tuple(bundles), strategy, tuple(sorted(taken)))
