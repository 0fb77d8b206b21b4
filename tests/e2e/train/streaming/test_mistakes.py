"""Streams that go wrong: the error names the record, the file, or what was waited for, and nothing stays."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ActorDiedError, BadRequestError, GetTimeoutError, UnavailableError
from tests.e2e.train.streaming.conftest import write_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("_nothing_stays")


def test_an_error_of_the_parser_comes_at_its_record(tmp_path: Path) -> None:
    write_files(tmp_path, [200, 200])

    def parse(path: str) -> Iterator[int]:
        for number, line in enumerate(open(path)):  # noqa: SIM115
            if path.endswith("01.jsonl") and number == 7:
                raise KeyError(line)
            yield number

    got = []
    stream = stoker.data.stream(str(tmp_path / "*.jsonl"), parse)
    with pytest.raises(KeyError, match="at record 7 of") as caught:
        for record in stream:  # those before the error count
            got.append(record)  # noqa: PERF402  # those before the error count
    error: Any = caught.value
    assert got == [*range(200), *range(7)]
    assert (error.path, error.record) == (str(tmp_path / "part-01.jsonl"), 7)


def test_records_that_kill_their_readers_are_named(tmp_path: Path) -> None:
    write_files(tmp_path, [10])

    def parse(path: str) -> Iterator[int]:
        yield 1
        os._exit(3)

    stream = stoker.data.stream(str(tmp_path / "*.jsonl"), parse, max_failures=2)
    with pytest.raises(ActorDiedError, match=r"record 0 of .*part-00\.jsonl"):
        list(stream)
    assert stream.stats.replaced == 2


def test_a_reader_that_no_node_can_have_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, [10])
    stream = stoker.data.stream(
        str(tmp_path / "*.jsonl"), stoker.data.JsonLines(), resources={"disk": 1}
    )
    with pytest.raises(UnavailableError, match="1 disk"):
        list(stream)


def test_a_wait_says_what_it_waits_for(tmp_path: Path) -> None:
    write_files(tmp_path, [10])

    class Busy:
        def start(self) -> None:
            pass

    busy = stoker.remote(Busy).options(num_cpus=4).remote()
    stoker.get(busy.start.remote())
    stream = stoker.data.stream(
        str(tmp_path / "*.jsonl"), stoker.data.JsonLines(), timeout_s=1, batch=2, prefetch=1
    )
    with pytest.raises(GetTimeoutError, match=r"0 of 1 readers have started") as caught:
        list(stream)
    assert "record 0 of" in str(caught.value)
    # Not the scheduler's reason: it is asked for a moment only.
    assert "Reader.start" in str(caught.value)
    stoker.kill(busy)
    # The same place, with time enough for a reader to start.
    again = stoker.data.stream(str(tmp_path / "*.jsonl"), stoker.data.JsonLines(), batch=2)
    again.load_state_dict(stream.state_dict())
    assert len(list(again)) == 5


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("files", {"files": "/no/such/*"}),
        ("parse", {"parse": 3}),
        ("window", {"window": 0}),
        ("shuffle", {"shuffle": -1}),
        ("shard", {"shard": (2, 2)}),
        ("shard", {"shard": 3}),
        ("equal", {"equal": "most"}),
        ("cache", {"cache": "disk"}),
        ("timeout_s", {"timeout_s": None}),
        ("timeout_s", {"timeout_s": 0}),
        ("batch", {"batch": 1.5}),
        ("counts", {"counts": [1, 2, 3]}),
        ("num_cpu", {"num_cpu": 1}),
    ],
)
def test_a_wrong_argument_is_named_at_once(
    field: str, given: dict[str, Any], tmp_path: Path
) -> None:
    write_files(tmp_path, [10])
    arguments = {"files": str(tmp_path / "*"), "parse": stoker.data.Lines(), **given}
    with pytest.raises(BadRequestError) as caught:
        stoker.data.stream(**arguments)
    assert caught.value.field == field
