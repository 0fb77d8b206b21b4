"""An index of leases, or of requests, by their owner, job and placement group.

The end of a job costs what the job has, not what the cluster has.
"""

from __future__ import annotations

from collections.abc import Iterable


class Index:
    """Ids by the ids of what they belong to, in the order in which they came."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: dict[str, dict[str, None]] = {}

    def add(self, member: str, of: Iterable[str]) -> None:
        """Add ``member``; empty ids are left out."""
        for key in of:
            if key:
                self._members.setdefault(key, {})[member] = None

    def discard(self, member: str, of: Iterable[str]) -> None:
        """Remove ``member``, which was added with the same ids."""
        for key in of:
            members = self._members.get(key)
            if members is not None:
                members.pop(member, None)
                if not members:
                    del self._members[key]

    def of(self, key: str) -> list[str]:
        """Return the members that belong to ``key``; a copy."""
        return list(self._members.get(key, ()))

    def check(self, expected: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        """Raise AssertionError unless there are exactly these members, each with what it belongs to."""
        twin = Index()
        for member, of in expected:
            twin.add(member, of)
        assert twin._members.keys() == self._members.keys(), "the index names others"
        for key, members in twin._members.items():
            assert members.keys() == self._members[key].keys(), f"the index of {key} is wrong"
