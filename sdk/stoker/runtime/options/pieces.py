"""The split of a folder into pieces, so that a change of a file changes few of them.

A large file is a piece of its own. Small ones are bundled in the order of their names. Whether a bundle ends
after a file follows from the name and the size of that file alone, by chance: so a file that comes, goes or
grows moves no other bundle's ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LARGE_NBYTES = 512 << 10
"""Files of this size and more are pieces of their own."""
_BUNDLE_NBYTES = LARGE_NBYTES
_BUNDLE_FILES = 64
"""A bundle ends after about so many bytes, before compression, or so many files."""


class Member(NamedTuple):
    """A file of a package to be: ``read`` returns its content."""

    name: str
    nbytes: int
    executable: bool
    read: Callable[[], bytes]


def split(members: Iterable[Member]) -> Iterator[list[Member]]:
    """Yield the pieces of a folder, each the files that it has."""
    bundle: list[Member] = []
    for one in sorted(members, key=lambda one: one.name):
        if one.nbytes >= LARGE_NBYTES:
            yield [one]
            continue
        bundle.append(one)
        if _ends_bundle(one):
            yield bundle
            bundle = []
    if bundle:
        yield bundle


def _ends_bundle(member: Member) -> bool:
    chance = max(1 / _BUNDLE_FILES, member.nbytes / _BUNDLE_NBYTES)
    return zlib.crc32(member.name.encode("utf-8", "surrogateescape")) < chance * 2**32
