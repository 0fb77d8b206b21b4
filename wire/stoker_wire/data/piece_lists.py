"""Packages in pieces: a list of other packages that together are one folder.

A list is a package itself: a mark, then the SHA-256 of each piece in 32 bytes, in the order in which they
are unpacked. Drivers write it, the gcs reads it to keep the pieces as long as the list, nodelets unpack it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.common import Message

MARK = b"stoker-pieces-1\n"
"""No zip archive begins with it."""
MAX_PIECES = 2048
DIGEST_NBYTES = 32
MAX_LIST_NBYTES = len(MARK) + DIGEST_NBYTES * MAX_PIECES

PackageHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class FindMissing(Message):
    """``hashes``: packages of which those that are not stored are asked for."""

    hashes: Annotated[tuple[PackageHash, ...], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]


class MissingPackages(Message):
    """``hashes``: those that are not stored, in the order in which they were asked for."""

    hashes: tuple[str, ...] = ()


def write_list(hashes: tuple[str, ...]) -> bytes:
    """Return the package that is these pieces."""
    return MARK + b"".join(bytes.fromhex(one) for one in hashes)


def may_be_list(nbytes: int) -> bool:
    """Return whether a package of this size can be a list."""
    return len(MARK) < nbytes <= MAX_LIST_NBYTES and (nbytes - len(MARK)) % DIGEST_NBYTES == 0


def read_list(content: bytes) -> tuple[str, ...]:
    """Return the hashes of the pieces; none if ``content`` is no list. BadRequestError if it is broken."""
    if not content.startswith(MARK):
        return ()
    if not may_be_list(len(content)):
        raise BadRequestError(
            f"this list of pieces is broken\nafter its mark are 1 to {MAX_PIECES} digests of "
            f"{DIGEST_NBYTES} bytes each, not {len(content) - len(MARK)} bytes",
            field="body",
        )
    starts = range(len(MARK), len(content), DIGEST_NBYTES)
    return tuple(content[at : at + DIGEST_NBYTES].hex() for at in starts)
