"""Lay out an epoch: pieces of files in their order, dealt to shards, as segments of records.

A *piece* is what one reader reads in one go: a file, or a range of one. A *segment* is the records of a
piece that a shard delivers. Every shard computes its own list from the same numbers, so nothing about it is
sent. The stream calls this at the beginning of an epoch; readers are told segments, and know nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stoker.exceptions import BadRequestError
from stoker_train.elastic.core.sampler import epoch_order

__all__ = (
    "Deal",
    "Piece",
    "Segment",
    "deal",
    "fingerprint",
    "mixed_seed",
    "remaining",
    "segments_of_epoch",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or the part of it from ``start`` to ``stop``, in units of its parser (bytes or records).

    ``nbytes`` is about how much there is to read. ``number`` counts the pieces of all files in order.
    """

    number: int
    path: str
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The records ``start`` to ``stop`` (None: to the end) of a piece, without those in ``omit``."""

    piece: int
    start: int = 0
    stop: int | None = None
    omit: frozenset[int] = frozenset()

    def advance(self, record: int, count: int) -> int:
        """Return the number of the record that comes after ``count`` delivered ones from ``record`` on."""
        if not self.omit:
            return record + count
        while count:
            count -= record not in self.omit
            record += 1
        return record

    def kept(self, start: int, stop: int) -> Iterator[int]:
        """Yield the records from ``start`` to ``stop`` that are delivered."""
        return (record for record in range(start, stop) if record not in self.omit)

    def size(self, counts: Sequence[int]) -> int:
        """Return how many records it delivers, if ``counts`` are those of all pieces."""
        stop = counts[self.piece] if self.stop is None else self.stop
        return max(0, stop - self.start - sum(1 for one in self.omit if self.start <= one < stop))


@dataclass(frozen=True, slots=True)
class Deal:
    """A way to deal segments: to this shard, ``rank`` of ``world``, and to all equally many records or not.

    ``equal`` is None (each gets every ``world``-th segment), ``"drop"`` (fewer than ``world`` records are
    left out) or ``"pad"`` (fewer than ``world`` come twice).
    """

    rank: int = 0
    world: int = 1
    equal: str | None = None


def segments_of_epoch(
    pieces: int,
    dealt: Deal,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    counts: Sequence[int] | None = None,
    sticky: bool = False,
) -> list[Segment]:
    """Return what a shard delivers in an epoch, in order.

    With ``shuffle`` the pieces come in an order that (seed, epoch) decide. ``sticky`` deals before it
    shuffles: a shard then has the same pieces in each epoch, and can keep them.
    """
    order = epoch_order(pieces, seed, epoch, shuffle and not sticky).tolist()
    segments = deal([Segment(piece) for piece in order], dealt, counts)
    if shuffle and sticky:
        again = epoch_order(len(segments), mixed_seed(seed, dealt.rank), epoch, True).tolist()
        segments = [segments[at] for at in again]
    return segments


def deal(segments: Sequence[Segment], dealt: Deal, counts: Sequence[int] | None) -> list[Segment]:
    """Return a shard's part of ``segments``; the parts of all shards together are each record once.

    Equal parts are runs of records, cut where they have to be; that takes ``counts`` of all pieces.
    """
    rank, world = dealt.rank, dealt.world
    if dealt.equal is None:
        return list(segments[rank::world])
    if counts is None:
        raise BadRequestError(
            "equal parts need the number of records of each piece\ngive counts=",
            field="counts",
        )
    sizes = [segment.size(counts) for segment in segments]
    total = sum(sizes)
    share = total // world if dealt.equal == "drop" else -(-total // world)
    parts: list[Segment] = []
    first = rank * share
    while share:  # past the last record it goes on with the first, which pads
        first %= total
        part = list(_cut(segments, sizes, first, min(share, total - first)))
        taken = min(share, total - first)
        parts += part
        first, share = first + taken, share - taken
    return parts


def _cut(
    segments: Sequence[Segment], sizes: Sequence[int], first: int, count: int
) -> Iterator[Segment]:
    """Yield the segments of ``count`` records from the ``first`` on."""
    ends = itertools.accumulate(sizes)
    for segment, size, end in zip(segments, sizes, ends, strict=True):
        begin = end - size
        low, high = max(first, begin), min(first + count, end)
        if low >= high:
            continue
        if low == begin and high == end:
            yield segment
            continue
        start = segment.advance(segment.start, low - begin)
        stop = segment.stop if high == end else segment.advance(start, high - low)
        yield replace(segment, start=start, stop=stop)


def remaining(
    segments: Sequence[Segment], first: int, record: int, delivered: Iterable[tuple[int, int]]
) -> list[Segment]:
    """Return what is left of a shard's list from ``record`` of segment ``first`` on.

    ``delivered`` are (segment, record) of what came before its turn, out of a shuffle buffer.
    """
    left = list(segments[first:])
    if left:
        left[0] = replace(left[0], start=record)
    omitted: dict[int, set[int]] = {}
    for segment, one in delivered:
        omitted.setdefault(segment - first, set()).add(one)
    for at, ones in omitted.items():
        left[at] = replace(left[at], omit=left[at].omit | ones)
    return left


def mixed_seed(*numbers: int) -> int:
    """Return a seed that depends on all of some numbers, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def fingerprint(pieces: Iterable[Piece]) -> str:
    """Return a name of a list of pieces, which does not depend on the folder of their files."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        name = piece.path.rpartition("/")[2]
        digest.update(f"{name} {piece.start} {piece.stop} {piece.nbytes}\n".encode())
    return digest.hexdigest()
