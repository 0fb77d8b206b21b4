"""Headers: what each member is about to do, exchanged before it does it, so that differences are named.

A header is a fixed number of bytes, so that one small all-gather carries all: when it was sent, its number
in the group's order, and a text. Values that fit into the same message travel with it. Used by
:mod:`stoker_train.collective.lane`; no torch, no clock, no IO.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

NBYTES = 192
SLOT_NBYTES = 2048
"""What each member sends of a call: the header, and behind it the values, if there is room for them."""
INLINE_NBYTES = SLOT_NBYTES - NBYTES
_TIME = struct.Struct("<q")
_BODY = struct.Struct("<qB")
_TEXT = NBYTES - _TIME.size - _BODY.size
_DIGEST = 8
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a member, as others see it: equal on all members of a correct program.

    ``shape`` and ``dtype`` are those of what is exchanged, as text, ``device`` the kind of device that has
    it, if that is not the CPU: each kind has connections of its own. ``detail`` is the operation's own: how
    it reduces, its root.
    """

    operation: str
    detail: str = ""
    dtype: str = ""
    shape: str = ""
    name: str = ""
    device: str = ""

    def __str__(self) -> str:
        place = f"on {self.device}" if self.device else ""
        parts = (self.operation, self.detail, self.dtype, self.shape, place)
        text = " ".join(part for part in parts if part)
        return f"{text} {self.name!r}" if self.name else text


def encode(call: Call, sequence: int, sent_ns: int) -> bytes:
    """Return the header of the ``sequence``-th call of a group; ``sent_ns`` since 1970."""
    text = str(call).encode()
    if len(text) > _TEXT:
        digest = hashlib.blake2b(text, digest_size=_DIGEST).hexdigest().encode()
        text = text[: _TEXT - len(digest) - 1] + b"#" + digest
    body = _BODY.pack(sequence, len(text)) + text
    return _TIME.pack(sent_ns) + body.ljust(NBYTES - _TIME.size, b"\0")


def sent_ns(header: bytes) -> int:
    """Return when a header was sent, by its sender's clock."""
    found: int = _TIME.unpack_from(header)[0]
    return found


def described(header: bytes) -> str:
    """Return the text of a header."""
    _, length = _BODY.unpack_from(header, _TIME.size)
    start = _TIME.size + _BODY.size
    return header[start : start + length].decode(errors="replace")


def split(table: bytes) -> list[bytes]:
    """Return the headers of all members, in order of rank."""
    return [table[at : at + NBYTES] for at in range(0, len(table), NBYTES)]


def agree(table: bytes) -> bool:
    """Return whether all members are about to do the same."""
    first = table[_TIME.size : NBYTES]
    return all(
        table[at + _TIME.size : at + NBYTES] == first for at in range(NBYTES, len(table), NBYTES)
    )


def differences(table: bytes, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return who does what, a line for each, and the ranks that are not with the most."""
    callers: dict[bytes, list[int]] = {}
    for rank, header in zip(ranks, split(table), strict=True):
        callers.setdefault(header[_TIME.size :], []).append(rank)
    ordered = sorted(callers.items(), key=lambda one: (-len(one[1]), one[1]))
    lines = []
    for body, who in ordered[:_NAMED]:
        number = _BODY.unpack_from(body)[0]
        title = f"rank {who[0]}" if len(who) == 1 else f"ranks {who}"
        lines.append(f"{title} at #{number}: {described(_TIME.pack(0) + body)}")
    if len(ordered) > _NAMED:
        lines.append(f"and {len(ordered) - _NAMED} more")
    apart = tuple(sorted(rank for _, who in ordered[1:] for rank in who))
    return "\n".join(lines), apart
