"""Marks in logs: what a worker can write with its key is a mark of a stream, or none."""

from __future__ import annotations

import pytest

from stoker_wire.data import output_marks
from stoker_wire.data.output_marks import START, Mark, mark_line, read_mark
from stoker_wire.messages.control import LogStream

KEY = b"k" * output_marks.KEY_BYTES


@pytest.mark.parametrize("stream", LogStream)
def test_a_mark_is_read_as_it_was_written(stream: LogStream) -> None:
    for mark in (Mark(stream), Mark(stream, "a:b"), Mark(stream, "a/b:c", "2f6a")):
        assert read_mark(KEY, mark_line(KEY, mark)) == mark


@pytest.mark.parametrize(
    "said", [b"", b"nonsense:name", b"nonsense/stdout:name", b"\xff\xfe", b":"]
)
def test_a_mark_of_no_stream_that_has_the_key_is_a_line_like_any_other(said: bytes) -> None:
    digest = output_marks._digest(KEY, said)
    assert read_mark(KEY, b"%b%b:%b\n" % (START, digest, said)) is None
