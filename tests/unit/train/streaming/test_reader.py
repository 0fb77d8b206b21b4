"""Readers, in this process: chunks follow each other, whoever reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.exceptions import ConflictError
from stoker_train.streaming.core.segments import Piece, Segment
from stoker_train.streaming.parsers import WholeFiles
from stoker_train.streaming.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = Piece(0, "a file", 0, 0, 0)


def read_all(readers: list[Reader], segment: Segment, limit: int) -> tuple[list[Any], int]:
    """Return what the readers read in turn, and how often one opened the file."""
    records, record, opened = [], segment.start, 0
    for turn in range(1000):
        chunk = readers[turn % len(readers)].read(PIECE, segment, record, limit)
        records += chunk.records
        record, opened = chunk.stop, opened + chunk.opened
        if chunk.done:
            return records, opened
    raise AssertionError("no end")


@pytest.mark.parametrize("limit", [1, 3, 10, 100])
@pytest.mark.parametrize(
    ("segment", "wanted"),
    [
        (Segment(0), range(10)),
        (Segment(0, 4), range(4, 10)),
        (Segment(0, 2, 6), range(2, 6)),
        (Segment(0, 0, None, frozenset({0, 4, 9})), [1, 2, 3, 5, 6, 7, 8]),
        (Segment(0, 1, 3, frozenset({1, 2})), []),
        (Segment(0, 10), []),
    ],
)
def test_chunks_are_the_segment(limit: int, segment: Segment, wanted: Any) -> None:
    parser = WholeFiles(lambda _path: range(10))
    records, opened = read_all([Reader(parser)], segment, limit)
    assert records == list(wanted)
    assert opened == 1
    assert read_all([Reader(parser), Reader(parser)], segment, limit)[0] == list(wanted)


def test_an_error_comes_after_the_records_before_it() -> None:
    def parse(_path: str) -> Iterator[int]:
        yield from range(5)
        raise KeyError("the sixth")

    for reader in (Reader(WholeFiles(parse)), Reader(WholeFiles(parse))):
        chunk = reader.read(PIECE, Segment(0), 2, 100)
        assert (chunk.records, chunk.stop, chunk.done) == ([2, 3, 4], 5, False)
        with pytest.raises(KeyError, match="sixth"):
            reader.read(PIECE, Segment(0), 5, 100)
    # A segment that ends before it does not have it.
    assert Reader(WholeFiles(parse)).read(PIECE, Segment(0, 0, 5), 0, 5).done


def test_a_part_that_is_shorter_than_it_was_counted_is_an_error() -> None:
    reader = Reader(WholeFiles(lambda _path: range(10)))
    chunk = reader.read(PIECE, Segment(0, 0, 12), 0, 100)
    assert (len(chunk.records), chunk.done) == (10, False)
    with pytest.raises(ConflictError, match="fewer records than before: 10, and there were 12"):
        reader.read(PIECE, Segment(0, 0, 12), 10, 100)


def test_large_records_make_short_chunks() -> None:
    parser = WholeFiles(lambda _path: ({"x": [np.zeros(1 << 20)], "n": n} for n in range(4)))
    reader = Reader(parser)
    sizes = []
    record, done = 0, False
    while not done:
        chunk = reader.read(PIECE, Segment(0), record, 1000)
        record, done = chunk.stop, chunk.done
        sizes.append(len(chunk.records))
    assert sizes == [1, 1, 1, 1]
