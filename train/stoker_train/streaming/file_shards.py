"""Offer files as a data set that elastic training reads by shard and offset.

``ElasticTrainer`` gives each replica its share of every step, which changes as replicas come and go; so its
loader asks for places, and each replica reads its own. See ``stoker.train.ShardedDataset``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker_train.streaming.parsers import Parser, parser_of
from stoker_train.streaming.streams import Files, count_records, find_pieces

__all__ = ("FileShards",)


class FileShards:
    """The parts of ``files`` as shards; ``parse`` as in :func:`stoker.data.stream`.

    Their records are counted by tasks on the cluster, with ``options``, unless ``counts`` are given. It can
    be sent to replicas, who read by themselves.
    """

    def __init__(
        self,
        files: Files,
        parse: Parser | Callable[[str], Iterable[Any]],
        *,
        counts: Sequence[int] | None = None,
        piece_nbytes: int | None = None,
        **options: Any,
    ) -> None:
        self._parser = parser_of(parse)
        self._pieces = find_pieces(files, self._parser, piece_nbytes)
        if counts is None:
            counts = count_records(self._parser, self._pieces, options)
        self._counts = list(counts)

    def shards(self) -> Sequence[int]:
        """Return the number of records of each part."""
        return self._counts

    def read(self, shard: int, offset: int, count: int) -> Iterable[Any]:
        """Yield ``count`` records of a part from number ``offset`` on."""
        piece = self._pieces[shard]
        records = self._parser.read(piece.path, piece.start, piece.stop, offset)
        return itertools.islice(records, count)
