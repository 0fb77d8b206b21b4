"""Read records out of files: what a parser is, and those for lines, JSON lines, CSV and fixed lengths.

Readers call parsers, in their own processes; the stream asks one how its files are cut. A parser must yield
the same records each time: after a crash a file is read again, and what had been delivered is left out by
its number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stoker.exceptions import BadRequestError, ConflictError, WrongTypeError
from stoker_train.streaming.files import is_compressed, open_file, size_of

__all__ = (
    "CsvRows",
    "FixedRecords",
    "JsonLines",
    "Lines",
    "Parser",
    "WholeFiles",
    "fewer",
    "packed",
    "parser_of",
    "skipped",
    "steps",
)


_UNCHANGED = "files must not change while they are read, and parse must yield the same each time"


@runtime_checkable
class Parser(Protocol):
    """A way to read records from parts of files, which are ``start`` to ``stop`` in its own unit."""

    def split(self, path: str, nbytes: int) -> Iterable[tuple[int, int, int]]:
        """Yield (start, stop, bytes) of the parts of a file of about ``nbytes`` each, in order.

        Every record belongs to just one of them.
        """

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield the records of a part after the first ``skip``."""

    def count(self, path: str, start: int, stop: int) -> int:
        """Return how many records a part has."""


def parser_of(parse: Any) -> Parser:
    """Return ``parse`` as a parser: it is one, or a function of a path."""
    if isinstance(parse, type) and issubclass(parse, Parser):
        raise WrongTypeError(
            f"parse is the class {parse.__name__}\ngive one of it: {parse.__name__}()",
            field="parse",
        )
    if isinstance(parse, Parser):
        return parse
    if not callable(parse):
        raise WrongTypeError(
            f"parse is of type {type(parse).__name__}, and no function\n"
            "give a function of a path that yields records, or a parser such as stoker.data.Lines()",
            field="parse",
        )
    return WholeFiles(parse)


def skipped(records: Iterator[Any], skip: int, path: str) -> Iterator[Any]:
    """Return an iterator without its first ``skip`` records; ConflictError if it has fewer."""
    got = sum(1 for _ in itertools.islice(records, skip))
    if got < skip:
        raise fewer(path, got, skip)
    return records


def steps(length: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of equal length, the last of which may be shorter."""
    for start in range(0, length, step):
        yield start, min(start + step, length)


@dataclass(frozen=True, slots=True)
class WholeFiles:
    """A function of a path that yields records; each file is one part, read from its beginning."""

    parse: Callable[[str], Iterable[Any]]

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the file."""
        size = size_of(path)
        yield 0, size, size

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield what the function does."""
        return skipped(iter(self.parse(path)), skip, path)

    def count(self, path: str, start: int, stop: int) -> int:
        """Return how many records the function yields."""
        return sum(1 for _ in self.parse(path))


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of text without their ends, as ``str``; ``encoding=None``: as ``bytes``.

    A line belongs to the part in which it begins, so files are cut anywhere; those that end in ``.gz`` are
    not cut.
    """

    encoding: str | None = "utf-8"

    def __post_init__(self) -> None:
        if self.encoding is None:
            return
        try:
            cuts = b"\n".decode(self.encoding) == "\n"
        except (LookupError, UnicodeError):
            cuts = False
        if not cuts:
            raise BadRequestError(
                f"encoding={self.encoding!r} is not known, or its lines do not end in one byte\n"
                "give one such as utf-8, or a function of a path that opens the file",
                field="encoding",
            )

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of bytes."""
        size = size_of(path)
        if is_compressed(path):
            yield 0, -1, size
            return
        for start, stop in steps(size, nbytes):
            yield start, stop, stop - start

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield the lines that begin in a range; a negative ``stop`` is the file's end."""
        lines = skipped(_lines(path, start, stop), skip, path)
        encoding = self.encoding
        if encoding is None:
            return lines
        return (line.decode(encoding) for line in lines)

    def count(self, path: str, start: int, stop: int) -> int:
        """Return the lines of a range."""
        return sum(1 for _ in _lines(path, start, stop))


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A JSON value in each line; empty lines are no records."""

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of bytes."""
        return Lines().split(path, nbytes)

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield the values of the lines that begin in a range."""
        return map(json.loads, skipped(_filled(path, start, stop), skip, path))

    def count(self, path: str, start: int, stop: int) -> int:
        """Return the lines of a range that are not empty."""
        return sum(1 for _ in _filled(path, start, stop))


@dataclass(frozen=True, slots=True)
class CsvRows:
    """Rows of CSV as dicts by the names in the first row. A quoted field may have line ends: no cuts."""

    delimiter: str = ","
    encoding: str = "utf-8"

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the file."""
        size = size_of(path)
        yield 0, size, size

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield rows."""
        return skipped(self._rows(path), skip, path)

    def count(self, path: str, start: int, stop: int) -> int:
        """Return the rows of a file."""
        return sum(1 for _ in self._rows(path))

    def _rows(self, path: str) -> Iterator[dict[str, str]]:
        import csv
        import io

        with (
            open_file(path) as file,
            io.TextIOWrapper(file, self.encoding, newline="") as text,
        ):
            yield from csv.DictReader(text, delimiter=self.delimiter)


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """Records of ``nbytes`` bytes each, one behind the other, as ``bytes``."""

    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise BadRequestError(
                f"nbytes={self.nbytes} is no length of a record\ngive 1 or more", field="nbytes"
            )

    def split(self, path: str, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of records; BadRequestError where the file ends within one."""
        size = size_of(path)
        if is_compressed(path):
            raise packed(path)
        if size % self.nbytes:
            raise BadRequestError(
                f"the {size} bytes of {path!r} are no records of {self.nbytes} bytes\n"
                "give the length of a record as nbytes=",
                field="nbytes",
            )
        for start, stop in steps(size // self.nbytes, max(1, nbytes // self.nbytes)):
            yield start, stop, (stop - start) * self.nbytes

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield records."""
        with open_file(path) as file:
            file.seek((start + skip) * self.nbytes)
            for number in range(start + skip, stop):
                record = file.read(self.nbytes)
                if len(record) < self.nbytes:
                    raise fewer(path, number, stop)
                yield record

    def count(self, path: str, start: int, stop: int) -> int:
        """Return the records of a range."""
        return stop - start


def _lines(path: str, start: int, stop: int) -> Iterator[bytes]:
    with open_file(path) as file:
        position = start
        if start > 0:
            # From the byte before: a line that begins with the range is its own, any other is not.
            file.seek(start - 1)
            position += len(file.readline()) - 1
        for line in file:
            if 0 <= stop <= position:
                return
            position += len(line)
            yield line.removesuffix(b"\n").removesuffix(b"\r")
    if position < stop:
        raise ConflictError(
            f"{path!r} has become shorter: its end is at {position}, and was at {stop} or after it\n"
            f"{_UNCHANGED}",
            field="files",
        )


def _filled(path: str, start: int, stop: int) -> Iterator[bytes]:
    return (line for line in _lines(path, start, stop) if line and not line.isspace())


def packed(path: str) -> BadRequestError:
    """Return the error of a compressed file that would have to be read from the middle."""
    return BadRequestError(
        f"{path!r} is compressed, and its records are found by their place\nunpack it first",
        field="files",
    )


def fewer(path: str, got: int, wanted: int) -> ConflictError:
    """Return the error of a file, or a part of one, that has lost records."""
    return ConflictError(
        f"{path!r} has fewer records than before: {got}, and there were {wanted}\n{_UNCHANGED}",
        field="files",
    )
