"""Parsers: however a file is cut, each record comes once and in order, and any number can be skipped."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.exceptions import BadRequestError, ConflictError, WrongTypeError
from stoker_train.elastic.data.sources import source_of
from stoker_train.streaming.file_shards import FileShards
from stoker_train.streaming.files import list_files
from stoker_train.streaming.parsers import (
    CsvRows,
    FixedRecords,
    JsonLines,
    Lines,
    Parser,
    parser_of,
)
from stoker_train.streaming.streams import find_pieces
from stoker_train.streaming.token_files import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def parts(parser: Parser, path: Path, nbytes: int) -> list[list[Any]]:
    """Return the records of each part, having compared them with what each skip leaves."""
    found = []
    for start, stop, _ in parser.split(str(path), nbytes):
        records = list(parser.read(str(path), start, stop, 0))
        assert parser.count(str(path), start, stop) == len(records)
        for skip in {1, len(records) // 2, len(records)}:
            left = list(parser.read(str(path), start, stop, skip)) if skip <= len(records) else []
            assert list(map(str, left)) == list(map(str, records[skip:]))
        found.append(records)
    return found


def joined(found: list[list[Any]]) -> list[Any]:
    return [record for records in found for record in records]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab\n\r é", max_size=60), st.integers(1, 30))
def test_lines_can_be_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, text: str, nbytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    if not expected[-1] and not text.endswith("\r"):
        expected.pop()  # what follows the last line end is a line only if there is something
    assert joined(parts(Lines(), path, nbytes)) == expected


def test_files_of_each_kind(tmp_path: Path) -> None:
    values = [{"n": n, "text": "x" * n} for n in range(50)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(map(json.dumps, values)))
    found = parts(JsonLines(), lines, 100)
    assert joined(found) == values
    assert len(found) > 10
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    assert parts(JsonLines(), packed, 100) == [values]
    table = tmp_path / "a.csv"
    table.write_text('n,text\n1,"two\nlines"\n2,"a,b"\n')
    assert parts(CsvRows(), table, 4) == [
        [{"n": "1", "text": "two\nlines"}, {"n": "2", "text": "a,b"}]
    ]
    fixed = tmp_path / "a.bin"
    fixed.write_bytes(bytes(range(60)))
    found = parts(FixedRecords(6), fixed, 13)
    assert joined(found) == [bytes(range(at, at + 6)) for at in range(0, 60, 6)]
    assert len(found) == 5


def test_windows_of_tokens(tmp_path: Path) -> None:
    tokens = np.arange(103, dtype=np.uint16)
    np.save(tmp_path / "a.npy", tokens.reshape(1, 103))
    tokens.tofile(tmp_path / "a.tokens")
    (tmp_path / "none.tokens").touch()
    header = json.dumps(
        {
            "__metadata__": {"by": "a test"},
            "other": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "ids": {"dtype": "U16", "shape": [103], "data_offsets": [8, 214]},
        }
    ).encode()
    packed = tmp_path / "a.safetensors"
    packed.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8) + tokens.tobytes())
    wanted = [list(range(at, at + 10)) for at in range(0, 100, 10)]
    for name, parser in (
        ("a.npy", Tokens(10)),
        ("a.tokens", Tokens(10)),
        ("a.safetensors", Tokens(10, tensor="ids")),
    ):
        found = parts(parser, tmp_path / name, 60)
        assert [one.tolist() for one in joined(found)] == wanted
        assert len(found) == 4
        assert {one.dtype for one in joined(found)} == {np.dtype("uint16")}
    # One value more, for the target of the last: windows overlap by it.
    (*_, last) = joined(parts(Tokens(11, stride=10), tmp_path / "a.npy", 60))
    assert last.tolist() == list(range(90, 101))
    assert parts(Tokens(10), tmp_path / "none.tokens", 60) == []
    for bad, field in ((Tokens(10), "tensor"), (Tokens(10, tensor="no"), "tensor")):
        with pytest.raises(BadRequestError) as caught:
            list(bad.split(str(packed), 60))
        assert caught.value.field == field


def test_wrong_input_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(7))
    missing = str(tmp_path / "missing")
    wrong: dict[str, Callable[[], Any]] = {
        "files": lambda: list_files(str(tmp_path / "*.no")),
        "parse": lambda: parser_of(Lines),
        "nbytes": lambda: list(FixedRecords(4).split(str(tmp_path / "a.bin"), 4)),
        "length": lambda: Tokens(0),
        "encoding": lambda: Lines("utf-16"),
    }
    for field, call in wrong.items():
        with pytest.raises(BadRequestError) as caught:
            call()
        assert caught.value.field == field
    for files in ([], [3], missing, f"{missing}.npy"):
        with pytest.raises(BadRequestError) as caught:
            find_pieces(files, Tokens(3) if str(files).endswith("npy") else Lines())  # type: ignore[arg-type]
        assert caught.value.field == "files"
    with pytest.raises(WrongTypeError):
        parser_of(3)
    packed = tmp_path / "a.bin.gz"
    packed.write_bytes(gzip.compress(bytes(100)))
    for parser in (FixedRecords(1), Tokens(1, dtype="uint8")):
        with pytest.raises(BadRequestError, match="compressed") as caught:
            list(parser.split(str(packed), 10))
        assert caught.value.field == "files"
    named = tmp_path / "part[1].txt"
    named.touch()
    assert list_files(named) == [str(named)]


def test_a_file_with_fewer_records_than_before_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    with pytest.raises(ConflictError, match="fewer records"):
        Lines().read(str(path), 0, 4, 3)
    # Cut off before its parts were read: that is no end like any other.
    for start in (0, 4, 6):
        with pytest.raises(ConflictError, match="has become shorter"):
            list(Lines().read(str(path), start, start + 5, 0))
    tokens = tmp_path / "a.tokens"
    np.arange(10, dtype=np.uint16).tofile(tokens)
    with pytest.raises(ConflictError, match="fewer records"):
        list(Tokens(4).read(str(tokens), 0, 3, 0))


def test_shards_for_elastic_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(40)))
    counts = [3, 37]
    shards = FileShards(tmp_path / "a.txt", Lines(), counts=counts, piece_nbytes=6)
    source = source_of(FileShards(tmp_path / "a.txt", Lines(), counts=[40]), seed=0, shuffle=False)
    assert list(shards.shards()) == counts
    assert source.fetch(source.request(0, 30, 3)) == ["30", "31", "32"]
