"""Blocked subqueues: those of which nothing fits now, indexed by what could change that.

An event costs a look at the subqueues that it could have helped, not at all that wait. A lease that ends
can help those that ask for some of its resources, on its node (a filter may ask for little that is
free, and be helped by one that starts); a bundle those of its placement group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.feasibility import first_obstacle, rules_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements

_rules_for = lru_cache(maxsize=4096)(rules_for)


class BlockedSubqueues:
    """The requirements of which nothing fits anywhere, as of the changes that it was told of."""

    __slots__ = ("_by_name", "_in_group", "members", "readers")

    def __init__(self) -> None:
        self.members: dict[Requirements | Gang, None] = {}
        """All of them; to be read only."""
        self._by_name: dict[str, dict[Requirements | Gang, None]] = {}
        self.readers: dict[Requirements | Gang, None] = {}
        """Those with a node filter that asks what is free: less of it may help them too."""
        self._in_group: dict[str, dict[Requirements, None]] = {}

    def __contains__(self, requirements: Requirements | Gang) -> bool:
        return requirements in self.members

    def __iter__(self) -> Iterator[Requirements | Gang]:
        return iter(self.members)

    def add(self, requirements: Requirements | Gang) -> None:
        """Add requirements that fit nowhere."""
        self.members[requirements] = None
        if not isinstance(requirements, Gang) and requirements.group_id:
            self._in_group.setdefault(requirements.group_id, {})[requirements] = None
            return
        if requirements.reads:
            self.readers[requirements] = None
        for name in requirements.names | requirements.reads:
            self._by_name.setdefault(name, {})[requirements] = None

    def discard(self, requirements: Requirements | Gang) -> None:
        """Remove requirements that may fit, or that nobody waits for."""
        if requirements not in self.members:
            return
        del self.members[requirements]
        if not isinstance(requirements, Gang) and requirements.group_id:
            _drop(self._in_group, requirements.group_id, requirements)
            return
        self.readers.pop(requirements, None)
        for name in requirements.names | requirements.reads:
            _drop(self._by_name, name, requirements)

    def freed(self, node: NodeInfo, names: Iterable[str]) -> list[Requirements | Gang]:
        """Return those that fit on ``node``, or may, now that it has more of the resources ``names``."""
        found: dict[Requirements | Gang, None] = {}
        for name in sorted(names):  # of a set: their order must not decide
            for requirements in self._by_name.get(name, ()):
                if requirements not in found and _may_fit(node, requirements):
                    found[requirements] = None
        return list(found)

    def changed(self, node: NodeInfo) -> list[Requirements | Gang]:
        """Return those that fit on ``node``, or may, whatever of it has changed."""
        return [requirements for requirements in self.members if _may_fit(node, requirements)]

    def allocated(self, node: NodeInfo) -> list[Requirements | Gang]:
        """Return those that fit on ``node``, or may, now that less of it is free."""
        return [requirements for requirements in self.readers if _may_fit(node, requirements)]

    def in_group(self, group_id: str) -> list[Requirements]:
        """Return those that go into bundles of a placement group."""
        return list(self._in_group.get(group_id, ()))


def _may_fit(node: NodeInfo, requirements: Requirements | Gang) -> bool:
    if isinstance(requirements, Gang) or requirements.group_id:
        return (
            True  # a gang's ranking knows better; so does a group, whose bundles follow their nodes
        )
    return first_obstacle(node, requirements, _rules_for(requirements)) is None


def _drop(index: dict[str, dict], key: str, requirements: object) -> None:  # type: ignore[type-arg]
    members = index[key]
    del members[requirements]
    if not members:
        del index[key]
