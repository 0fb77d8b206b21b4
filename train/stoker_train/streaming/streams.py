"""Stream records from files to a loop: what users call as ``stoker.data.stream``.

A :class:`Stream` lists the files, lays out an epoch, has readers read it, and hands out records or batches.
It keeps the place of the last one handed out, and nothing else that a later pass needs.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stoker.api.calls import put
from stoker.api.remote import remote
from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.util.streams import map_stream
from stoker_train.streaming.core.blocks import Group, Place, groups, shuffled
from stoker_train.streaming.core.segments import (
    Deal,
    Piece,
    Segment,
    fingerprint,
    segments_of_epoch,
)
from stoker_train.streaming.core.state import Order, Position, load, merge, to_dict
from stoker_train.streaming.files import list_files, size_of
from stoker_train.streaming.parsers import Parser, parser_of
from stoker_train.streaming.prefetching import Prefetch
from stoker_train.streaming.reader import Reader
from stoker_train.streaming.reading import ChunkCache, Reading, ReadingOptions, StreamStats

if TYPE_CHECKING:
    from typing import Self

    from stoker_train.streaming.torch_dataset import StreamDataset

__all__ = ("Files", "Stream", "count_records", "find_pieces", "stream")

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
_PIECES = 256
"""Into so many parts data is cut, if they are not too small or too large then."""
_PIECE_NBYTES = (64 << 10, 8 << 20)
_CHUNK = 1024
_PLACEMENT = (
    "num_cpus", "memory", "resources", "label_selector", "priority", "scheduling_strategy", "runtime_env",
)  # fmt: skip
"""The options of readers that tasks have too."""


def stream(
    files: Files,
    parse: Parser | Callable[[str], Iterable[Any]],
    *,
    window: int = 16_384,
    shuffle: int = 0,
    shard: tuple[int, int] = (0, 1),
    equal: str | None = None,
    readers: int = 2,
    batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    cache: str | None = None,
    prefetch: int = 0,
    device: Any = None,
    counts: Sequence[int] | None = None,
    piece_nbytes: int | None = None,
    timeout_s: float = 300.0,
    max_failures: int = 5,
    **options: Any,
) -> Stream:
    """Return the records of ``files``, read by actors on the cluster, in one order, each once per epoch.

    ::

        json_lines = stoker.data.JsonLines()
        with stoker.data.stream("data/*.jsonl", json_lines, batch=32, shuffle=10_000) as batches:
            for epoch in range(batches.epoch, 3):
                for batch in batches:
                    ...

    ``files`` are paths, or patterns, that this process and the readers can see. ``parse`` is a parser, or a
    function of a path that yields records; it must yield the same ones each time. Each ``iter()`` goes
    through the rest of an epoch.

    - ``window``: the records that are read ahead at most; a slow loop holds the readers back.
    - ``shuffle``: the size of the shuffle buffer, in records; 0: the order of the files. Files come in
      another order too. It depends on ``seed`` and the epoch, not on the readers. Memory is
      O(window + shuffle).
    - ``shard``: (rank, world): this stream has its part of the records. ``equal="drop"`` or ``"pad"``
      gives all parts equally many, which counts the records first, unless ``counts`` are given.
    - ``readers``: actors at most; ``options`` are theirs, those of ``@stoker.remote``.
    - ``batch``: lists of so many records, or what ``collate`` makes of them; ``drop_last`` leaves out one
      that is not full.
    - ``cache="memory"``: what was read stays in the cluster's shared memory for the next epochs.
    - ``prefetch``: so many batches are ready, on ``device``, made by a thread.
    - ``timeout_s``: how long a wait for the next record may be: GetTimeoutError says what it waited for.
    - ``max_failures``: how many readers may die at one record, or each of them without reading any.

    What ``parse`` raises comes out at its record, with ``error.path`` and ``error.record``. A reader that
    dies is replaced. ``close()``, the end of a ``with`` block or of a loop leave no actors or threads.
    """
    return Stream(
        files,
        parser_of(parse),
        window=_natural("window", window),
        shuffle=_natural("shuffle", shuffle, least=0),
        deal=_deal(shard, equal),
        readers=_natural("readers", readers),
        batch=None if batch is None else _natural("batch", batch),
        collate=collate,
        drop_last=drop_last,
        seed=_natural("seed", seed, least=0),
        cache=_one_of("cache", cache, (None, "memory")) is not None,
        prefetch=_natural("prefetch", prefetch, least=0),
        device=device,
        counts=counts,
        piece_nbytes=None if piece_nbytes is None else _natural("piece_nbytes", piece_nbytes),
        timeout_s=_seconds("timeout_s", timeout_s),
        max_failures=_natural("max_failures", max_failures),
        options={"num_cpus": 1, **options},
    )


class Stream:
    """An iterable over an epoch's records or batches; :func:`stream` makes and describes it.

    One thread at a time, and one pass: a new one ends the one before.
    """

    def __init__(
        self,
        files: Files,
        parser: Parser,
        *,
        window: int,
        shuffle: int,
        deal: Deal,
        readers: int,
        batch: int | None,
        collate: Callable[[list[Any]], Any] | None,
        drop_last: bool,
        seed: int,
        cache: bool,
        prefetch: int,
        device: Any,
        counts: Sequence[int] | None,
        piece_nbytes: int | None,
        timeout_s: float,
        max_failures: int,
        options: dict[str, Any],
    ) -> None:
        # Weak: a loop that breaks is to end its pass, though the stream lives on.
        self._pass: weakref.ref[Generator[Any, None, None]] | None = None
        self._reading: Reading | None = None
        self._ahead: Prefetch[Any] | None = None
        remote(Reader).options(**options)  # a wrong one is an error here, not in the first pass
        self._parser = parser
        self._pieces = find_pieces(files, parser, piece_nbytes)
        self._parser_ref: Any = None
        self._counts = _checked_counts(counts, self._pieces)
        self._order = Order(fingerprint(self._pieces), seed, shuffle, deal, sticky=cache)
        self._position = Position()
        self._group: Group | None = None
        """The records that are handed out, and how many of them were; the position is before them."""
        self._taken = 0
        self._batch, self._collate, self._drop_last = batch, collate, drop_last
        self._prefetch, self._device = prefetch, device
        if device is not None:
            self._prefetch = max(1, prefetch)
            if collate is None and batch is not None:
                from torch.utils.data import default_collate

                self._collate = default_collate
        chunk = max(1, min(_CHUNK, window // (2 * readers + 2)))
        self._options = ReadingOptions(readers, window, chunk, timeout_s, max_failures, options)
        self._cache = ChunkCache() if cache else None
        self.stats = StreamStats()

    @property
    def epoch(self) -> int:
        """The epoch that the next record is of, from 0."""
        return self._position.epoch

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of the files, in their order."""
        return tuple(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; after its end the stream is at the next."""
        _refuse_workers()
        self._end_pass()
        going = self._iterate()
        self._pass = weakref.ref(going)
        return going

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last record or batch that was handed out, as plain data."""
        return to_dict(self._order, self._now())

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go to where ``state_dict()`` was called, with any number of readers.

        A list of the states of all shards deals what is left of the epoch anew, to any number of shards.
        ConflictError where files, seed, shuffle, equal or cache are not as they were.
        """
        self._end_pass()
        if isinstance(state, dict):
            position = load(self._order, state)
        else:
            counts = self.counts() if self._order.deal.equal else None
            position = merge(self._order, list(state), self._segments, counts)
        self._position, self._group = position, None

    def counts(self) -> list[int]:
        """Return the records of each piece, counted by tasks on the cluster where they are not known."""
        if self._counts is None:
            options = {k: v for k, v in self._options.actor.items() if k in _PLACEMENT}
            wait_s = self._options.timeout_s
            self._counts = count_records(self._parser, self._pieces, options, wait_s)
        return self._counts

    def to_torch(self) -> StreamDataset:
        """Return it as a ``torch.utils.data.IterableDataset``."""
        from stoker_train.streaming.torch_dataset import StreamDataset

        return StreamDataset(self)

    def close(self) -> None:
        """End the pass, its readers and its thread, and let go of what was kept in memory."""
        self._end_pass()
        self._parser_ref = None
        if self._cache is not None:
            self._cache = ChunkCache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise WrongTypeError(
            "a stream cannot be sent to another process\n"
            "make it where it is read; in a DataLoader: num_workers=0, its readers are on the cluster",
            field="num_workers",
        )

    # -- a pass ------------------------------------------------------------------------------------

    def _iterate(self) -> Generator[Any, None, None]:
        try:
            if self._batch is None and not self._prefetch:
                for group in self._groups():
                    self._settle(group, group.first)
                    records = group.records
                    for at in range(group.first, len(records)):
                        self._taken = at + 1
                        yield records[at]
            else:
                source = self._batches() if self._batch is not None else self._singles()
                ahead: Iterable[Any] = source
                if self._prefetch:
                    if self._order.deal.equal and self._position.rest is None:
                        self.counts()  # not in the thread, where it looks like a wait for a record
                    ahead = self._ahead = Prefetch(
                        source,
                        depth=self._prefetch,
                        device=self._device,
                        timeout_s=self._options.timeout_s + 60,  # its source says more
                        interrupt=self._interrupt,
                        progress=lambda: self.stats.records,
                    )
                for item, (group, taken) in ahead:
                    self._settle(group, taken)
                    yield item
            self._position = Position(self._position.epoch + 1)
            self._group = None
        finally:
            self._end_reading()

    def _groups(self) -> Iterator[Group]:
        """Yield what is left of the epoch, in order."""
        position, order = self._now(), self._order
        self._position, self._group = position, None
        segments = self._epoch_segments(position)
        place = position.place
        left = segments[place.segment :]
        if not left:
            return
        if self._parser_ref is None:
            self._parser_ref = put(self._parser)
        first = left[0].start if place.record is None else place.record
        self._reading = Reading(
            self._parser_ref,
            self._pieces,
            segments,
            place.segment,
            first,
            self._options,
            self.stats,
            # What is left of an epoch that others began is cut as no later epoch is: it is not kept.
            self._cache if position.rest is None else None,
        )
        if order.shuffle:
            seed = position.block_seed(order)
            yield from shuffled(self._reading, segments, order.shuffle, seed, place)
        else:
            yield from groups(self._reading, segments)

    def _batches(self) -> Iterator[tuple[Any, tuple[Group, int]]]:
        """Yield batches, each with the place after it: a group, and how many of its records are taken."""
        size, collate = self._batch or 1, self._collate
        records: list[Any] = []
        group = None
        for group in self._groups():
            at, end = group.first, len(group.records)
            while at < end:
                take = min(size - len(records), end - at)
                records += group.records[at : at + take]
                at += take
                if len(records) == size:
                    yield (records if collate is None else collate(records)), (group, at)
                    records = []
        if records and not self._drop_last and group is not None:
            batch = records if collate is None else collate(records)
            yield batch, (group, len(group.records))

    def _singles(self) -> Iterator[tuple[Any, tuple[Group, int]]]:
        for group in self._groups():
            for at in range(group.first, len(group.records)):
                yield group.records[at], (group, at + 1)

    def _settle(self, group: Group, taken: int) -> None:
        self._group, self._taken = group, taken

    def _now(self) -> Position:
        position, group = self._position, self._group
        if group is None:
            return position
        place: Place = group.after(self._taken)
        return Position(position.epoch, place, position.rest, position.dealt)

    def _segments(self, epoch: int, dealt: Deal) -> list[Segment]:
        order = self._order
        return segments_of_epoch(
            len(self._pieces),
            dealt,
            seed=order.seed,
            epoch=epoch,
            shuffle=bool(order.shuffle),
            counts=self.counts() if dealt.equal else None,
            sticky=order.sticky,
        )

    def _epoch_segments(self, position: Position) -> list[Segment]:
        if position.rest is not None:
            return list(position.rest)
        return self._segments(position.epoch, self._order.deal)

    def _interrupt(self) -> None:
        if self._reading is not None:
            self._reading.interrupt()

    def _end_reading(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    def _end_pass(self) -> None:
        going = None if self._pass is None else self._pass()
        self._pass = None
        if going is not None:
            going.close()


def find_pieces(files: Files, parser: Parser, piece_nbytes: int | None = None) -> list[Piece]:
    """Return the parts of files, about ``piece_nbytes`` each: as many as divide well among readers."""
    paths = list_files(files)
    if piece_nbytes is None:
        least, most = _PIECE_NBYTES
        piece_nbytes = min(most, max(least, sum(map(size_of, paths)) // _PIECES))
    pieces: list[Piece] = []
    for path in paths:
        for start, stop, nbytes in parser.split(path, piece_nbytes):
            pieces.append(Piece(len(pieces), path, start, stop, nbytes))
    return pieces


def count_records(
    parser: Parser,
    pieces: Sequence[Piece],
    options: dict[str, Any] | None = None,
    wait_s: float | None = None,
) -> list[int]:
    """Return the records of each piece, counted by tasks with ``options``.

    GetTimeoutError where the next number is not there within ``wait_s``.
    """

    def count(piece: Piece) -> int:
        return parser.count(piece.path, piece.start, piece.stop)

    if not pieces:
        return []
    with map_stream(count, pieces, **(options or {})) as counted:
        return [counted.next(wait_s) for _ in pieces]


def _refuse_workers() -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise BadRequestError(
            "a stream cannot be read in the worker of a DataLoader\n"
            "give num_workers=0: its readers are on the cluster, as many as readers= says",
            field="num_workers",
        )


def _deal(shard: tuple[int, int], equal: str | None) -> Deal:
    try:
        rank, world = shard
    except (TypeError, ValueError):
        raise WrongTypeError(
            f"shard={shard!r:.80} is no (rank, world)\ngive two numbers, such as (0, 2)",
            field="shard",
        ) from None
    world = _natural("shard", world)
    rank = _natural("shard", rank, least=0)
    if rank >= world:
        raise BadRequestError(
            f"shard={shard!r}: there is no rank {rank} of {world}\ngive ranks from 0", field="shard"
        )
    return Deal(rank, world, _one_of("equal", equal, (None, "drop", "pad")))


def _natural(field: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(
            f"{field}={value!r:.80} is no whole number\ngive a number from {least}", field=field
        )
    if value < least:
        raise BadRequestError(f"{field}={value}: give a number from {least}", field=field)
    return value


def _seconds(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(
            f"{field}={value!r:.80} is no number of seconds\ngive a number above 0", field=field
        )
    if not value > 0:
        raise BadRequestError(f"{field}={value}: give a number of seconds above 0", field=field)
    return value


def _one_of(field: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        shown = ", ".join(map(repr, known))
        raise BadRequestError(f"{field}={value!r:.80} is not known\ngive {shown}", field=field)
    return value


def _checked_counts(counts: Sequence[int] | None, pieces: Sequence[Piece]) -> list[int] | None:
    if counts is None:
        return None
    if len(counts) != len(pieces):
        raise BadRequestError(
            f"counts= has {len(counts)} numbers for {len(pieces)} pieces\n"
            "give what counts() of such a stream returned",
            field="counts",
        )
    return list(counts)
